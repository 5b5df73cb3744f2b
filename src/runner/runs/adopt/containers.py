"""`docker run`, `podman run` and the flags of pyxis, read into an EDF."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.bash import Word
from runner.environments.mount import split_fields
from runner.expansion import literal
from runner.runs.adopt.adopted import Adopted, image_reference
from runner.runs.adopt.options import Option

# options whose effect every engine has by default
_NOT_NEEDED = {
    "rm": "the container is always removed; what it writes outside mounts is lost",
    "interactive": "`runner shell` gives a prompt",
    "tty": "`runner shell` gives a prompt",
    **dict.fromkeys(("sig-proxy", "http-proxy", "quiet", "tls-verify", "userns"), "every engine does this"),
    "network": "the host's network is used",
    "net": "the host's network is used",
    "ipc": "/dev/shm is the host's",
    "pid": "the container sees the host's processes",
    "uts": "the container has the host's name",
    "env-host": "the container gets the host's variables",
    "init": "runner's scripts start and stop the processes",
    "pull": "missing images are pulled",
    "shm-size": "/dev/shm is the host's",
    "runtime": "the site provides the GPUs",
}
_NOT_CARRIED_OVER = {
    "user": "you have your own user ID in the container",
    "privileged": "the container of a job has no extra rights",
    "cap-add": "the container of a job has no extra rights",
    "security-opt": "the site's settings decide",
    "ulimit": "put `ulimit` in task_prolog of the job file",
    "memory": "set memory in [resources] of the job file",
    "cpus": "set cpus_per_task in [resources] of the job file",
    "name": "runner names the run",
    "publish": "the host's network is used, so its ports are open already",
    "detach": "`runner launch` returns at once",
    "restart": "[restart] of the job file says when a job is restarted",
    "tmpfs": "an EDF cannot mount tmpfs; /dev/shm is in memory",
    "platform": "the image must have the node's architecture",
}
_SHARED = ("host", "")
# SELinux labels, caching hints and copying do not change what the container sees
_NO_FLAGS = {"rw", "z", "Z", "cached", "delegated", "consistent", "nocopy", "bind", "rbind"}


def read_container_run(options: Sequence[Option], rest: Sequence[Word], adopted: Adopted, engine: str) -> None:
    """Read the options of `docker run` or `podman run`, and the words after them."""
    adopted.entrypoint, adopted.writable = True, True
    adopted.gpus = None if engine == "nvidia-docker" else 0
    rootfs = any(option.name == "rootfs" for option in options)
    entrypoint: list[Word] = []
    for option in options:
        if option.computed and (option.name in _READERS or option.name == "entrypoint"):
            adopted.computed(option.given)
        elif option.name == "entrypoint":
            adopted.entrypoint = False
            entrypoint = [Word(option.value, option.value)] if option.value else []
            if entrypoint:
                adopted.note(option.given, "becomes the beginning of the command")
        else:
            _take(option, adopted)
    if not rest:
        adopted.refuse(f"{engine} run", "the command line names no image", edf=True)
        return
    image, command = rest[0].text, rest[1:]
    if rest[0].computed or rest[0].array:
        adopted.computed(rest[0].raw)
    elif rootfs:
        adopted.refuse(f"--rootfs {image}", "an EDF needs a squashfs file: use mksquashfs or runner import", edf=True)
    else:
        adopted.image, reason = image_reference(image)
        if reason:
            adopted.refuse(image, reason, edf=True)
        elif "#" not in adopted.image and "/" not in adopted.image:
            adopted.note(
                image,
                "an image of Docker Hub; for an image that you built here, write the path that `runner import` prints",
            )
    adopted.command += [*entrypoint, *command]
    adopted.note(f"{engine} run", f"in the container of a job, you keep your user ID and HOME; {engine} changes both")
    if adopted.entrypoint and (not command or re.match(r"-|[^/]*=", command[0].text)):
        why = "only the image knows its entrypoint and default command: put the program after the image"
        adopted.refuse(command[0].raw if command else image, why)
    elif adopted.entrypoint:
        adopted.note(image, "the image's entrypoint runs first, and must start the command")


def _take(option: Option, adopted: Adopted) -> None:
    name, value, given = option.name, option.value or "", option.given
    reader = _READERS.get(name)
    if reader is not None:
        reader(value, given, adopted)
    elif name in {"network", "net", "ipc", "pid", "uts"} and value not in _SHARED:
        adopted.not_carried_over(given, f"{_NOT_NEEDED[name]}, always")
    elif name in _NOT_NEEDED:
        adopted.gpus = None if name == "runtime" and value == "nvidia" else adopted.gpus
        adopted.not_needed(given, _NOT_NEEDED[name])
    elif name == "rootfs":
        return
    else:
        adopted.not_carried_over(given, _NOT_CARRIED_OVER.get(name, "an EDF has no key for it"))


def _volume(value: str, given: str, adopted: Adopted) -> None:
    source, separator, rest = value.partition(":") if not value.startswith("${") else _after_variable(value)
    if not separator:
        adopted.not_carried_over(
            given, "an anonymous volume is lost with the container; the root file system is writable anyway"
        )
        return
    if not source.startswith(("/", ".", "${", "~")):
        adopted.refuse(given, f"{source!r} is a volume in the engine's storage: use a folder", edf=True)
        return
    target, _, options = rest.partition(":")
    if source == target == "/dev/shm":
        adopted.not_needed(given, _NOT_NEEDED["ipc"])
        return
    _bind(source, target, options.split(",") if options else [], given, adopted)


def _after_variable(value: str) -> tuple[str, str, str]:
    """(source, colon, rest) of a volume whose source begins with a variable, which may have a default."""
    source, *rest = split_fields(value)
    return source, ":" if rest else "", ":".join(rest)


def _bind(source: str, target: str, options: Sequence[str], given: str, adopted: Adopted) -> None:
    flags = [option for option in options if option and option not in _NO_FLAGS]
    unknown = [option for option in flags if option in {"U", "O", "copy"} or "=" in option]
    for option in unknown:
        adopted.not_carried_over(f"{given} ({option})", "mounts of an EDF do not have this flag")
    flags = [option for option in flags if option not in unknown]
    text = f"{source}:{target}"
    adopted.mount(f"{text}:{'+'.join(flags)}" if flags else text, given)


def _mount(value: str, given: str, adopted: Adopted) -> None:
    fields = dict(entry.partition("=")[::2] for entry in value.split(","))
    if fields.get("type", "volume") != "bind":
        adopted.not_carried_over(given, f"an EDF mounts folders and files, not {fields.get('type', 'volume')}")
        return
    source = fields.get("source") or fields.get("src", "")
    target = fields.get("target") or fields.get("destination") or fields.get("dst", "")
    read_only = any(fields.get(key, "no").lower() in {"", "true", "1"} for key in ("readonly", "ro"))
    propagation = fields.get("bind-propagation", "")
    for key in fields.keys() - {
        *("type", "source", "src", "target", "destination", "dst", "readonly", "ro", "bind-propagation", "relabel"),
        "consistency",
    }:
        adopted.not_carried_over(f"{given} ({key})", "mounts of an EDF do not have this flag")
    _bind(source, target, [*(("ro",) if read_only else ()), propagation], given, adopted)


def _env(value: str, given: str, adopted: Adopted) -> None:
    name, equals, text = value.partition("=")
    if equals:
        adopted.variable(name, text, given)
    else:
        adopted.not_needed(given, "the container gets the host's variables, unless the image sets them")


def _env_file(value: str, given: str, adopted: Adopted) -> None:
    try:
        lines = ((adopted.folder or Path()) / value).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        adopted.refuse(given, f"cannot read the file: {getattr(error, 'strerror', None) or error}", edf=True)
        return
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            _env(literal(line.lstrip()), f"{given} ({line.partition('=')[0]})", adopted)


def _unset(value: str, given: str, adopted: Adopted) -> None:
    adopted.env[value] = ""


def _workdir(value: str, given: str, adopted: Adopted) -> None:
    adopted.workdir = value


def _read_only(value: str, given: str, adopted: Adopted) -> None:
    adopted.writable = value.lower() == "false"


def _gpus(value: str, given: str, adopted: Adopted) -> None:
    """`all`, a number, `device=0,1` (also in quotes), or the name of a CDI device."""
    devices = re.sub(r"^.*[=:]|[\"']", "", value).split(",")
    every = devices == ["all"] or not all(device.isdigit() for device in devices)
    adopted.gpus = None if every else int(devices[0]) if value.isdigit() else (adopted.gpus or 0) + len(devices)
    adopted.env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
    adopted.note(given, "becomes NVIDIA_VISIBLE_DEVICES" + ("" if every else f"; the job gets {adopted.gpus} GPUs"))


def _device(value: str, given: str, adopted: Adopted) -> None:
    if value.startswith("nvidia.com/gpu"):
        _gpus(value, given, adopted)
        return
    adopted.devices.append(value)
    adopted.note(
        given, "becomes `devices`, which Sarus Suite, podman and docker support, but the Container Engine does not"
    )


def _annotation(value: str, given: str, adopted: Adopted) -> None:
    name, _, text = value.partition("=")
    adopted.annotations[name] = text


_READERS: dict[str, Callable[[str, str, Adopted], None]] = {
    "volume": _volume,
    "mount": _mount,
    "env": _env,
    "env-file": _env_file,
    "unsetenv": _unset,
    "workdir": _workdir,
    "read-only": _read_only,
    "gpus": _gpus,
    "device": _device,
    "annotation": _annotation,
}


NAMES = ("environment", "edf")
_PREFIXES = ("container-", "no-container-")


def is_flag(option: Option) -> bool:
    """Whether an option of srun or sbatch configures the container."""
    return option.name.startswith(_PREFIXES) or option.name in NAMES


def read_flags(options: Sequence[Option], adopted: Adopted) -> None:
    """Read flags of pyxis. Source: pyxis 0.24.0, args.c."""
    for option in options:
        if option.computed:
            adopted.computed(option.given)
        else:
            _take_pyxis(option, adopted)


def _take_pyxis(option: Option, adopted: Adopted) -> None:
    name, value, given = option.name, option.value or "", option.given
    if name in NAMES:
        adopted.base = adopted.absolute(value)
    elif name == "container-image":
        _image(value, given, adopted)
    elif name == "container-mounts":
        for entry in value.split(","):
            _pyxis_mount(entry, given, adopted)
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
        adopted.note(
            given,
            "becomes a mount; PYTHONNOUSERSITE is set too, so that packages in ~/.local do not shadow the image's",
        )
        adopted.env.setdefault("PYTHONNOUSERSITE", "1")
    elif name == "container-env":
        _names(value, given, adopted)
    elif name == "container-save":
        adopted.refuse(given, "writes in the container of a job are lost: build images with `runner build`")
    elif name in _PYXIS_NOT_NEEDED:
        adopted.not_needed(given, _PYXIS_NOT_NEEDED[name])
    else:
        adopted.not_carried_over(given, _PYXIS_NOT_CARRIED_OVER.get(name, "an EDF has no key for it"))


_PYXIS_NOT_NEEDED = {
    "no-container-mount-home": "the home folder is mounted only if the EDF mounts it",
    "no-container-remap-root": "you have your own user ID in the container",
    "no-container-entrypoint-log": "the log is off by default",
}
_PYXIS_NOT_CARRIED_OVER = {
    "container-name": "each run creates a new container",
    "container-remap-root": "you have your own user ID in the container",
    "container-unshare": "the host's network, IPC and name are used",
}


def _image(value: str, given: str, adopted: Adopted) -> None:
    if value.startswith(("/", ".", "${")):
        adopted.image = adopted.absolute(value)
        return
    adopted.image, reason = image_reference(value)
    if reason:
        adopted.refuse(given, reason, edf=True)
    elif value.endswith((".sqsh", ".squashfs")):
        adopted.note(given, f"pyxis reads {value} as an image in a registry; if you mean a file, write ./{value}")


def _pyxis_mount(entry: str, given: str, adopted: Adopted) -> None:
    source, *_ = split_fields(entry)
    adopted.bare_mounts |= {entry[2:-1]} if re.fullmatch(r"\$\{\w+\}", entry) else set()
    if source in {"tmpfs", "umount"}:
        adopted.not_carried_over(
            f"{given} ({entry})", f"the source of a mount in an EDF is a file or folder, not {source}"
        )
    elif entry:
        adopted.mount(entry, f"{given} ({entry})")


def _names(value: str, given: str, adopted: Adopted) -> None:
    for name in value.split(","):
        if "$" in name:
            adopted.refuse(f"{given} ({name})", "set the variables in [env] of the EDF", edf=True)
        elif name not in adopted.env:
            adopted.not_carried_over(f"{given} ({name})", "set it in [env] of the EDF, which overrides the image")
