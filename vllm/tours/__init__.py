"""The companion lessons: short stories over the engine's own files, run as their pages say."""
