"""No container: the command runs on the node as it is, with the environment's variables."""

from runner.environments.engines.shared import MountSyntax, dialect, refuse
from runner.environments.environment import Attachment, Environment
from runner.site import Site

COMMENT = "The environment that this run asked for. It ran without a container: image and annotations had no effect."

MOUNTS = MountSyntax()
DECIDED = ("",)


def attach(environment: Environment, site: Site) -> Attachment:
    """`env NAME=VALUE…` in front of the command."""
    for index, mount in enumerate(environment.mounts):
        if mount.source != mount.target:
            why = f"without a container, {mount.source!r} cannot be mounted at {mount.target!r}"
            fix = (
                "use the same path for source and target, or choose an engine that uses containers"
            )
            raise refuse(environment, f"mounts.{index}", "host", why, fix)
    if environment.entrypoint:
        why = "without a container there is no entrypoint to run"
        fix = "set entrypoint = false, or choose an engine that uses containers"
        raise refuse(environment, "entrypoint", "host", why, fix)
    unset = tuple(
        word for name, value in environment.env.items() if not value for word in ("-u", name)
    )
    fixed = tuple(
        f"{name}={dialect(value, f'env.{name}')}"
        for name, value in environment.env.items()
        if value
    )
    folder = (f"--chdir={dialect(environment.workdir, 'workdir')}",) if environment.workdir else ()
    words = (*folder, *unset, *fixed)
    notes = (
        (f"running without a container: the image {environment.image!r} is not used",)
        if environment.image
        else ()
    )
    return Attachment(prefix=("env", *words) if words else (), notes=notes)
