"""enroot without pyxis: `enroot start IMAGE.sqsh COMMAND`. Starting a squashfs file needs squashfuse on the node.

Source: NVIDIA/enroot 4.1.2, doc/cmd/start.md and src/runtime.sh (2026-04-29).
"""

from runner.environments.edf import Mount
from runner.environments.engines.ce import check_edf
from runner.environments.engines.engine import Engine
from runner.environments.engines.pyxis import NO_LOGIN_SHELL
from runner.environments.engines.shared import (
    MountSyntax,
    dialect,
    inside_words,
    refuse,
    registry_or_podman,
    script,
)
from runner.environments.environment import Attachment, Environment
from runner.site import Site

# overrides settings that the user may have made for other containers
EXPORTS = {
    **NO_LOGIN_SHELL,
    "ENROOT_MOUNT_HOME": "n",
    "ENROOT_REMAP_ROOT": "n",
    "ENROOT_ROOTFS_WRITABLE": "n",
    "ENROOT_FORCE_OVERRIDE": "n",
}
SETTINGS_FILE = "payload/enroot.conf"


def mount_text(index: int, mount: Mount) -> str:
    """`SOURCE:TARGET:none:OPTIONS`, the fields of an fstab line joined by colons."""
    flags = [flag for flag in mount.flags if flag not in {"bind", "rbind"}]
    options = ",".join(["x-create=auto", "rbind", *flags])
    return dialect(f"{mount.source}:{mount.target}:none:{options}", f"mounts.{index}")


def attach(environment: Environment, site: Site) -> Attachment:
    """The words before the command. The host's variables are passed by a configuration file, the EDF's by name."""
    check_edf(environment, "enroot")
    if not environment.is_squashfs:
        why = f"`enroot start` runs squashfs files, not {environment.image!r}"
        fix = f"run `runner import {registry_or_podman(environment)}`, and set `image` to the path that it prints"
        raise refuse(environment, "image", "enroot", why, fix)
    start = ["enroot", "start", "--conf", f"${{RUNNER_RUN}}/{SETTINGS_FILE}"]
    if environment.writable:
        start.append("--rw")
    for index, mount in enumerate(environment.mounts):
        start += ["--mount", mount_text(index, mount)]
    start.append(dialect(environment.image, "image"))
    conf = script("enroot.conf").replace("@entrypoint@", "yes" if environment.entrypoint else "")
    # enroot writes --env to a file line by line, which loses quotes and line breaks
    inside = inside_words(environment.env, environment.workdir)
    return Attachment(files={SETTINGS_FILE: conf}, prefix=(*start, *inside), exports=EXPORTS)


ENGINE = Engine(
    name="enroot",
    attach=attach,
    comment="What the container of this run sees; the flags of `enroot start` in job.sbatch say the same.",
    # Source: enroot 4.1.2 runtime.sh
    mounts=MountSyntax(
        separators=": \t\n,\\",
        flags=frozenset({"ro", "rw", "rbind", "bind", "private", "rprivate", "slave", "rslave"}),
    ),
    resolved_fields=("image", "mounts"),
    pulls_with="enroot",
    programs=frozenset({"enroot"}),
    settings_file=SETTINGS_FILE,
)
