"""The model: a forward pass that knows no cache; seam: `Attend`."""
