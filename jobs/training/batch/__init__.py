"""How many sequences a step takes."""
