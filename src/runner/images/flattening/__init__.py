"""From layers, top layer first, to one tree."""
