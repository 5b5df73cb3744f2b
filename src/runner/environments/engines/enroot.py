"""enroot without pyxis: `enroot start IMAGE.sqsh COMMAND`. Starting a squashfs file needs squashfuse on the node.

Source: NVIDIA/enroot 4.1.2, doc/cmd/start.md and src/runtime.sh (2026-04-29).
"""

from runner.environments.edf import Mount
from runner.environments.engines.ce import check_edf
from runner.environments.engines.pyxis import NO_LOGIN_SHELL, image_text
from runner.environments.engines.shared import MountSyntax, dialect, inside_words, refuse, script
from runner.environments.environment import Attachment, Environment
from runner.site import Site

COMMENT = (
    "What the container of this run sees; the flags of `enroot start` in job.sbatch say the same."
)
# overrides settings that the user may have made for other containers
EXPORTS = {
    **NO_LOGIN_SHELL,
    **{
        f"ENROOT_{name}": "n"
        for name in ("MOUNT_HOME", "REMAP_ROOT", "ROOTFS_WRITABLE", "FORCE_OVERRIDE")
    },
}
# Source: enroot 4.1.2 runtime.sh
MOUNTS = MountSyntax(
    ": \t\n,\\", frozenset({"ro", "rw", "rbind", "bind", "private", "rprivate", "slave", "rslave"})
)
DECIDED = ("image", "mounts")


def mount_text(index: int, mount: Mount) -> str:
    """`SOURCE:TARGET:none:OPTIONS`, the fields of an fstab line joined by colons."""
    options = ",".join(
        ("x-create=auto", "rbind", *(flag for flag in mount.flags if flag not in {"bind", "rbind"}))
    )
    return dialect(f"{mount.source}:{mount.target}:none:{options}", f"mounts.{index}")


def attach(environment: Environment, site: Site) -> Attachment:
    """The words before the command. The host's variables are passed by a configuration file, the EDF's by name."""
    check_edf(environment, "enroot")
    if not environment.is_squashfs:
        why = f"`enroot start` runs squashfs files, not {environment.image!r}"
        fix = "run `runner import`, and set `image` to the path of the squashfs file"
        raise refuse(environment, "image", "enroot", why, fix)
    start = (
        "enroot",
        "start",
        "--conf",
        "${RUNNER_RUN}/payload/enroot.conf",
        *(("--rw",) if environment.writable else ()),
        *(
            word
            for index, mount in enumerate(environment.mounts)
            for word in ("--mount", mount_text(index, mount))
        ),
        image_text(environment, "enroot"),
    )
    conf = script("enroot.conf").replace("@entrypoint@", "yes" if environment.entrypoint else "")
    files = {"payload/enroot.conf": conf}
    # enroot writes --env to a file line by line, which loses quotes and line breaks
    inside = inside_words(environment.env, environment.workdir)
    return Attachment(files=files, prefix=(*start, *inside), exports=EXPORTS)
