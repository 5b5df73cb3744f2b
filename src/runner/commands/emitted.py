"""What plain srun, or a container engine, takes without runner: the text of `runner env emit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runner.environments.engines import attach, with_site
from runner.environments.engines.ce import FILE
from runner.environments.engines.shared import without_defaults
from runner.environments.environment import Environment, emit_edf
from runner.errors import RunnerError
from runner.expansion import literal
from runner.runs.quoting import live
from runner.site import Site


def emitted(
    environment: Environment, site: Site, engine: str, environ: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """(text, warnings): an EDF for ce and sarus, else a bash script that takes the command as its arguments."""
    if engine == "sandbox":
        raise RunnerError(
            "the sandbox has no command line of its own",
            "it is a script that lies in the run folder",
            "runner shell, or runner launch --dry-run; --as podman gives a command line",
        )
    located = replace(environment, image=_with_folder(environment.image, site, environ))
    origin = f"From {environment.path or environment.name} for site {site.name}, by `runner env emit --as {engine}`."
    if engine == "ce":
        attach(located, site, engine, environ)  # raises for what the engine cannot express
        use = "Use: srun --environment=./FILE.toml COMMAND"
        return emit_edf(with_site(located, site), f"{origin}\n{use}", sources=f"site {site.name}"), ()
    attachment = attach(located, site, engine, environ)
    if engine == "sarus":
        body = attachment.files[FILE].partition("\n")[2]
        return f"# {origin}\n# Use: srun --edf=./FILE.toml COMMAND\n{body}", attachment.notes
    if engine in {"podman", "docker"}:
        return _container_script(located, site, engine, environ, origin)
    prefix = attachment.prefix
    notes = attachment.notes
    if engine == "enroot":
        at = prefix.index("--conf")
        prefix = (*prefix[:at], *prefix[at + 2 :])
        notes = (*notes, "without runner's --conf file the host's variables do not enter, and the entrypoint runs")
    command = ("srun", *attachment.flags, *prefix) if engine == "pyxis" else prefix
    return _script(origin, attachment.exports, command), notes


def _with_folder(image: str, site: Site, environ: Mapping[str, str]) -> str:
    """The image with the site's folder in place of ${RUNNER_IMAGES}, so that the text stands alone."""
    if "${RUNNER_IMAGES}" not in image:
        return image
    return image.replace("${RUNNER_IMAGES}", literal(str(site.images(environ))))


def _container_script(
    environment: Environment, site: Site, engine: str, environ: Mapping[str, str], origin: str
) -> tuple[str, tuple[str, ...]]:
    full, notes = without_defaults(with_site(environment, site), environ)
    folder = (("--workdir", full.workdir),) if full.workdir else ()
    mounts = [("--volume", f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}") for m in full.mounts]
    env = [("--env", f"{name}={value}") for name, value in full.env.items() if value]
    unset = [("--unsetenv", name) for name, value in full.env.items() if not value and engine == "podman"]
    dropped = ("env", *(word for name, value in full.env.items() if not value for word in ("-u", name)))
    options = (*folder, *mounts, *env, *unset, *(("--device", device) for device in full.devices))
    image = ("--rootfs", f"{full.image}:O") if full.is_squashfs else (full.image.replace("#", "/", 1),)
    if full.is_squashfs:
        notes = (*notes, "mount the squashfs file first: squashfuse IMAGE.sqsh FOLDER, and name FOLDER after --rootfs")
    # not `--ipc host`: rootless podman refuses it where there is no /dev/mqueue
    command = (
        *(engine, "run", "--rm", "--interactive", "--network", "host", "--volume", "/dev/shm:/dev/shm"),
        *(word for option in options for word in option),
        *(() if full.entrypoint else ("--entrypoint", "")),
        *(() if full.writable else ("--read-only",)),
        *image,
        *(dropped if engine == "docker" and len(dropped) > 1 else ()),
    )
    return _script(origin, {}, command), notes


def _script(origin: str, exports: Mapping[str, str], command: tuple[str, ...]) -> str:
    lines = ["#!/usr/bin/env bash", f"# {origin}", "# Use: bash THIS_FILE COMMAND…"]
    lines += ["# shellcheck disable=SC2016  # what looks like a variable there is text", "set -eu"]
    lines += [f"export {name}={live(value)}" for name, value in exports.items()]
    rows = ["exec"]
    for word in (*(live(word) for word in command), '"$@"'):
        if word.startswith("-") or word == '"$@"':
            rows.append(word)
        else:
            rows[-1] += f" {word}"
    lines.append(" \\\n  ".join(rows))
    return "\n".join(lines) + "\n"
