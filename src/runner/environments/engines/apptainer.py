"""Apptainer: `apptainer exec IMAGE COMMAND`. It runs squashfs files and images from registries.

Source: Apptainer 1.3 user guide, "Environment and Metadata", "Bind Paths and Mounts" (2026-11-21).
"""

from runner.environments.edf import Mount
from runner.environments.engines.ce import check_edf
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

COMMENT = "What the container of this run sees; the options of `apptainer exec` in job.sbatch say the same."


MOUNTS = MountSyntax(":,\n", frozenset({"ro", "rw", "bind", "rbind"}))
DECIDED = ("image", "mounts")


def mount_text(index: int, mount: Mount) -> str:
    """A value of --bind: `SOURCE:TARGET[:OPTIONS]`."""
    return dialect(
        f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}", f"mounts.{index}"
    )


def attach(environment: Environment, site: Site) -> Attachment:
    """The words before the command. Variables are passed as APPTAINERENV_NAME, which can contain any text."""
    check_edf(environment, "apptainer")
    if environment.entrypoint:
        why = "`apptainer exec` never runs the entrypoint, and `apptainer run` does not accept a command"
        fix = "put the entrypoint's program at the start of the command"
        raise refuse(environment, "entrypoint", "apptainer", why, fix)
    exports, inside = split_env(environment)
    image, workdir = image_text(environment, "apptainer"), fixed_workdir(environment)
    prefix = (
        "apptainer",
        "exec",
        "--no-home",
        *(("--nv",) if site.gpus_per_node else ()),
        *(("--writable-tmpfs",) if environment.writable else ()),
        *(("--pwd", workdir) if workdir else ()),
        *(
            word
            for index, mount in enumerate(environment.mounts)
            for word in ("--bind", mount_text(index, mount))
        ),
        image
        if environment.is_squashfs
        else f"docker://{dialect(slashed(environment, 'apptainer'), 'image')}",
        *inside,
    )
    return Attachment(
        prefix=prefix, exports={f"APPTAINERENV_{name}": value for name, value in exports.items()}
    )
