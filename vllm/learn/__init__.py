"""Build it yourself: lessons with parts left out, a grader for what you write there, and your parts in the engine."""
