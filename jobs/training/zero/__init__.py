"""DeepSpeed: its configuration."""
