"""From a plan to run folders and jobs of a scheduler."""
