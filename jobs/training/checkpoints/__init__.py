"""Saving, leaving, resuming."""
