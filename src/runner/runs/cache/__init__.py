"""The cache that runs share, and what of the hub lies in it."""
