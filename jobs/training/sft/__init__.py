"""Supervised fine-tuning: its arguments, its trainer."""
