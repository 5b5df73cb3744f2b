"""How much memory a training takes, on paper."""
