"""Detect the site that this machine belongs to, and its Slurm. Only local files and commands are used, not the
network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files, process
from runner.site import Site
from runner.site_files import load_site, signs, site_names, user_folder


def find_site(name: str | None, environ: Mapping[str, str]) -> tuple[Site, str]:
    """The site to use and why: `--site`, RUNNER_SITE, then what this machine looks like."""
    if name:
        return load_site(name, environ), "--site"
    if environ.get("RUNNER_SITE"):
        return load_site(environ["RUNNER_SITE"], environ), "RUNNER_SITE"
    found, why = _detect(environ)
    return load_site(found, environ), f"detected: {why}"


def _detect(environ: Mapping[str, str]) -> tuple[str, str]:
    """The name of the site that this machine appears to belong to, and the reason. Does not use the network."""
    slurm = _slurm_answers(environ)
    cluster = cluster_name(environ) if slurm or environ.get("CLUSTER_NAME") else None
    mentioned = ("paths", cluster) if cluster else ("paths",)
    # the user's own sites first; of a site's files, only the strongest one says how to recognize the site
    own = {path.stem for path in user_folder(environ).glob("*.toml")}
    for name in sorted(site_names(environ), key=lambda name: (name not in own, name)):
        for kind, word in signs(name, environ, mentioned):
            if kind == "clusters" and word == cluster:
                return name, f"the cluster is called {cluster}"
            if kind == "paths" and files.exists(word):
                return name, f"{word} exists on this machine"
    if not slurm:
        there = process.which("sbatch") is not None
        why = (
            "sbatch is installed, but Slurm is not set up"
            if there
            else "sbatch is not installed on this machine"
        )
        return "local", why
    if "container-image" in srun_options() and "environment" not in srun_options():
        return "generic-pyxis", "srun has --container-image"
    known = ", ".join(f"--{flag}" for flag in sorted(srun_options() & {"environment", "edf"}))
    return (
        "generic-slurm",
        f"srun has {known}" if known else "sbatch is installed, and srun has no container plugin",
    )


def slurm_configuration(environ: Mapping[str, str]) -> Path | None:
    """Slurm's configuration file on this machine; None if the controller distributes it instead (configless Slurm)."""
    named = environ.get("SLURM_CONF")
    places = (
        (named,)
        if named
        else ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm/etc/slurm.conf")
    )
    return next((Path(place) for place in places if files.is_file(place)), None)


def _slurm_answers(environ: Mapping[str, str]) -> bool:
    """Whether this machine belongs to a Slurm cluster. An installed Slurm package alone is not enough."""
    if process.which("sbatch") is None or slurm_configuration(environ) is not None:
        return process.which("sbatch") is not None
    with suppress(RunnerError):
        return process.run(("scontrol", "ping"), check=False, timeout_seconds=3).exit_code == 0
    return False


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """The name of this Slurm cluster, from the environment, Slurm's configuration file, or else its controller."""
    named = environ.get("SLURM_CLUSTER_NAME") or environ.get("CLUSTER_NAME")
    if named or process.which("scontrol") is None:
        return named
    path = slurm_configuration(environ)
    with suppress(RunnerError):  # a controller that does not answer must not stop a dry run
        text = (
            files.text_of(path)  # whatever the encoding of a comment
            if path
            else process.run(("scontrol", "show", "config"), timeout_seconds=3).stdout
        )
        found = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
        return found[1] if found else None
    return None


@lru_cache(maxsize=1)
def srun_options() -> frozenset[str]:
    """The long options with a value of this machine's srun, with those that container plug-ins add."""
    if process.which("srun") is None:
        return frozenset()
    text = process.run(("srun", "--help"), check=False, timeout_seconds=5).stdout
    return frozenset(re.findall(r"--([a-z0-9-]+)=", text))
