"""The lab: real Slurm, podman, registry and squashfs tools, started for tests and stopped afterwards.

Nothing here imports `runner`: what the lab accepts or refuses is decided by the documents of the real systems alone.
"""
