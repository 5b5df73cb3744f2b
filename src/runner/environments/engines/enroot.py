"""enroot by itself: `enroot start IMAGE.sqsh COMMAND`. Starting a squashfs file asks for squashfuse on the node.

Source: NVIDIA/enroot 4.1.2, doc/cmd/start.md and src/runtime.sh (2026-04-29).
"""

from __future__ import annotations

from runner.environments.attachment import Attachment
from runner.environments.engines.ce import FILE, check_edf
from runner.environments.engines.pyxis import image_text
from runner.environments.engines.shared import dialect, refuse, refuse_annotations, script, split_env
from runner.environments.environment import Environment, Mount, emit_edf
from runner.site import Site

_COMMENT = "What the container of this run sees; the flags of `enroot start` in job.sbatch say the same."
_FLAGS = {"ro", "rw", "rbind", "bind", "private", "rprivate", "slave", "rslave"}


def mount_text(environment: Environment, index: int, mount: Mount) -> str:
    """`SOURCE:TARGET:none:OPTIONS`, the fields of an fstab line joined by colons."""
    if any(sign in mount.source + mount.target for sign in ": \t\n,"):
        raise refuse(
            environment,
            f"mounts.{index}",
            "enroot",
            f"{mount.text()!r} has a colon, comma or blank in a path, which its mounts cannot hold",
            "rename the folder, or link it from another path: ln -s",
        )
    unknown = set(mount.flags) - _FLAGS
    if unknown:
        why = f"it has no mount flag {', '.join(sorted(unknown))}"
        raise refuse(environment, f"mounts.{index}", "enroot", why, "leave it out, or use the engine ce")
    options = ",".join(("x-create=auto", "rbind", *(flag for flag in mount.flags if flag not in {"bind", "rbind"})))
    return dialect(f"{mount.source}:{mount.target}:none:{options}", f"mounts.{index}")


def attach(environment: Environment, site: Site) -> Attachment:
    """The words in front of the command. The host's variables enter by a configuration file, the EDF's by name."""
    check_edf(environment, "enroot")
    refuse_annotations(environment, "enroot")
    if not environment.is_squashfs:
        raise refuse(
            environment,
            "image",
            "enroot",
            f"`enroot start` enters squashfs files, not {environment.image!r}",
            "runner import, and write the path of the squashfs file",
        )
    exports, inside = split_env(environment)
    start = (
        "enroot",
        "start",
        "--conf",
        "${RUNNER_RUN}/payload/enroot.conf",
        *(("--rw",) if environment.writable else ()),
        *(
            word
            for index, mount in enumerate(environment.mounts)
            for word in ("--mount", mount_text(environment, index, mount))
        ),
        *(word for name in exports for word in ("--env", name)),
        image_text(environment, "enroot"),
    )
    files = {FILE: emit_edf(environment, _COMMENT), "payload/enroot.conf": _conf(environment)}
    return Attachment(files=files, prefix=(*start, *_enter(environment), *inside), exports=exports)


def _enter(environment: Environment) -> tuple[str, ...]:
    if environment.workdir is None:
        return ()
    folder = dialect(environment.workdir, "workdir")
    return ("sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh", folder)


def _conf(environment: Environment) -> str:
    """Without the entrypoint, the container's command script is replaced by one that only starts the command."""
    return script("enroot.conf") + ("" if environment.entrypoint else '\nrc() {\n  exec "$@"\n}\n')
