"""pyxis, enroot's plugin for Slurm: `srun --container-image=… --container-mounts=…`.

Source: NVIDIA/pyxis 0.24.0, args.c and README (2026-04-29).
"""

from __future__ import annotations

from runner.environments.attachment import Attachment
from runner.environments.engines.ce import FILE, check_edf
from runner.environments.engines.shared import dialect, fixed_workdir, refuse, refuse_annotations, split_env
from runner.environments.environment import Environment, Mount, emit_edf
from runner.expansion import parts
from runner.site import Site

# Else enroot starts a login shell, whose /etc/profile takes the image's PATH away in every Debian-based image; pyxis
# hands the variable on. Source: NVIDIA/enroot 4.1.2, src/runtime.sh, and pyxis 0.24.0, pyxis_slurmstepd.c (2026-04-29).
NO_LOGIN_SHELL = {"ENROOT_LOGIN_SHELL": "n"}
_COMMENT = "What the container of this run sees; the flags of srun in job.sbatch say the same to pyxis."


def mount_text(environment: Environment, index: int, mount: Mount) -> str:
    """One entry of --container-mounts. The list is split at commas, entries at colons, and nothing escapes them."""
    for path in (mount.source, mount.target):
        # it writes the entry into a bash script, between double quotes
        plain = "".join(part for part in parts(path) if isinstance(part, str))
        bad = next((sign for sign in ',: \t\n"$`\\' if sign in plain), None)
        if bad is not None:
            name = {",": "a comma", ":": "a colon", "\n": "a newline", " ": "a blank", "\t": "a tab"}.get(bad, bad)
            raise refuse(
                environment,
                f"mounts.{index}",
                "pyxis",
                f"{path!r} has {name} in it, which its list of mounts cannot hold",
                "rename the folder, or link it from another path: ln -s",
            )
    if "sqsh" in mount.flags:
        raise refuse(
            environment,
            f"mounts.{index}",
            "pyxis",
            "mounting a squashfs file is known to the Container Engine alone",
            "unpack it: unsquashfs -d FOLDER FILE, and mount the folder",
        )
    return dialect(mount.text("+"), f"mounts.{index}")


def image_text(environment: Environment, engine: str = "pyxis") -> str:
    """The image, as enroot's URI without a scheme, or as a path."""
    if not environment.image:
        raise refuse(environment, "image", engine, "it is empty, so there is nothing to enter", 'image = "…"')
    return dialect(environment.image, "image")


def attach(environment: Environment, site: Site) -> Attachment:
    """The flags of srun, one merged list of mounts among them; variables are handed in by name.

    Its image's variables beat those of the job, except for those named in --container-env.
    """
    check_edf(environment, "pyxis")
    refuse_annotations(environment, "pyxis")
    exports, inside = split_env(environment)
    workdir = fixed_workdir(environment)
    mounts = [mount_text(environment, index, mount) for index, mount in enumerate(environment.mounts)]
    flags = (
        f"--container-image={image_text(environment)}",
        *((f"--container-mounts={','.join(mounts)}",) if mounts else ()),
        *((f"--container-workdir={workdir}",) if workdir else ()),
        "--container-writable" if environment.writable else "--container-readonly",
        "--container-entrypoint" if environment.entrypoint else "--no-container-entrypoint",
        "--no-container-mount-home",
        "--no-container-remap-root",
        *((f"--container-env={','.join(exports)}",) if exports else ()),
    )
    return Attachment(
        files={FILE: emit_edf(environment, _COMMENT)}, flags=flags, prefix=inside, exports={**exports, **NO_LOGIN_SHELL}
    )
