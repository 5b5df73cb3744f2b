"""Curves of runs and pictures of them."""
