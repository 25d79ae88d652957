"""The HTTP API that Anthropic's clients speak; seam: none."""
