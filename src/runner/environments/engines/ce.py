"""The Container Engine of CSCS: `srun --environment=FILE`. It reads the EDF itself."""

from __future__ import annotations

import re
from pathlib import Path

from runner.environments.engines.engine import Engine
from runner.environments.engines.shared import (
    EDF_FILE,
    MOUNT_OPTIONS,
    MountSyntax,
    bare_squashfs,
    refuse,
    texts,
)
from runner.environments.environment import Attachment, Environment
from runner.machine import process
from runner.site import Site

COMMENT = "What the container of this run sees. Plain `srun --environment=./environment.toml` takes this file."

# Source: CSCS documentation, container-engine/edf.md (2026-08-20)
MOUNTS = MountSyntax(separators=":\n", flags=MOUNT_OPTIONS | {"sqsh"})


def check_edf(environment: Environment, engine: str) -> None:
    """Raise RunnerError for what neither the Container Engine nor the engines on enroot and apptainer can express."""
    if environment.devices:
        why = "this engine does not read `devices`; it selects GPUs with NVIDIA_VISIBLE_DEVICES"
        fix = 'remove `devices`; for an image that is not NVIDIA\'s, add NVIDIA_VISIBLE_DEVICES = "all" to [env]'
        if engine == "apptainer":
            why, fix = (
                "this engine does not read `devices`",
                "remove `devices`: --nv shows all GPUs",
            )
        raise refuse(environment, "devices", engine, why, fix)
    if bare_squashfs(environment):
        why = f"{environment.image!r} would be read as the name of an image in a registry"
        raise refuse(
            environment, "image", engine, why, f"write an absolute path, or ./{environment.image}"
        )
    for index, mount in enumerate(environment.mounts):
        if any(character in mount.source + mount.target for character in MOUNTS.separators):
            why = f"{mount.text()!r}: colons separate the fields of a mount, and a colon or newline cannot be escaped"
            fix = "rename the folder, or mount a symlink whose path has no colon; or choose another target"
            raise refuse(environment, f"mounts.{index}", engine, why, fix)


def _check_braces(environment: Environment) -> None:
    for field, text in texts(environment):
        # only `$${NAME}` is a documented escape
        if re.search(r"\$\$\{[^}]*$", text):
            why = f"{text!r} has `${{` without a closing brace; the engine does not document this case"
            fix = "export the variable in `task_prolog` of the job file, or write the value without it"
            raise refuse(environment, field, "ce", why, fix)


def attach(environment: Environment, site: Site) -> Attachment:
    """The emitted EDF and the flag that names it by path, independent of EDF_PATH."""
    check_edf(environment, "ce")
    _check_braces(environment)
    image = Path(environment.image)
    lost = "" if environment.env.get("PATH") or not image.is_absolute() else lost_path(image)
    notes: tuple[str, ...] = ()
    if lost:
        why = "PATH of the image is lost in the engine's login shell"
        notes = (f"{why}: set PATH = {lost!r} in [env]",)
    flags = (f"--environment=${{RUNNER_RUN}}/{EDF_FILE}",)
    return Attachment(flags=flags, notes=notes)


ENGINE = Engine(
    name="ce",
    attach=attach,
    comment=COMMENT,
    mounts=MOUNTS,
    resolved_fields=("mounts",),
    needs_image=False,  # without one, it uses no container; --container-image may name an image
    starts_login_shell=True,
    srun_option="environment",
    reads_edf=True,
    pulls_with="enroot",
    usage="srun --environment=./FILE.toml COMMAND   (in a batch script too: on srun's line, not on #SBATCH)",
)


def lost_path(image: Path) -> str:
    """The image's PATH, if the engine's login shell would drop some of its folders; empty if it would not.

    Debian's /etc/profile resets PATH; Ubuntu's does not.
    """
    profile, variables = _content(image, "etc/profile"), _content(image, "etc/environment")
    reset = re.findall(r"^\s*PATH=[\"']?([^\"'\s$]*)[\"']?\s*$", profile, re.MULTILINE)
    own = re.findall(r"^PATH=[\"']?([^\"'\s]*)", variables, re.MULTILINE)
    if not reset or not own:
        return ""
    kept = {folder for path in reset for folder in path.split(":")}
    return str(own[-1]) if set(own[-1].split(":")) - kept else ""


def _content(image: Path, name: str) -> str:
    """A file of a squashfs image; empty if it cannot be read here."""
    if not image.is_file() or process.which("unsquashfs") is None:
        return ""
    return process.run(("unsquashfs", "-cat", str(image), name), check=False).stdout
