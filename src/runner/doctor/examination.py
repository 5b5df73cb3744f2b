"""Run all checks, and decide which ones this site and engine need, and what the machine is ready for."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from runner.doctor import machine, storage
from runner.doctor.machine import Diagnosis
from runner.environments.engines import choose, engine_of
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
    none = engine != site.engine and not engine_of(engine).uses_container
    fix = "apt-get install bubblewrap squashfuse squashfs-tools" if none else ""
    found = [
        Diagnosis("site", "ok", f"{site.name} ({why})"),
        Diagnosis("engine", "wrong" if none else "ok", f"{engine}: {chosen}", fix),
        *diagnose(site, environ),
    ]
    needless = _not_needed(found, site, engine)
    needed = []
    not_needed = []
    for each in found:
        if each.verdict == "missing" and each.name in needless:
            not_needed.append(replace(each, verdict="not needed"))
        else:
            needed.append(each)
    found = needed + not_needed
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


def _not_needed(found: Sequence[Diagnosis], site: Site, engine_name: str) -> set[str]:
    """The names of the checks that this site and engine do not need."""
    engine = engine_of(engine_name)
    ok = {each.name for each in found if each.verdict == "ok"}
    # runner writes squashfs files itself; the other programs are needed only in special cases, whose errors name them
    names = {"mksquashfs", "mmdebstrap", "logins"}
    if site.is_local:
        names |= {"slurm", "srun plugins", "clock", "quota", "network"}
    if "podman" in ok or "docker" in ok:
        names |= {"podman", "docker"} - engine.programs
    names |= {"enroot", "apptainer", "bwrap", "squashfuse", "unsquashfs"} - engine.programs
    is_sandbox = "bwrap" in engine.programs
    if engine.uses_container and not is_sandbox:
        names.add("sandbox")
    if "squashfuse" not in engine.programs:
        names.add("/dev/fuse")
    if {"squashfuse", "/dev/fuse"} <= ok:
        names.add("unsquashfs")
    if not engine.srun_option and engine.pulls_with != "enroot":
        names.add("credentials")
    if "podman" not in ok:
        names.add("subuid")
        if not is_sandbox:
            names.add("namespaces")
    return names


def _readiness(
    found: Sequence[Diagnosis], site: Site, engine: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(commands that work, commands that do not, each with the reason)."""
    verdicts = {each.name: each.verdict for each in found}

    def faulty(*names: str) -> str:
        return ", ".join(name for name in names if verdicts.get(name) == "wrong")

    builder = ""
    if "ok" not in (verdicts.get("podman"), verdicts.get("docker")):
        builder = "podman and docker do not work"
    launching = ("engine", "image folder", "run folder", "slurm", "srun plugins", engine)
    reasons = {
        "build": builder,
        "import": faulty("image folder", "quota"),
        f"launch and shell on site {site.name} (engine {engine})": faulty(*launching),
    }
    ready = tuple(verb for verb, reason in reasons.items() if not reason)
    return ready, tuple(f"{verb} ({reason})" for verb, reason in reasons.items() if reason)
