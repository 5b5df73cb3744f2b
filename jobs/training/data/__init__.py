"""What is trained on: text of our own, datasets, tokenizers."""
