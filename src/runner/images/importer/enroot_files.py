"""The files in which enroot stores an image's configuration: /etc/environment, /etc/rc, /etc/rc.local, /etc/fstab.

Source: the output of `import` of enroot 4.1.2. The text here is our own. All values from the image are in single
quotes, which every POSIX shell interprets in the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from runner.errors import RunnerError

RC_LOCAL = "# read by /etc/rc before the image's program is started\n"


def metadata_files(config: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Path (without leading slash) -> (text, mode) for an image's runtime configuration."""
    return {
        "etc/environment": (environment(config.get("Env") or ()), 0o644),
        "etc/fstab": (fstab(config.get("Volumes") or {}), 0o644),
        "etc/rc": (rc(config), 0o755),
        "etc/rc.local": (RC_LOCAL, 0o644),
    }


def environment(variables: Sequence[str]) -> str:
    """`NAME=VALUE` lines, unchanged and in the image's order. Variables with line breaks are omitted, because
    their second line would be read as another variable."""
    return "".join(f"{entry}\n" for entry in variables if not set(entry) & {"\n", "\r", "\0"})


def multiline_variables(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the variables that `environment` omits."""
    entries = config.get("Env") or ()
    return tuple(entry.partition("=")[0] for entry in entries if set(entry) & {"\n", "\r", "\0"})


def fstab(volumes: Mapping[str, Any]) -> str:
    """One line per volume that the image declares; enroot replaces ${ENROOT_ROOTFS} itself.

    Blanks are escaped as in fstab(5). Raises RunnerError for a path that could lead out of the image.
    """
    rows = []
    for volume in sorted(volumes):
        # enroot expands variables; a path without a leading slash would continue the name of the root folder
        if not volume.startswith("/") or ".." in volume.split("/") or "$" in volume:
            raise RunnerError(
                f"cannot import the image with its volume {volume!r}",
                "a volume's path must be absolute, without '..' and '$': other paths could lead out of the image",
                "remove this VOLUME from the Containerfile (or ask the image's authors to), then rebuild the image",
            )
        escaped = "".join(
            f"\\{ord(letter):03o}" if letter in " \t\n\\#" else letter for letter in volume
        )
        rows.append(
            f"${{ENROOT_ROOTFS}}{escaped} {escaped} none x-create=dir,bind,rw,nosuid,nodev\n"
        )
    return "".join(rows)


def rc(config: Mapping[str, Any]) -> str:
    """The POSIX shell script that is the container's first program: enter the working directory, then start the
    entry point with the given arguments, or with the image's own when none are given."""
    labels = config.get("Labels") or {}
    lines = (f"# {key} {value}" for key, value in labels.items())
    comments = [
        "".join(letter if letter.isprintable() else " " for letter in line) for line in lines
    ]
    workdir = quote(str(config.get("WorkingDir") or "/"))
    entrypoint = " ".join(quote(word) for word in config.get("Entrypoint") or ())
    command = " ".join(quote(word) for word in config.get("Cmd") or ())
    default = " ".join(part for part in (entrypoint, command) if part) or "/bin/sh"
    given = f'{entrypoint} "$@"' if entrypoint else '"$@"'
    script = [
        "#!/bin/sh",
        *comments,
        f"mkdir -p -- {workdir} 2> /dev/null",
        f"cd -- {workdir} || exit 1",
        "unset OLDPWD",
        "if [ -s /etc/rc.local ]; then . /etc/rc.local; fi",
        f"if [ $# -gt 0 ]; then exec {given}; else exec {default}; fi",
    ]
    return "\n".join(script) + "\n"


def quote(word: str) -> str:
    """The word in single quotes, so that no shell interprets anything in it."""
    return "'" + word.replace("\0", "").replace("'", "'\\''") + "'"
