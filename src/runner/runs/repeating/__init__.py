"""The same launch again, and what differs between two."""
