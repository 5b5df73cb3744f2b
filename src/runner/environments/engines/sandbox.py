"""The embedded engine: squashfuse (or unsquashfs) and bubblewrap, as root or as an ordinary user, no daemon."""

from __future__ import annotations

from runner.environments.attachment import Attachment
from runner.environments.engines.ce import FILE
from runner.environments.engines.sandbox_conf import conf
from runner.environments.engines.shared import refuse, refuse_annotations, script
from runner.environments.environment import Environment, emit_edf
from runner.site import Site

_COMMENT = "What the container of this run sees; payload/sandbox.conf says the same to payload/sandbox.sh."


def attach(environment: Environment, site: Site) -> Attachment:
    """The script, what it is to enter, and the words that start it."""
    if not environment.is_squashfs:
        raise refuse(
            environment,
            "image",
            "sandbox",
            f"it enters squashfs files, and {environment.image!r} is the name of an image in a registry"
            if environment.image
            else "it is empty, so there is nothing to enter",
            "runner import, and write the path of the squashfs file; or use podman",
        )
    for index, device in enumerate(environment.devices):
        if not device.startswith("/dev/"):
            why = f"all of /dev is there, but it knows no device classes such as {device!r}"
            raise refuse(environment, f"devices.{index}", "sandbox", why, "use the engine podman or sarus")
    refuse_annotations(environment, "sandbox")
    return Attachment(
        files={
            FILE: emit_edf(environment, _COMMENT),
            "payload/sandbox.sh": script("sandbox.sh"),
            "payload/environment.sh": script("environment.sh"),
            "payload/sandbox.conf": conf(environment, {"engine": "sandbox"}),
        },
        prefix=("bash", "${RUNNER_RUN}/payload/sandbox.sh"),
    )
