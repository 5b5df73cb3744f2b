"""Training, side by side with the stock scripts."""
