"""Flags of pyxis, and of the Container Engine beside them, read into an EDF."""

from __future__ import annotations

from collections.abc import Sequence

from runner.environments.adopt.adopted import Adopted, image_reference
from runner.environments.adopt.options import Option
from runner.environments.mount import split_fields

NAMES = ("environment", "edf")
_PREFIXES = ("container-", "no-container-")


def is_flag(option: Option) -> bool:
    """Whether an option of srun or sbatch is about the container."""
    return option.name.startswith(_PREFIXES) or option.name in NAMES


def read_flags(options: Sequence[Option], adopted: Adopted) -> None:
    """Take over the flags. Source: pyxis 0.24.0, args.c."""
    for option in options:
        if option.computed:
            adopted.computed(option.given)
        else:
            _take(option, adopted)


def _take(option: Option, adopted: Adopted) -> None:
    name, value, given = option.name, option.value or "", option.given
    if name in NAMES:
        adopted.base = adopted.absolute(value)
    elif name == "container-image":
        _image(value, given, adopted)
    elif name == "container-mounts":
        for entry in value.split(","):
            _mount(entry, given, adopted)
    elif name == "container-workdir":
        adopted.workdir = value
    elif name in {"container-writable", "container-readonly"}:
        adopted.writable = name == "container-writable"
    elif name in {"container-entrypoint", "no-container-entrypoint"}:
        adopted.entrypoint = name == "container-entrypoint"
    elif name == "container-entrypoint-log":
        adopted.annotations["com.pyxis.entrypoint_log"] = "true"
    elif name == "container-mount-home":
        adopted.mount("${HOME}:${HOME}", given)
        adopted.changed(given, "is a mount like others now; PYTHONNOUSERSITE keeps ~/.local from shadowing the image")
        adopted.env.setdefault("PYTHONNOUSERSITE", "1")
    elif name == "container-env":
        _names(value, given, adopted)
    elif name in _HOLDS:
        adopted.holds(given, _HOLDS[name])
    else:
        adopted.lost(given, _LOST.get(name, "an EDF has no word for it"))


_HOLDS = {
    "no-container-mount-home": "the home folder is mounted where an EDF says so",
    "no-container-remap-root": "inside you are yourself",
    "no-container-entrypoint-log": "it is off unless asked for",
}
_LOST = {
    "container-name": "a run makes its container anew",
    "container-save": "`runner build` makes images; a container's own writes are lost at the end",
    "container-remap-root": "inside you are yourself",
    "container-unshare": "the host's network, IPC and name are used",
}


def _image(value: str, given: str, adopted: Adopted) -> None:
    if value.startswith(("/", ".", "${")):
        adopted.image = adopted.absolute(value)
        return
    adopted.image, reason = image_reference(value)
    if reason:
        adopted.lost(given, reason)
    elif value.endswith((".sqsh", ".squashfs")):
        adopted.changed(given, f"pyxis takes {value} for an image in a registry; for the file write ./{value}")


def _mount(entry: str, given: str, adopted: Adopted) -> None:
    source, *_ = split_fields(entry)
    if source in {"tmpfs", "umount"}:
        adopted.lost(f"{given} ({entry})", f"an EDF's mount has a file or folder as its source, not {source}")
    elif entry:
        adopted.mount(entry, f"{given} ({entry})")


def _names(value: str, given: str, adopted: Adopted) -> None:
    for name in value.split(","):
        if name not in adopted.env:
            adopted.lost(f"{given} ({name})", f'write its value into [env], which wins over the image\'s: {name} = "…"')
