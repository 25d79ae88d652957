"""Mixtures of experts: who answers for a token, and the products of those that were asked; seam: `Experts`."""
