"""The engines, one module each: environment + site -> Attachment. Also chooses an engine that the machine supports."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from runner.detection import slurm_plugins
from runner.environments.edf import parse_mount
from runner.environments.engines import ce
from runner.environments.engines.shared import (
    MountSyntax,
    check_mounts,
    check_names,
    refuse_annotations,
    without_defaults,
)
from runner.environments.environment import Attachment, Environment, emit_edf
from runner.errors import unknown
from runner.machine import probe, process
from runner.site import Site

ENGINES = ("ce", "sarus", "pyxis", "enroot", "podman", "docker", "apptainer", "sandbox", "host")
"""the names of the modules. Each has `attach(environment, site) -> Attachment`, COMMENT (the first line of the EDF in
the run folder), MOUNTS (its mount syntax), and DECIDED: the fields in which runner expands `${VAR:-default}`, because
the engine does not"""
PLUGINS = {"environment": "ce", "edf": "sarus", "container-image": "pyxis"}
"""srun's flag of each plug-in -> its engine; the first that a cluster has is chosen"""


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
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    full, notes = decided(environment, site, name, environ)
    module = _module(name)
    if name != "host":
        check_names(full, name)
    if name not in {"ce", "sarus", "host"}:  # they read the EDF themselves, or mount nothing
        refuse_annotations(full, name)
        check_mounts(
            full, name, module.MOUNTS, flags=name != "pyxis"
        )  # pyxis passes flags on unchanged
    attachment: Attachment = module.attach(full, site)
    files = {ce.FILE: emit_edf(full, module.COMMENT), **attachment.files}
    return replace(attachment, files=files, notes=(*notes, *attachment.notes))


def mount_syntax(engine: str) -> MountSyntax:
    """How an engine writes mounts."""
    syntax: MountSyntax = _module(engine).MOUNTS
    return syntax


def _module(engine: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{engine}")  # import only the one in use


def decided(
    environment: Environment, site: Site, engine: str, environ: Mapping[str, str]
) -> tuple[Environment, tuple[str, ...]]:
    """(environment with the site's values, and with `${VAR:-default}` expanded where the engine does not; notes)."""
    full = with_site(environment, site)
    own: tuple[str, ...] = ()
    if engine == "sarus":
        from runner.environments.engines import sarus

        full, own = sarus.in_store(full, site, environ)
    fields: tuple[str, ...] = _module(engine).DECIDED
    if not fields:
        return full, own
    full, notes = without_defaults(full, environ, only=fields)
    return full, (*own, *notes)


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
        for flag, engine in PLUGINS.items():
            if flag in slurm_plugins():
                return engine, f"srun has --{flag}"
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
