"""Causal language modelling: its arguments, text, blocks, model and trainer."""
