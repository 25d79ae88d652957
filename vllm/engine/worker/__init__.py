"""From a scheduler's decision to tensors, and back to tokens; seam: `Executor`."""
