"""From what a training has saved to a Hugging Face model."""
