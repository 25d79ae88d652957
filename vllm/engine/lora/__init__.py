"""Adapters of the model, many at once; seam: `Adapters`."""
