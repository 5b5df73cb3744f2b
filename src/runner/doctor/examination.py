"""Every diagnosis at once, which of them this site and engine need, and what the machine is ready for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from runner.doctor import machine, storage
from runner.doctor.machine import Diagnosis
from runner.environments.engines import PLUGINS, choose
from runner.site import Site


@dataclass(frozen=True)
class Examination:
    """What was looked at, and what follows from it."""

    diagnoses: tuple[Diagnosis, ...]
    """what is needed first, what is not needed last"""
    ready: tuple[str, ...]
    """verbs that work here"""
    not_ready: tuple[str, ...]
    """verbs that do not, each with the reason"""


def examine(site: Site, why: str, environ: Mapping[str, str]) -> Examination:
    """Look at everything; changes nothing, and takes under two seconds."""
    engine, chosen = choose(site, environ)
    none = engine == "host" and site.engine != "host"
    fix = "apt-get install bubblewrap squashfuse squashfs-tools" if none else ""
    found = [
        Diagnosis("site", "ok", f"{site.name} ({why})"),
        Diagnosis("engine", "wrong" if none else "ok", f"{engine}: {chosen}", fix),
        *diagnose(site, environ),
    ]
    needless = _not_needed(found, site, engine)
    found = [
        replace(each, verdict="not needed") if each.verdict == "missing" and each.name in needless else each
        for each in found
    ]
    found.sort(key=lambda each: each.verdict == "not needed")  # stable: the order of reading is kept
    return Examination(tuple(found), *_readiness(found, site, engine))


def diagnose(site: Site, environ: Mapping[str, str]) -> tuple[Diagnosis, ...]:
    """Every diagnosis, in reading order."""
    checks: tuple[Callable[[], Diagnosis], ...] = (
        machine.machine,
        partial(machine.architecture, site),
        machine.clock,
        partial(machine.slurm, site, environ),
        partial(machine.plugins, site),
        partial(machine.edf_lookup, environ),
        *(partial(machine.program, name) for name in machine.PROGRAMS),
        machine.fuse,
        machine.namespaces,
        machine.subordinate_ids,
        partial(storage.image_folder, site, environ),
        partial(storage.quota, site, environ),
        partial(storage.striping, site, environ),
        partial(storage.run_folder, site, environ),
        partial(storage.credentials, environ),
        partial(storage.registry_logins, environ),
        partial(storage.hugging_face, environ),
    )
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return tuple(pool.map(lambda check: check(), checks))


def _not_needed(found: Sequence[Diagnosis], site: Site, engine: str) -> set[str]:
    """The names of what this site and engine do without."""
    ok = {each.name for each in found if each.verdict == "ok"}
    # runner writes squashfs files itself; the others help in special cases, which name them when they arise
    names = {"mksquashfs", "mmdebstrap", "logins"}
    if site.is_local:
        names |= {"slurm", "srun plugins", "clock", "quota"}
    if "podman" in ok or "docker" in ok:
        names |= {"podman", "docker"} - {engine}
    names |= {"enroot", "apptainer"} - {engine}
    if engine != "sandbox":
        names.add("bwrap")
    if engine not in {"sandbox", "podman"}:  # the others read squashfs files themselves, or not at all
        names |= {"squashfuse", "unsquashfs", "/dev/fuse"}
    if {"squashfuse", "/dev/fuse"} <= ok:
        names.add("unsquashfs")
    if engine not in {*PLUGINS.values(), "enroot"}:
        names.add("credentials")
    if "podman" not in ok:
        names.add("subuid")
        if engine != "sandbox":
            names.add("namespaces")
    return names


def _readiness(found: Sequence[Diagnosis], site: Site, engine: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(verbs that work, those that do not with the reason)."""
    verdicts = {each.name: each.verdict for each in found}

    def faulty(*names: str) -> str:
        return ", ".join(name for name in names if verdicts.get(name) == "wrong")

    builder = "" if "ok" in (verdicts.get("podman"), verdicts.get("docker")) else "podman and docker do not work"
    launching = ("engine", "image folder", "run folder", "slurm", "srun plugins", engine)
    reasons = {
        "build": builder,
        "import": faulty("image folder", "quota"),
        f"launch and shell on site {site.name} (engine {engine})": faulty(*launching),
    }
    ready = tuple(verb for verb, reason in reasons.items() if not reason)
    return ready, tuple(f"{verb} ({reason})" for verb, reason in reasons.items() if reason)
