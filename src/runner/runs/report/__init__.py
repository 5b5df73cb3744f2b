"""A report of runs: one HTML page that needs no network, or Markdown."""
