"""No container: the command runs on the node as it is, with the environment's variables."""

from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import MountSyntax, dialect, refuse
from runner.environments.environment import Attachment, Environment
from runner.site import Site


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
    folder, unset, fixed = [], [], []
    if environment.workdir:
        folder.append(f"--chdir={dialect(environment.workdir, 'workdir')}")
    for name, value in environment.env.items():
        if value:
            fixed.append(f"{name}={dialect(value, f'env.{name}')}")
        else:
            unset += ["-u", name]
    words = (*folder, *unset, *fixed)
    notes = []
    if environment.image:
        notes.append(f"running without a container: the image {environment.image!r} is not used")
    return Attachment(prefix=("env", *words) if words else (), notes=tuple(notes))


ENGINE = Engine(
    name="host",
    attach=attach,
    comment="The environment that this run asked for. It ran without a container: image and annotations had no effect.",
    mounts=MountSyntax(),
    resolved_fields=("",),
    uses_container=False,
    needs_image=False,
)
