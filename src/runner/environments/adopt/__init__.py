"""An EDF, and a job file, from what someone has already: a command line, flags of pyxis, or a batch script."""
