"""Schedulers, one module each (`Scheduler` in scheduler.py); Slurm's commands; the template of the batch script."""
