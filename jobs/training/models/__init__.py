"""What is trained: models loaded, or made from a config."""
