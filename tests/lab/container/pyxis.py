"""Read pyxis' --container-* options and PYXIS_CONTAINER_* variables. Source: pyxis 0.24, args.c and README."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.lab.container.request import Mount, Refusal, Request, check_image, parse_mount
from tests.lab.container.variables import PREFIX

TEXTS = ("IMAGE", "MOUNTS", "WORKDIR", "NAME", "SAVE", "ENV", "UNSHARE")
SWITCHES = ("MOUNT_HOME", "REMAP_ROOT", "ENTRYPOINT", "ENTRYPOINT_LOG", "WRITABLE", "READONLY")
YES = {"1": True, "true": True, "yes": True, "y": True, "0": False, "false": False, "no": False, "n": False}
NAME_MODES = ("auto", "create", "exec", "no_exec")
PULLED = ("docker://", "dockerd://")


def options(environ: Mapping[str, str]) -> dict[str, str]:
    """What was asked for by option name; an option of the command line beats its PYXIS_CONTAINER_* variable."""
    found = {}
    for name in (*TEXTS, *SWITCHES):
        value = environ.get(f"{PREFIX}PYXIS_{name}") or environ.get(f"PYXIS_CONTAINER_{name}")
        if value:
            found[name] = value
    return found


def _switch(given: Mapping[str, str], name: str) -> bool | None:
    if name not in given:
        return None
    if given[name].lower() not in YES:
        raise Refusal(f"pyxis: PYXIS_CONTAINER_{name}: invalid value: {given[name]}")
    return YES[given[name].lower()]


def _writable(given: Mapping[str, str], otherwise: bool | None) -> bool | None:
    writable, read_only = _switch(given, "WRITABLE"), _switch(given, "READONLY")
    if writable is not None and read_only is not None and writable == read_only:
        raise Refusal("pyxis: --container-writable and --container-readonly contradict each other")
    if writable is None:
        return otherwise if read_only is None else not read_only
    return writable


def mounts(text: str, here: str) -> tuple[Mount, ...]:
    """The mounts of a list that is split at each comma, without any escape: a path with a comma cannot be named."""
    found = []
    for entry in text.split(","):
        mount = parse_mount(entry, "pyxis: --container-mounts")
        if mount.source not in ("tmpfs", "umount") and not mount.source.startswith((".", "/")):
            raise Refusal(f"pyxis: --container-mounts: the source must begin with . or / in {entry!r} (of {text!r})")
        if not mount.target.startswith((".", "/")):
            raise Refusal(f"pyxis: --container-mounts: the target must begin with . or / in {entry!r} (of {text!r})")
        source = mount.source if mount.source in ("tmpfs", "umount") else os.path.normpath(Path(here, mount.source))
        found.append(Mount(source, mount.target, mount.flags))
    return tuple(dict.fromkeys(found))


def _name(text: str) -> tuple[str, str]:
    name, colon, mode = text.partition(":")
    if not name or "/" in name or (colon and mode not in NAME_MODES):
        raise Refusal(f"pyxis: --container-name: invalid name or mode: {text}")
    return name, mode or "auto"


def _keep(text: str) -> frozenset[str]:
    names = text.split(",") if text else []
    if not all(names):
        raise Refusal(f"pyxis: --container-env: empty name in {text!r}")
    return frozenset(names)


def _image(given: Mapping[str, str], here: str) -> str:
    image = given.get("IMAGE", "")
    if image.startswith(PULLED):
        raise Refusal(f"pyxis: --container-image: {image} must be pulled, and the lab does not pull")
    return os.path.normpath(Path(here, check_image(image, "pyxis: --container-image"))) if image else ""


def request(given: Mapping[str, str], here: str, request: Request) -> Request:
    """The request with pyxis' options over it. Raises Refusal."""
    if "UNSHARE" in given:
        raise Refusal("pyxis: --container-unshare is not available in the lab")
    if given.get("SAVE", "").endswith("/"):
        raise Refusal(f"pyxis: --container-save: target is a directory: {given['SAVE']}")
    home, root, entrypoint = (_switch(given, name) for name in ("MOUNT_HOME", "REMAP_ROOT", "ENTRYPOINT"))
    name, mode = _name(given["NAME"]) if "NAME" in given else ("", "auto")
    asked = mounts(given["MOUNTS"], here) if "MOUNTS" in given else ()
    image = _image(given, here)
    if not (image or name or request.image):
        for option in ("MOUNTS", "WORKDIR"):
            if option in given:
                print(
                    f"error: pyxis: ignoring --container-{option.lower()} because neither --container-image nor "
                    "--container-name is set",
                    file=sys.stderr,
                )
    return request.but(
        image=image or request.image,
        workdir=given.get("WORKDIR") or request.workdir,
        writable=_writable(given, request.writable),
        entrypoint=request.entrypoint if entrypoint is None else entrypoint,
        mounts=(*request.mounts, *asked),
        keep_env=_keep(given.get("ENV", "")),
        mount_home=home,
        remap_root=root,
        name=name,
        name_mode=mode,
    )
