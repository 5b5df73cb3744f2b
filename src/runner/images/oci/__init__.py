"""Byte pumps between us and the engines: storage, builds, pipes."""
