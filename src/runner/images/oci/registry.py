"""Images straight from a registry: no engine, nothing written to disk."""
