"""Checks of this machine and site, each with a verdict and a fix."""
