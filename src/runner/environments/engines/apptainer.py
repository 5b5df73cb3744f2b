"""Apptainer: `apptainer exec IMAGE COMMAND`. It runs squashfs files and images from registries.

Source: Apptainer 1.3 user guide, "Environment and Metadata", "Bind Paths and Mounts" (2026-11-21).
"""

from runner.environments.edf import Mount
from runner.environments.engines.ce import check_edf
from runner.environments.engines.engine import Engine
from runner.environments.engines.pyxis import image_text
from runner.environments.engines.shared import (
    MountSyntax,
    dialect,
    fixed_workdir,
    refuse,
    slashed,
    split_env,
)
from runner.environments.environment import Attachment, Environment
from runner.site import Site


def mount_text(index: int, mount: Mount) -> str:
    """A value of --bind: `SOURCE:TARGET[:OPTIONS]`."""
    mode = "ro" if mount.read_only else "rw"
    return dialect(f"{mount.source}:{mount.target}:{mode}", f"mounts.{index}")


def attach(environment: Environment, site: Site) -> Attachment:
    """The words before the command. Variables are passed as APPTAINERENV_NAME, which can contain any text."""
    check_edf(environment, "apptainer")
    if environment.entrypoint:
        why = "`apptainer exec` never runs the entrypoint, and `apptainer run` does not accept a command"
        fix = "put the entrypoint's program at the start of the command"
        raise refuse(environment, "entrypoint", "apptainer", why, fix)
    exports, inside = split_env(environment)
    image = image_text(environment, "apptainer")
    if not environment.is_squashfs:
        image = f"docker://{dialect(slashed(environment, 'apptainer'), 'image')}"
    start = ["apptainer", "exec", "--no-home"]
    if site.gpus_per_node:
        start.append("--nv")
    if environment.writable:
        start.append("--writable-tmpfs")
    workdir = fixed_workdir(environment)
    if workdir:
        start += ["--pwd", workdir]
    for index, mount in enumerate(environment.mounts):
        start += ["--bind", mount_text(index, mount)]
    return Attachment(
        prefix=(*start, image, *inside),
        exports={f"APPTAINERENV_{name}": value for name, value in exports.items()},
    )


ENGINE = Engine(
    name="apptainer",
    attach=attach,
    comment="What the container of this run sees; the options of `apptainer exec` in job.sbatch say the same.",
    mounts=MountSyntax(separators=":,\n", flags=frozenset({"ro", "rw", "bind", "rbind"})),
    resolved_fields=("image", "mounts"),
    pulls_with="podman",
    programs=frozenset({"apptainer"}),
)
