"""Slurm as it is seen from here, and where its container plugins look for environments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from runner.detection import cluster_name, slurm_plugins
from runner.doctor.diagnosis import Diagnosis
from runner.errors import RunnerError
from runner.machine import process
from runner.site import Site

_SECONDS = 1.5
_ENGINES = {"environment": "ce", "edf": "sarus", "container-image": "pyxis"}
_FLAGS = {engine: flag for flag, engine in _ENGINES.items()}


def slurm(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Slurm's client, and the cluster that it speaks to."""
    wanted = site.scheduler == "slurm"
    missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if process.which(name) is None]
    if missing:
        text = f"not on this machine: {', '.join(missing)}"
        return Diagnosis("slurm", "wrong", text, "log in to the cluster, or --site local") if wanted else Diagnosis(
            "slurm", "missing", f"{text}; jobs run on this machine alone", "apt-get install slurm-client"
        )  # fmt: skip
    try:
        shown = process.run(("sbatch", "--version"), check=False, timeout_seconds=_SECONDS).stdout
        ping = process.run(("scontrol", "ping"), check=False, timeout_seconds=_SECONDS)
    except RunnerError as error:  # busy, perhaps: no reason to call it broken
        return Diagnosis("slurm", "missing", f"{error.what}: {error.why}", error.fix)
    version = re.search(r"\d+\.\d+[\w.-]*", shown)
    found = version[0] if version else ""
    if ping.exit_code != 0:
        words = (ping.stdout + ping.stderr).strip().splitlines() or ["no answer"]
        text = f"the controller does not answer: {words[0][:160]}"
        fix = "ask the admin, or --site local" if wanted else "set up a cluster, or use this machine as it is"
        return Diagnosis("slurm", "wrong" if wanted else "missing", text, fix, found)
    return Diagnosis("slurm", "ok", f"cluster {cluster_name(environ) or 'unknown'} answers", version=found)


def plugins(site: Site) -> Diagnosis:
    """The container plugins of srun, and whether the site's engine is among them."""
    if process.which("srun") is None:
        return Diagnosis("srun plugins", "missing", "no srun on this machine")
    try:
        there = sorted(slurm_plugins())
    except RunnerError as error:
        return Diagnosis("srun plugins", "missing", f"{error.what}: {error.why}", error.fix)
    text = ", ".join(f"--{flag} ({_ENGINES[flag]})" for flag in there) or "none"
    flag = _FLAGS.get(site.engine)
    if flag is not None and flag not in there:
        text = f"srun has no --{flag}, which the engine {site.engine} of {site.name} needs; it has: {text}"
        return Diagnosis("srun plugins", "wrong", text, "log in to the cluster, or choose another --site or --engine")
    return Diagnosis("srun plugins", "ok" if there else "missing", text)


def edf_lookup(environ: Mapping[str, str]) -> Diagnosis:
    """Where the Container Engine looks for an environment that is given by name, and what lies there."""
    text = f"EDF_PATH={environ['EDF_PATH']}" if environ.get("EDF_PATH") else "~/.edf (EDF_PATH is not set)"
    listed = environ.get("EDF_PATH") or f"{environ.get('HOME', '~')}/.edf"
    folders = [Path(folder) for folder in listed.split(":") if folder]
    gone = [str(folder) for folder in folders if not folder.is_dir()]
    relative = [str(folder) for folder in folders if not folder.is_absolute()]
    if environ.get("EDF_PATH") and (gone or relative):
        why = f"not there: {', '.join(gone)}" if gone else f"not absolute: {', '.join(relative)}"
        return Diagnosis("EDF lookup", "wrong", f"{text}; {why}", "correct EDF_PATH: absolute folders, joined by `:`")
    names = sorted(path.name for folder in folders if folder.is_dir() for path in folder.glob("*.toml"))
    twice = [name for name in names if name.endswith(".toml.toml")]
    if twice:
        fix = f"mv {twice[0]} {twice[0].removesuffix('.toml')}"
        return Diagnosis("EDF lookup", "wrong", f"{text}; {twice[0]} is found by no name", fix)
    return Diagnosis("EDF lookup", "ok", f"{text}: {len(names)} environments")
