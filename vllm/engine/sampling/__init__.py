"""From logits to tokens; what a request asks, and what a grammar allows; seam: `Grammar`."""
