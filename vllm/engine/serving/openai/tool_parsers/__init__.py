"""How models write down a call of their own accord, one format a file; seam: a `read` as `HermesParser` has it."""
