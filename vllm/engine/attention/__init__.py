"""How a step's queries meet the keys and values of their sequences; seam: `AttentionBackend`."""
