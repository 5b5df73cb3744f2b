"""pyxis, enroot's plugin for Slurm: `srun --container-image=… --container-mounts=…`.

Source: NVIDIA/pyxis 0.24.0, args.c and README (2026-04-29).
"""

from runner.environments.engines.ce import check_edf
from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    MountSyntax,
    dialect,
    fixed_workdir,
    split_env,
)
from runner.environments.environment import Attachment, Environment
from runner.site import Site

# Otherwise, enroot starts a login shell, whose /etc/profile resets PATH in every Debian-based image. pyxis passes this
# variable on. Source: NVIDIA/enroot 4.1.2, src/runtime.sh, and pyxis 0.24.0, pyxis_slurmstepd.c (2026-04-29).
NO_LOGIN_SHELL = {"ENROOT_LOGIN_SHELL": "n"}
# pyxis splits the list at commas and its entries at colons, without any escape, and puts each entry into a bash script
# in double quotes. Spaces need pyxis 0.24 and an enroot newer than 4.1.2. Source: pyxis 0.24.0, args.c
MOUNTS = MountSyntax(separators=',: \t\n"$`\\', checks_flags=False)


def attach(environment: Environment, site: Site) -> Attachment:
    """The flags of srun, including one merged list of mounts. Variables are passed by name.

    The image's variables override those of the job, except those that --container-env names.
    """
    check_edf(environment, "pyxis")
    exports, inside = split_env(environment)
    workdir = fixed_workdir(environment)
    mounts = [
        dialect(mount.text(MOUNTS.join), f"mounts.{index}")
        for index, mount in enumerate(environment.mounts)
    ]
    flags = [f"--container-image={dialect(environment.image, 'image')}"]
    if mounts:
        flags.append(f"--container-mounts={','.join(mounts)}")
    if workdir:
        flags.append(f"--container-workdir={workdir}")
    flags += [
        "--container-writable" if environment.writable else "--container-readonly",
        "--container-entrypoint" if environment.entrypoint else "--no-container-entrypoint",
        "--no-container-mount-home",
        "--no-container-remap-root",
    ]
    if exports:
        flags.append(f"--container-env={','.join(exports)}")
    return Attachment(flags=tuple(flags), prefix=inside, exports={**exports, **NO_LOGIN_SHELL})


ENGINE = Engine(
    name="pyxis",
    attach=attach,
    comment="What the container of this run sees; the flags of srun in job.sbatch say the same to pyxis.",
    mounts=MOUNTS,
    resolved_fields=("image", "mounts"),
    srun_option="container-image",
    pulls_with="enroot",
    usage="bash THIS_FILE COMMAND…, or sbatch OPTIONS… THIS_FILE COMMAND…",
)
