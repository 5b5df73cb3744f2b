"""`docker run`, `podman run` and the flags of pyxis, read into an EDF."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from runner.bash import Word
from runner.environments.edf import split_fields
from runner.images.reference import HUB_NAMES, parse_reference
from runner.runs.adopt.adopted import Adopted
from runner.runs.adopt.options import Grammar, Option

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_NOT_NEEDED, _NOT_CARRIED_OVER = _TABLES["not_needed"], _TABLES["not_carried_over"]
CONTAINER = Grammar(_TABLES["short"], frozenset(_TABLES["flags"]))
# SELinux labels, caching hints and copying do not change what the container sees
_NO_FLAGS = {"rw", "z", "Z", "cached", "delegated", "consistent", "nocopy", "bind", "rbind", ""}
_MOUNT_KEYS = {"src": "source", "dst": "target", "destination": "target", "readonly": "ro"}


def is_flag(option: Option) -> bool:
    """Whether an option of srun or sbatch configures the container."""
    return option.name.startswith(("container-", "no-container-")) or option.name in {
        "environment",
        "edf",
    }


def read_container_run(
    options: Sequence[Option], rest: Sequence[Word], adopted: Adopted, engine: str
) -> tuple[Word, ...]:
    """Read the options of `docker run` or `podman run`, and the words after them; return those of the program."""
    adopted.entrypoint, adopted.writable = True, True
    adopted.gpus = None if engine == "nvidia-docker" else 0
    read(options, adopted)
    entrypoint = next(
        (option.value for option in reversed(options) if option.name == "entrypoint"), None
    )
    if not rest:
        adopted.refuse(f"{engine} run", "the command line names no image", edf=True)
        return ()
    image, command = rest[0].text, rest[1:]
    if rest[0].computed or rest[0].array:
        adopted.computed(rest[0].raw)
    else:
        _read_reference(image, image, adopted)
        if adopted.image and "#" not in adopted.image and "/" not in adopted.image:
            why = "for your own image, write the path that `runner import` prints"
            adopted.note(image, f"read as an image on Docker Hub; {why}")
    adopted.note(
        f"{engine} run",
        f"{engine} changes your user ID and HOME; a container that runner starts does not",
    )
    if adopted.entrypoint and (not command or re.match(r"-|[^/]*=", command[0].text)):
        why = "only the image knows its entrypoint and default command: put the program after the image"
        adopted.refuse(command[0].raw if command else image, why)
    elif adopted.entrypoint:
        adopted.note(image, "the image's entrypoint runs first, and must start the command")
    return (*([Word(entrypoint, entrypoint)] if entrypoint else []), *command)


def read(options: Sequence[Option], adopted: Adopted) -> None:
    """Read options of `docker run` and `podman run`, and flags of pyxis. Source: pyxis 0.24.0, args.c."""
    for option in options:
        if option.computed and option.name in _TABLES["keys_of_edf"]:
            adopted.computed(option.given)
        else:
            _read_pyxis(option.name, option.value or "", option.given, adopted)


def _read_pyxis(name: str, value: str, given: str, adopted: Adopted) -> None:
    match name:
        case "environment" | "edf":
            adopted.base = adopted.absolute(value)
        case "container-image" if value.startswith(("/", ".", "${")):
            adopted.image = adopted.absolute(value)
        case "container-image":
            _read_reference(value, given, adopted)
            if value.endswith((".sqsh", ".squashfs")):
                why = f"if you mean a file, write ./{value}"
                adopted.note(given, f"pyxis reads {value} as an image in a registry; {why}")
        case "container-mounts":
            for entry in value.split(","):
                adopted.bare_mounts |= {entry[2:-1]} if re.fullmatch(r"\$\{\w+\}", entry) else set()
                if entry:
                    adopted.mount(entry, f"{given} ({entry})")
        case "container-writable" | "container-readonly":
            adopted.writable = name == "container-writable"
        case "container-entrypoint" | "no-container-entrypoint":
            adopted.entrypoint = name == "container-entrypoint"
        case "container-entrypoint-log":
            adopted.annotations["com.pyxis.entrypoint_log"] = "true"
        case "container-mount-home":
            adopted.mount("${HOME}:${HOME}", given)
            why = "so that packages in ~/.local do not shadow the image's"
            adopted.note(given, f"becomes a mount; PYTHONNOUSERSITE is set too, {why}")
            adopted.env.setdefault("PYTHONNOUSERSITE", "1")
        case "container-env":
            _read_names(value, given, adopted)
        case "container-save":
            adopted.refuse(
                given,
                "a job's changes to its container are lost: to change the image, use `runner build`",
            )
        case _:
            _read_engine(name, value, given, adopted)


def _read_engine(name: str, value: str, given: str, adopted: Adopted) -> None:
    match name:
        case "volume":
            _read_volume(value, given, adopted)
        case "mount":
            _read_mount(value, given, adopted)
        case "env" if "=" not in value:
            adopted.not_needed(
                given, "the container gets the host's variables, unless the image sets them"
            )
        case "env":
            key, _, text = value.partition("=")
            adopted.variable(key, text, given)
        case "unsetenv":
            adopted.env[value] = ""
        case "workdir" | "container-workdir":
            adopted.workdir = value
        case "entrypoint":
            adopted.entrypoint = False
            if value:
                adopted.note(given, "becomes the beginning of the command")
        case "read-only":
            adopted.writable = value.lower() == "false"
        case "annotation":
            key, _, text = value.partition("=")
            adopted.annotations[key] = text
        case "device" if not value.startswith("nvidia.com/gpu"):
            adopted.devices.append(value)
            why = "which Sarus Suite, podman and docker support, but the Container Engine does not"
            adopted.note(given, f"becomes `devices`, {why}")
        case "gpus" | "device":
            _read_gpus(value, given, adopted)
        case "env-file":
            adopted.refuse(given, "write the variables of the file to [env] of the EDF", edf=True)
        case "rootfs":
            adopted.refuse(
                given, "an EDF needs a squashfs file: use mksquashfs or runner import", edf=True
            )
        case "network" | "net" | "ipc" | "pid" | "uts" if value not in {"host", ""}:
            adopted.not_carried_over(given, f"{_NOT_NEEDED[name]}, always")
        case _ if name in _NOT_NEEDED:
            adopted.gpus = None if name == "runtime" and value == "nvidia" else adopted.gpus
            adopted.not_needed(given, _NOT_NEEDED[name])
        case _:
            adopted.not_carried_over(given, _NOT_CARRIED_OVER.get(name, "an EDF has no key for it"))


def _read_reference(text: str, given: str, adopted: Adopted) -> None:
    """Set the image to `[USER@][REGISTRY#]IMAGE[:TAG]`, as each version of enroot reads it.

    Source: enroot 4, src/docker.sh.
    """
    scheme, separator, rest = text.partition("://")
    name = rest if separator else text
    image = parse_reference(name)
    local = f"{scheme} is storage on this machine" if separator and scheme != "docker" else ""
    if name.startswith(("localhost/", "sha256:")):
        local = local or "the image is only in the engine's storage"
    if local:
        adopted.refuse(
            given,
            f"{local}: run `runner import {name}` and write the path that it prints",
            edf=True,
        )
    elif "#" in name or name.startswith("${") or not image.separator:
        adopted.image = name
    else:
        path = image.with_slash.removeprefix(f"{image.registry}/")
        adopted.image = path if image.registry in HUB_NAMES else f"{image.registry}#{path}"


def _read_volume(value: str, given: str, adopted: Adopted) -> None:
    """Read `SOURCE:TARGET[:FLAG,FLAG]`."""
    source, *rest = split_fields(value)
    flags = [flag for flag in ":".join(rest[1:]).split(",") if flag not in _NO_FLAGS]
    if not rest:
        why = "an anonymous volume is lost with the container; the root file system is writable anyway"
        adopted.not_carried_over(given, why)
    elif not source.startswith(("/", ".", "${", "~")):
        adopted.refuse(
            given, f"{source!r} is a volume in the engine's storage: use a folder", edf=True
        )
    elif source == rest[0] == "/dev/shm":
        adopted.not_needed(given, _NOT_NEEDED["ipc"])
    elif any(flag in {"U", "O", "copy"} or "=" in flag for flag in flags):
        adopted.refuse(given, f"mounts of an EDF do not have the flags {','.join(flags)}", edf=True)
    else:
        adopted.mount(":".join((source, rest[0], *(["+".join(flags)] if flags else []))), given)


def _read_mount(value: str, given: str, adopted: Adopted) -> None:
    """Read `type=bind,source=SOURCE,target=TARGET[,readonly]`."""
    pairs = (entry.partition("=") for entry in value.split(","))
    fields = {_MOUNT_KEYS.get(key, key): text for key, _, text in pairs}
    kind, source, target = (fields.pop(key, "") for key in ("type", "source", "target"))
    flags = ["ro"] if fields.pop("ro", "no").lower() in {"", "true", "1"} else []
    flags.append(fields.pop("bind-propagation", ""))
    flags += [
        f"{key}={text}" for key, text in fields.items() if key not in {"relabel", "consistency"}
    ]
    if kind == "bind":
        _read_volume(f"{source}:{target}:{','.join(flags)}", given, adopted)
    else:
        adopted.not_carried_over(given, f"an EDF mounts folders and files, not {kind or 'volume'}")


def _read_names(value: str, given: str, adopted: Adopted) -> None:
    for name in value.split(","):
        if "$" in name:
            adopted.refuse(f"{given} ({name})", "set the variables in [env] of the EDF", edf=True)
        elif name not in adopted.env:
            adopted.not_carried_over(
                f"{given} ({name})", "set it in [env] of the EDF, which overrides the image"
            )


def _read_gpus(value: str, given: str, adopted: Adopted) -> None:
    """`all`, a number, `device=0,1` (also in quotes), or the name of a CDI device."""
    devices = re.sub(r"^.*[=:]|[\"']", "", value).split(",")
    every = devices == ["all"] or not all(device.isdigit() for device in devices)
    adopted.gpus = (
        None
        if every
        else int(devices[0])
        if value.isdigit()
        else (adopted.gpus or 0) + len(devices)
    )
    adopted.env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
    adopted.note(
        given,
        "becomes NVIDIA_VISIBLE_DEVICES" + ("" if every else f"; the job gets {adopted.gpus} GPUs"),
    )
