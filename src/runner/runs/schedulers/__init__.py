"""Schedulers, one module each (`Scheduler` in scheduler.py); Slurm's commands; the one template of the batch script."""
