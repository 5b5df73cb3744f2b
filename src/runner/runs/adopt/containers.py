"""The command lines of container engines, and the flags of pyxis, read into an EDF."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from runner.bash import UNKNOWN
from runner.environments.edf import split_fields
from runner.images.reference import HUB_NAMES, parse_reference
from runner.option_grammar import Grammar, Option, split
from runner.runs.adopt.adopted import Adopted

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_NOT_NEEDED, _NOT_CARRIED_OVER = _TABLES["not_needed"], _TABLES["not_carried_over"]
GRAMMARS = {
    name: Grammar(table["short"], frozenset(table["flags"]))
    for name, table in _TABLES["engines"].items()
}
# program -> (its table, the subcommand that starts a container)
_ENGINES = {
    "docker": ("docker", ("run",)),
    "nvidia-docker": ("docker", ("run",)),
    "podman": ("docker", ("run",)),
    "enroot": ("enroot", ("start",)),
    "apptainer": ("apptainer", ("exec", "run")),
    "singularity": ("apptainer", ("exec", "run")),
}
# SELinux labels, caching hints, copying, and the options of enroot's mounts do not change what the container sees
_NO_FLAGS = {"rw", "z", "Z", "cached", "delegated", "consistent", "nocopy", "bind", "rbind", "none"}
_NO_FLAGS |= {"", "x-create=dir", "x-create=file", "x-create=auto"}
_FSTAB_FLAGS = {*_NO_FLAGS, "ro", "private", "rprivate", "slave", "rslave", "shared", "rshared"}
_MOUNT_KEYS = {"src": "source", "dst": "target", "destination": "target", "readonly": "ro"}
# Apptainer mounts them unless an option says otherwise
_APPTAINER_MOUNTS = ("${HOME}", "/tmp", "/var/tmp")
_NOT_MOUNTED = {"no-home", "home", "no-mount", "contain", "containall", "compat", "scratch"}


# devices of AMD's, Intel's and NVIDIA's GPUs, also the names that CDI gives them
_GPU_DEVICE = re.compile(r"/dev/(kfd|dri|nvidia)|[^/]+/gpu=")
_CPU_RUNTIMES = {"runc", "crun", "runsc"}


def is_flag(option: Option) -> bool:
    """Whether an option of srun or sbatch configures the container."""
    return option.name.startswith(("container-", "no-container-")) or option.name in {
        "environment",
        "edf",
    }


def starts_container(words: Sequence[str]) -> bool:
    """Whether these words are `docker run`, `podman run`, `enroot start`, `apptainer exec` or `apptainer run`."""
    engine = words[0].rsplit("/", 1)[-1] if words else ""
    return engine in _ENGINES and _after(words) is not None


def _after(words: Sequence[str]) -> Sequence[str] | None:
    """The words after the subcommand, before which an engine may have flags of its own; None if it is another one."""
    _, subcommands = _ENGINES[words[0].rsplit("/", 1)[-1]]
    for index, word in enumerate(words[1:], 2):
        if not word.startswith("-") and word != "container":
            return words[index - 1 :] if word in subcommands else None
    return None


def read_engine(words: Sequence[str], adopted: Adopted) -> tuple[str, ...]:
    """Read the command line of a container engine; returns the words of the program."""
    engine = words[0].rsplit("/", 1)[-1]
    table, _ = _ENGINES[engine]
    subcommand, *after = _after(words) or ("",)
    given, rest = split(after, GRAMMARS[table])
    names = _TABLES["engines"][table].get("names", {})
    options = [Option(names.get(each.name, each.name), each.value, each.given) for each in given]
    adopted.entrypoint = subcommand != "exec"
    adopted.writable = table == "docker"
    if engine in {"docker", "podman", "apptainer", "singularity"}:
        adopted.gpus = 0
    read(options, adopted)
    if adopted.env.get("NVIDIA_VISIBLE_DEVICES", "none") not in {"", "none", "void"}:
        adopted.gpus = adopted.gpus or None
    if table == "apptainer":
        _mount_as_apptainer({each.name for each in given}, adopted)
    if not rest:
        adopted.refuse(f"{engine} {subcommand}", "the command line names no image")
        return ()
    image, *command = rest
    _read_image(table, image, adopted)
    if table == "docker":
        adopted.note(
            f"{engine} run",
            f"{engine} changes your user ID and HOME; with other engines, the container keeps them",
        )
    if adopted.entrypoint and (not command or re.match(r"-|[^/]*=", command[0])):
        why = "only the image knows its entrypoint and default command: put the program after the image"
        adopted.refuse_job(command[0] if command else image, why)
    elif adopted.entrypoint:
        adopted.note(image, "the image's entrypoint runs first, and must start the command")
    entrypoints = [each.value for each in options if each.name == "entrypoint" and each.value]
    return (*entrypoints[-1:], *command)


def _read_image(table: str, image: str, adopted: Adopted) -> None:
    if UNKNOWN in image:
        adopted.refuse(image.replace(UNKNOWN, ""), "only a shell can evaluate this image")
    elif image.endswith((".sqsh", ".squashfs")):
        adopted.image = adopted.absolute(image if "/" in image else f"./{image}")
    elif table == "enroot":
        adopted.refuse(image, "it is an unpacked container: write the path of its squashfs file")
    elif table == "apptainer" and not image.startswith("docker://"):
        why = (
            "an EDF cannot name this image: import the image that it was made from (runner import)"
        )
        adopted.refuse(image, why)
    else:
        _read_reference(image, image, adopted)
        if adopted.image and "#" not in adopted.image and "/" not in adopted.image:
            why = "for your own image, write the path that `runner import` prints"
            adopted.note(image, f"read as an image on Docker Hub; {why}")


def _mount_as_apptainer(names: set[str], adopted: Adopted) -> None:
    """Apptainer mounts some folders by default, and starts in the current one."""
    if adopted.folder is None:
        why = "it mounts the folder in which the line runs, and starts there"
        adopted.refuse("apptainer", why)
        return
    if found := names & _NOT_MOUNTED:
        adopted.note(f"--{min(found)}", "check the mounts: the EDF has only those of --bind")
        return
    adopted.workdir = adopted.workdir or str(adopted.folder)
    for path in (*_APPTAINER_MOUNTS, str(adopted.folder)):
        adopted.mount(f"{path}:{path}", path)
    adopted.note(
        "apptainer", "it mounts HOME, /tmp, /var/tmp and the current folder, so they are in the EDF"
    )


def read(options: Sequence[Option], adopted: Adopted) -> None:
    """Read options of engines, and flags of pyxis. Source: pyxis 0.24.0, args.c."""
    for option in options:
        given = option.given.replace(UNKNOWN, "")
        if given != option.given and option.name not in (*_NOT_NEEDED, *_NOT_CARRIED_OVER):
            adopted.refuse(given, "only a shell can evaluate this text")
        else:
            _read_pyxis(option.name, option.value or "", given, adopted)


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
        case "container-mounts" | "bind":
            for entry in filter(None, value.split(",")):
                adopted.mount(entry.removesuffix(":rw"), f"{given} ({entry})")
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
            why = "set these variables in [env] of the EDF, which overrides the image"
            adopted.not_carried_over(given, why)
        case "container-save":
            adopted.refuse_job(
                given,
                "a job's changes to its container are lost: to change the image, use `runner build`",
            )
        case _:
            _read_engine(name, value, given, adopted)


def _read_engine(name: str, value: str, given: str, adopted: Adopted) -> None:
    match name:
        case "volume":
            _read_volume(value, given, adopted)
        case "fstab":
            _read_fstab(value, given, adopted)
        case "mount":
            _read_mount(value, given, adopted)
        case "env":
            _read_variable(value, given, adopted)
        case "env-list":
            for entry in value.split(","):
                _read_variable(entry, f"{given} ({entry})", adopted)
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
            if _GPU_DEVICE.match(value):
                adopted.gpus = None
            why = "which Sarus Suite, podman and docker support, but the Container Engine does not"
            adopted.note(given, f"becomes `devices`, {why}")
        case "gpus" | "device":
            _read_gpus(value or "all", given, adopted)
        case "volumes-from":
            adopted.refuse(given, "write the mounts of that container as -v SOURCE:TARGET")
        case "env-file":
            adopted.refuse(given, "write the variables of the file to [env] of the EDF")
        case "rootfs":
            adopted.refuse(given, "an EDF needs a squashfs file: use mksquashfs or runner import")
        case "overlay" | "writable":
            adopted.refuse(given, "a job's changes to its container are lost")
        case "network" | "net" | "ipc" | "pid" | "uts" if value != "host":
            adopted.not_carried_over(given, f"this cannot be changed: {_NOT_NEEDED[name]}")
        case _ if name in _NOT_NEEDED and value in {"false", "never"}:  # --rm=false, --pull=never
            adopted.not_carried_over(given, f"this cannot be changed: {_NOT_NEEDED[name]}")
        case _ if name in _NOT_NEEDED:
            if name == "rocm" or (name == "runtime" and value not in _CPU_RUNTIMES):
                adopted.gpus = None
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
        why = f"{local}: run `runner import {name}` and write the path that it prints"
        adopted.refuse(given, why)
    elif "#" in name or not image.separator:
        adopted.image = name
    else:
        path = image.with_slash.removeprefix(f"{image.registry}/")
        adopted.image = path if image.registry in HUB_NAMES else f"{image.registry}#{path}"


def _read_volume(value: str, given: str, adopted: Adopted) -> None:
    """Read `SOURCE:TARGET[:FLAG,FLAG]`."""
    source, *rest = split_fields(value)
    flags = [flag for flag in re.split("[:,]", ":".join(rest[1:])) if flag not in _NO_FLAGS]
    if not rest:
        why = "an anonymous volume is lost with the container; the root file system is writable anyway"
        adopted.not_carried_over(given, why)
    elif not source.startswith(("/", ".", "${", "~")):
        adopted.refuse(given, f"{source!r} is a volume in the engine's storage: use a folder")
    elif source == rest[0] == "/dev/shm":
        adopted.not_needed(given, _NOT_NEEDED["ipc"])
    elif any(flag in {"U", "O", "copy"} or "=" in flag for flag in flags):
        adopted.refuse(given, f"mounts of an EDF do not have the flags {','.join(flags)}")
    else:
        adopted.mount(":".join((source, rest[0], *(["+".join(flags)] if flags else []))), given)


def _read_fstab(value: str, given: str, adopted: Adopted) -> None:
    """Read `SOURCE[:TARGET][:TYPE][:FLAG,FLAG]`, in which a blank is a colon. Source: enroot 4, enroot-mount.c."""
    source, *rest = split_fields(re.sub(r"\s+", ":", value.strip()))
    has_target = rest and rest[0] not in _FSTAB_FLAGS and "," not in rest[0]
    target = rest.pop(0) if has_target else source
    if source == "tmpfs":
        adopted.not_carried_over(given, _NOT_CARRIED_OVER["tmpfs"])
    else:
        _read_volume(":".join((source, target, *rest)), given, adopted)


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
    elif kind in {"", "volume"}:
        _read_volume(f"{source}:{target}" if source else target, given, adopted)
    elif kind == "tmpfs":
        adopted.not_carried_over(given, _NOT_CARRIED_OVER[kind])
    else:
        adopted.refuse(given, f"an EDF mounts folders and files, not {kind}")


def _read_variable(value: str, given: str, adopted: Adopted) -> None:
    """Read `NAME=VALUE`, or `NAME` for the host's value."""
    name, equals, text = value.partition("=")
    if equals:
        adopted.variable(name, text, given)
    else:
        why = "the container gets the host's variables, unless the image sets them"
        adopted.not_needed(given, why)


def _read_gpus(value: str, given: str, adopted: Adopted) -> None:
    """`all`, a number, `device=0,1` (also in quotes), or the name of a CDI device."""
    devices = re.sub(r"^.*[=:]|[\"']", "", value).split(",")
    if devices == ["all"] or not all(device.isdigit() for device in devices):
        adopted.gpus = None
    else:
        adopted.gpus = int(devices[0]) if value.isdigit() else (adopted.gpus or 0) + len(devices)
    adopted.env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
    what = "" if adopted.gpus is None else ", and gpus_per_node in the job file"
    shown = adopted.env["NVIDIA_VISIBLE_DEVICES"]
    adopted.note(given, f'becomes NVIDIA_VISIBLE_DEVICES = "{shown}"{what}')
