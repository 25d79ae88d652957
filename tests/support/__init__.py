"""Helpers of tests: they hold no test, and no test imports another test."""
