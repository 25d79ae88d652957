"""One engine on several workers; seam: `Executor`."""
