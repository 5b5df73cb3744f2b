"""The engines, one module each, and the choice of an engine that the machine supports."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace

from runner.detection import srun_options
from runner.environments.edf import parse_mount
from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    EDF_FILE,
    check_mounts,
    check_names,
    refuse,
    refuse_annotations,
    without_defaults,
)
from runner.environments.environment import Attachment, Environment, emit_edf
from runner.errors import unknown
from runner.machine import probe, process
from runner.site import Site

ENGINES = (
    "ce",
    "sarus",
    "pyxis",
    "enroot",
    "podman",
    "docker",
    "apptainer",
    "sandbox",
    "host",
)
"""the names of the engines, which are those of their modules. If srun has the plug-ins of several
engines, the first of them is chosen"""


def engine_of(name: str) -> Engine:
    """The engine of a site, a run or an option. Raises RunnerError for an unknown name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    engine: Engine = importlib.import_module(f"{__name__}.{name}").ENGINE  # only the one in use
    return engine


def plugin_engines() -> dict[str, str]:
    """srun's option of each plug-in -> the name of its engine."""
    engines = map(engine_of, ENGINES)
    return {engine.srun_option: engine.name for engine in engines if engine.srun_option}


def attach(
    environment: Environment,
    site: Site,
    engine: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Attachment:
    """What `engine` (default: the site's) adds to a step, so that its command runs inside the environment.

    The environment's variables and mounts override the site's. Raises RunnerError for a field that the engine cannot
    express: no field is silently dropped.
    """
    environ = os.environ if environ is None else environ
    name = engine or site.engine
    if name == "auto":
        name = choose(site)[0]
    chosen = engine_of(name)
    full, notes = decided(environment, site, chosen, environ)
    if chosen.needs_image and not full.image:
        fix = "set `image` in the EDF, or use the engine host, without a container"
        raise refuse(full, "image", name, "`image` is empty", fix)
    if chosen.uses_container:
        check_names(full, name)
        if not chosen.reads_edf:
            refuse_annotations(full, name)
            check_mounts(full, name, chosen.mounts)
    attachment = chosen.attach(full, site)
    files = {EDF_FILE: emit_edf(full, chosen.comment), **attachment.files}
    return replace(attachment, files=files, notes=(*notes, *attachment.notes))


def decided(
    environment: Environment, site: Site, engine: Engine, environ: Mapping[str, str]
) -> tuple[Environment, tuple[str, ...]]:
    """(environment with the site's values, and with `${VAR:-default}` expanded where the engine does not; notes)."""
    full = with_site(environment, site)
    store_notes: tuple[str, ...] = ()
    if engine.image_in_store is not None:
        full, store_notes = engine.image_in_store(full, site, environ)
    if not engine.resolved_fields:
        return full, store_notes
    full, notes = without_defaults(full, environ, only=engine.resolved_fields)
    return full, (*store_notes, *notes)


def with_site(environment: Environment, site: Site) -> Environment:
    """The environment with the site's variables, mounts and annotations; its own take precedence."""
    mounts = tuple(parse_mount(text, f"site {site.name}") for text in site.mounts)
    targets = {mount.target for mount in environment.mounts}
    return replace(
        environment,
        env={**site.env, **environment.env},
        annotations={**site.annotations, **environment.annotations},
        # after the environment's own mounts, whose indexes appear in messages
        mounts=(*environment.mounts, *(mount for mount in mounts if mount.target not in targets)),
    )


def choose(site: Site) -> tuple[str, str]:
    """(the engine to use on a site, the reason). `auto` selects one that this machine supports."""
    if site.engine != "auto":
        return site.engine, f"set by site {site.name}"
    if not site.is_local:
        for option, engine in plugin_engines().items():
            if option in srun_options():
                return engine, f"srun has --{option}"
    reason = why_no_sandbox()
    if reason is None:
        return "sandbox", "bubblewrap is installed, and squashfuse or unsquashfs"
    for engine in ("podman", "apptainer"):
        if process.which(engine):
            return engine, f"{engine} is installed, and {reason}"
    return "host", f"there is no container engine: {reason}; podman and apptainer are not installed"


def why_no_sandbox() -> str | None:
    """Why the sandbox cannot be used on this machine; None if it can."""
    if process.which("bwrap") is None:
        return "bubblewrap is not installed"
    if process.which("unsquashfs") is None and not (
        probe.fuse_usable() and process.which("squashfuse")
    ):
        return "neither squashfuse with /dev/fuse nor unsquashfs is installed"
    if process.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    for words in (
        ("unshare", "--mount", "true"),
        ("unshare", "--map-root-user", "--mount", "true"),
    ):
        if process.run(words, check=False, timeout_seconds=5).exit_code == 0:
            return None
    return "this user may not create namespaces"
