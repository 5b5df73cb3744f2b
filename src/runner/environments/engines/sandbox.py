"""The embedded engine: squashfuse (or unsquashfs) and bubblewrap, as root or as an ordinary user, without a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    MountSyntax,
    bare_squashfs,
    refuse,
    registry_or_podman,
    script,
    single_quoted,
)
from runner.environments.environment import Attachment, Environment
from runner.site import Site


def attach(environment: Environment, site: Site) -> Attachment:
    """The script, its configuration, and the words that start it."""
    if bare_squashfs(environment):
        why = f"{environment.image!r} would be read as the name of an image in a registry"
        fix = f"write an absolute path, or ./{environment.image}"
        raise refuse(environment, "image", "sandbox", why, fix)
    if not environment.is_squashfs:
        why = f"the sandbox runs only squashfs files, but {environment.image!r} is the name of an image in a registry"
        fix = f"run `runner import {registry_or_podman(environment)}`, and set `image` to the path that it prints"
        raise refuse(environment, "image", "sandbox", why, fix)
    for index, device in enumerate(environment.devices):
        if not device.startswith(("/dev/", "nvidia.com/gpu=")):
            why = f"the sandbox shows all of /dev and supports nvidia.com/gpu=…, but not {device!r}"
            raise refuse(
                environment, f"devices.{index}", "sandbox", why, "use the engine podman or sarus"
            )
    return Attachment(
        files={
            "payload/sandbox.sh": script("sandbox.sh"),
            "payload/environment.sh": script("environment.sh"),
            "payload/gpus.sh": script("gpus.sh"),
            "payload/cdi.awk": script("cdi.awk"),
            "payload/sandbox.conf": conf(environment, {"engine": "sandbox"}),
        },
        prefix=("bash", "${RUNNER_RUN}/payload/sandbox.sh"),
    )


ENGINE = Engine(
    name="sandbox",
    attach=attach,
    comment="What the container of this run sees; payload/sandbox.conf says the same to payload/sandbox.sh.",
    mounts=MountSyntax(flags=frozenset({"ro", "rw", "rbind", "bind", "sqsh"})),
    programs=frozenset({"bwrap", "squashfuse", "unsquashfs"}),
    has_command_line=False,
)


def conf(environment: Environment, extra: Mapping[str, str]) -> str:
    """The environment as bash assignments, those of `extra` ("engine" among them) first; texts are the EDF's own, with
    references that the script expands."""
    scalars = {
        **extra,
        "image": environment.image,
        "workdir": environment.workdir or "",
        "entrypoint": "1" if environment.entrypoint else "",
        "writable": "1" if environment.writable else "",
    }
    mounts = [
        word
        for mount in environment.mounts
        for word in (mount.source, mount.target, "+".join(mount.flags))
    ]
    env = [word for pair in environment.env.items() for word in pair]
    lines = [
        "# Read by the script beside it. ${NAME} is expanded there, on the node that runs the task.",
        *(f"{name}={single_quoted(value)}" for name, value in scalars.items()),
        *_array("mounts", mounts, 3),
        *_array("env", env, 2),
        *_array("devices", environment.devices, 1),
    ]
    return "\n".join(lines) + "\n"


def _array(name: str, words: Iterable[str], per_line: int) -> list[str]:
    quoted = [single_quoted(word) for word in words]
    if not quoted:
        return [f"{name}=()"]
    rows = ["  " + " ".join(quoted[at : at + per_line]) for at in range(0, len(quoted), per_line)]
    return [f"{name}=(", *rows, ")"]
