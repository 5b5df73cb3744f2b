"""Run all checks, and decide which ones this site and engine need, and what the machine is ready for."""

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
    """The results of all checks, and the conclusions."""

    diagnoses: tuple[Diagnosis, ...]
    """needed ones first"""
    ready: tuple[str, ...]
    """commands that work on this machine"""
    not_ready: tuple[str, ...]
    """commands that do not work, each with the reason"""


def examine(site: Site, why: str, environ: Mapping[str, str]) -> Examination:
    """Run all checks. Changes nothing, and takes less than two seconds."""
    engine, chosen = choose(site)
    none = engine == "host" and site.engine != "host"
    fix = "apt-get install bubblewrap squashfuse squashfs-tools" if none else ""
    found = [
        Diagnosis("site", "ok", f"{site.name} ({why})"),
        Diagnosis("engine", "wrong" if none else "ok", f"{engine}: {chosen}", fix),
        *diagnose(site, environ),
    ]
    needless = _not_needed(found, site, engine)
    found = [
        replace(each, verdict="not needed")
        if each.verdict == "missing" and each.name in needless
        else each
        for each in found
    ]
    found.sort(
        key=lambda each: each.verdict == "not needed"
    )  # a stable sort, which keeps the order within each group
    return Examination(tuple(found), *_readiness(found, site, engine))


def diagnose(site: Site, environ: Mapping[str, str]) -> tuple[Diagnosis, ...]:
    """Every diagnosis, in display order."""
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
        machine.sandbox,
        partial(storage.image_folder, site, environ),
        partial(storage.quota, site, environ),
        partial(storage.striping, site, environ),
        partial(storage.run_folder, site, environ),
        partial(storage.network, site, environ),
        partial(storage.credentials, environ),
        partial(storage.registry_logins, environ),
        partial(storage.hugging_face, environ),
    )
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return tuple(pool.map(lambda check: check(), checks))


def _not_needed(found: Sequence[Diagnosis], site: Site, engine: str) -> set[str]:
    """The names of the checks that this site and engine do not need."""
    ok = {each.name for each in found if each.verdict == "ok"}
    # runner writes squashfs files itself; the other programs are needed only in special cases, whose errors name them
    names = {"mksquashfs", "mmdebstrap", "logins"}
    if site.is_local:
        names |= {"slurm", "srun plugins", "clock", "quota", "network"}
    if "podman" in ok or "docker" in ok:
        names |= {"podman", "docker"} - {engine}
    names |= {"enroot", "apptainer"} - {engine}
    if engine != "sandbox":
        names.add("bwrap")
    if engine not in {"sandbox", "host"}:
        names.add("sandbox")
    if engine not in {
        "sandbox",
        "podman",
    }:  # the others read squashfs files themselves, or not at all
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


def _readiness(
    found: Sequence[Diagnosis], site: Site, engine: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(commands that work, commands that do not, each with the reason)."""
    verdicts = {each.name: each.verdict for each in found}

    def faulty(*names: str) -> str:
        return ", ".join(name for name in names if verdicts.get(name) == "wrong")

    builder = (
        ""
        if "ok" in (verdicts.get("podman"), verdicts.get("docker"))
        else "podman and docker do not work"
    )
    launching = ("engine", "image folder", "run folder", "slurm", "srun plugins", engine)
    reasons = {
        "build": builder,
        "import": faulty("image folder", "quota"),
        f"launch and shell on site {site.name} (engine {engine})": faulty(*launching),
    }
    ready = tuple(verb for verb, reason in reasons.items() if not reason)
    return ready, tuple(f"{verb} ({reason})" for verb, reason in reasons.items() if reason)
