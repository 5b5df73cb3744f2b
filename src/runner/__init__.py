"""From a Containerfile to a running, restartable Slurm job."""

__version__ = "0.1.0"
