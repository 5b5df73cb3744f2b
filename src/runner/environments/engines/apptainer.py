"""Apptainer: `apptainer exec IMAGE COMMAND`. It runs squashfs files and images from registries.

Source: Apptainer 1.3 user guide, "Environment and Metadata", "Bind Paths and Mounts" (2026-11-21).
"""

from collections.abc import Iterable

from runner.environments.edf import Mount
from runner.environments.engines.ce import check_edf
from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    MountSyntax,
    dialect,
    fixed_workdir,
    refuse,
    slashed,
    split_env,
)
from runner.environments.environment import Attachment, Environment
from runner.expansion import literal
from runner.site import Site

# Apptainer takes an image's variables from /.singularity.d/env alone, which an imported squashfs file does not have.
# They become words of `env`, because a shell cannot assign some of them. --nv puts the driver into
# /.singularity.d/libs.
_READ_VARIABLES = (
    "[ ! -r /etc/environment ] || "
    'while IFS= read -r runner_line || [ -n "$runner_line" ]; do '
    "runner_name=${runner_line%%=*} runner_value=${runner_line#*=}; "
    'case $runner_name in "$runner_line"|ENROOT_*|""|[0-9]*|*[!A-Za-z0-9_]*@own@) continue ;; esac; '
    """case $runner_value in '"'*'"'|"'"*"'") """
    "runner_value=${runner_value#?}; runner_value=${runner_value%?} ;; esac; "
    '[ "$runner_name" != LD_LIBRARY_PATH ] || runner_value=$runner_value:/.singularity.d/libs; '
    'set -- "$runner_name=$runner_value" "$@"; '
    "done < /etc/environment; "
)
# what enroot's /etc/rc does before it reads /etc/rc.local and starts the entrypoint
_ENTER_FOLDER = "[ ! -r /etc/rc ] || eval \"$(sed '/rc\\.local/,$d' /etc/rc)\"; "


def mount_text(index: int, mount: Mount) -> str:
    """A value of --bind: `SOURCE:TARGET[:OPTIONS]`."""
    mode = "ro" if mount.read_only else "rw"
    return dialect(f"{mount.source}:{mount.target}:{mode}", f"mounts.{index}")


def attach(environment: Environment, site: Site) -> Attachment:
    """The words before the command. Variables are passed as APPTAINERENV_NAME, which can contain any text."""
    check_edf(environment, "apptainer")
    if environment.entrypoint:
        why = "runner starts commands with `apptainer exec`, which never runs the entrypoint"
        fix = "put the entrypoint's program at the start of the command"
        raise refuse(environment, "entrypoint", "apptainer", why, fix)
    exports, inside = split_env(environment)
    image = dialect(environment.image, "image")
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
    if environment.is_squashfs:
        inside = (*_configuration(exports, environment.workdir), *inside)
    return Attachment(
        prefix=(*start, image, *inside),
        exports={f"APPTAINERENV_{name}": value for name, value in exports.items()},
    )


def _configuration(own: Iterable[str], workdir: str | None) -> tuple[str, ...]:
    """The words that set the image's variables, except the EDF's `own`, and enter the image's folder unless there is a
    `workdir`."""
    script = _READ_VARIABLES.replace("@own@", "".join(f"|{name}" for name in own))
    enter = _ENTER_FOLDER if workdir is None else ""
    return ("sh", "-c", literal(f'{script}{enter}exec env "$@"'), "sh")


ENGINE = Engine(
    name="apptainer",
    attach=attach,
    comment="What the container of this run sees; the options of `apptainer exec` in job.sbatch say the same.",
    mounts=MountSyntax(separators=":,\n", flags=frozenset({"ro", "rw", "bind", "rbind"})),
    resolved_fields=("image", "mounts"),
    pulls_with="podman",
    programs=frozenset({"apptainer"}),
)
