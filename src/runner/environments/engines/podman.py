"""podman and docker: `run --rm`, through a script that reads the image's variables first."""

from dataclasses import replace

from runner.environments.engines.sandbox import conf
from runner.environments.engines.shared import MountSyntax, bare_squashfs, refuse, script, slashed
from runner.environments.environment import Attachment, Environment
from runner.site import Site

COMMENT = "What the container of this run sees; payload/container.conf says the same to payload/container.sh."

MOUNTS = MountSyntax(":,", frozenset({"ro", "rw", "rbind", "bind"}))
DECIDED: tuple[str, ...] = ()


def attach(environment: Environment, site: Site, engine: str = "podman") -> Attachment:
    """The script, its configuration, and the words that start it."""
    if bare_squashfs(environment) or not environment.image:
        why = (
            f"{environment.image!r} is neither the path of a squashfs file nor the name of an image"
        )
        raise refuse(environment, "image", engine, why, "write an absolute path, or NAME:TAG")
    named = replace(environment, image=slashed(environment, engine))
    gpus = "1" if site.gpus_per_node and not environment.devices else ""
    return Attachment(
        files={
            **{f"payload/{name}": script(name) for name in ("container.sh", "environment.sh")},
            "payload/container.conf": conf(named, {"engine": engine, "gpus": gpus}),
        },
        prefix=("bash", "${RUNNER_RUN}/payload/container.sh"),
    )
