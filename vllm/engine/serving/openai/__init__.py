"""The HTTP API that OpenAI's clients speak; seam: none."""
