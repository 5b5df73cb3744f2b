"""From a checkpoint to a Hugging Face model."""
