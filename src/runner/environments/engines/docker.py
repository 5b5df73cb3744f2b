"""docker: the same script as podman's; it enters images of its storage or of a registry, never squashfs files."""

from __future__ import annotations

from runner.environments.attachment import Attachment
from runner.environments.engines import podman
from runner.environments.engines.shared import refuse
from runner.environments.environment import Environment
from runner.site import Site

MOUNTS = podman.MOUNTS


def attach(environment: Environment, site: Site) -> Attachment:
    """The script, what it is to enter, and the words that start it."""
    if environment.is_squashfs:
        raise refuse(
            environment,
            "image",
            "docker",
            f"it knows images of its storage only, and {environment.image!r} is a squashfs file",
            "use podman or the sandbox, or name an image",
        )
    return podman.attach(environment, site, "docker")
