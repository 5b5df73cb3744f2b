"""The code that a run sees: which files, kept once for all runs that have the same."""
