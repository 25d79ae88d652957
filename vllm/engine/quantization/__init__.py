"""Weights, keys and values in few bits; seam: `QuantizationMethod`."""
