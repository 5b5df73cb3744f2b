"""What this machine and site can do: one line each, with a verdict and how to mend what is missing."""
