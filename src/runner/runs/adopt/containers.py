"""`docker run` and `podman run`, read into an EDF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runner.bash import Word
from runner.environments.mount import split_fields
from runner.expansion import literal
from runner.runs.adopt.adopted import Adopted, image_reference
from runner.runs.adopt.options import CONTAINER, Option, split

# what is so anyway, on every engine
_HOLDS = {
    "rm": "what is written outside of mounts is lost at the end",
    "interactive": "`runner shell` gives a prompt", "tty": "`runner shell` gives a prompt",
    "network": "the host's network is used", "net": "the host's network is used", "ipc": "/dev/shm is the host's",
    "pid": "processes of the host are seen", "uts": "the host's name is seen", "env-host": "the host's variables enter",
    "init": "the step's own processes look after theirs", "pull": "images are pulled where they are missing",
    "shm-size": "/dev/shm is the host's", "sig-proxy": "signals reach the step", "runtime": "the site gives GPUs",
    "http-proxy": "the host's variables enter", "quiet": "nothing is printed", "userns": "you are yourself inside",
    "tls-verify": "the engine's own settings count", "disable-content-trust": "the engine's own settings count",
}  # fmt: skip
_LOST = {
    "user": "inside you are yourself", "group-add": "inside you have your own groups",
    "privileged": "a container of a batch job has no rights of its own",
    "cap-add": "a container of a batch job has no rights of its own",
    "security-opt": "the site decides", "ulimit": "write `ulimit` into task_prolog of the job file",
    "memory": "ask for memory in the job file: [resources] memory",
    "cpus": "ask for CPUs in the job file: [resources] cpus_per_task",
    "cpuset-cpus": "Slurm binds tasks to CPUs: --srun=--cpu-bind=…", "name": "a run has a name of its own",
    "hostname": "the host's name is seen", "publish": "the host's network is used, so ports are open as they are",
    "publish-all": "the host's network is used, so ports are open as they are",
    "expose": "the host's network is used", "detach": "`runner launch` returns at once",
    "restart": "runner launches what failed again, as the job's own settings say",
    "tmpfs": "an EDF mounts no tmpfs; /dev/shm and the root file system lie in memory",
    "volumes-from": "there is no other container", "platform": "the image's architecture is the node's",
    "arch": "the image's architecture is the node's", "label": "no engine reads it",
    "add-host": "the host's /etc/hosts is used", "dns": "the host's resolv.conf is used",
    "log-driver": "a run has one log", "stop-signal": "the job's own settings",
    "unsetenv-all": "the host's variables enter; unset one by NAME = \"\"",
    "read-only-tmpfs": "an EDF mounts no tmpfs", "cgroupns": "the site decides",
}  # fmt: skip
_SHARED = ("host", "")
# SELinux labels, caching hints and copying say nothing about what is seen inside
_NO_FLAGS = {"rw", "z", "Z", "cached", "delegated", "consistent", "nocopy", "bind", "rbind"}


def read_container_run(words: Sequence[Word], adopted: Adopted, engine: str, folder: Path) -> None:
    """Take over the words behind `docker run` or `podman run`. Relative paths are meant from `folder`."""
    options, rest = split(words, CONTAINER)
    adopted.entrypoint, adopted.writable = True, True
    rootfs = any(option.name == "rootfs" for option in options)
    entrypoint: list[Word] = []
    for option in options:
        if option.computed:
            adopted.computed(option.given)
        elif option.name == "entrypoint":
            adopted.entrypoint = False
            entrypoint = [Word(option.value, option.value)] if option.value else []
            if entrypoint:
                adopted.changed(option.given, "stands in front of the command")
        else:
            _take(option, adopted, folder)
    if not rest:
        adopted.lost(f"{engine} run", "it names no image")
        return
    image, command = rest[0].text, rest[1:]
    if rest[0].computed:
        adopted.computed(rest[0].raw)
    elif rootfs:
        adopted.lost(f"--rootfs {image}", "an EDF names a squashfs file: mksquashfs it, or runner import")
    else:
        adopted.image, reason = image_reference(image)
        if reason:
            adopted.lost(image, reason)
    adopted.command += [*entrypoint, *command]
    if adopted.entrypoint and not command:
        adopted.changed(engine, "no command is given: the image's own runs; name it in the job file")


def _take(option: Option, adopted: Adopted, folder: Path) -> None:
    name, value, given = option.name, option.value or "", option.given
    reader = _READERS.get(name)
    if reader is not None:
        reader(value, given, adopted, folder)
    elif name in {"network", "net", "ipc", "pid", "uts"} and value not in _SHARED:
        adopted.lost(given, f"{_HOLDS[name]}, always")
    elif name in _HOLDS:
        adopted.holds(given, _HOLDS[name])
    elif name == "rootfs":
        return
    else:
        adopted.lost(given, _LOST.get(name, "an EDF has no word for it"))


def _volume(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    source, separator, rest = value.partition(":") if not value.startswith("${") else _after_variable(value)
    if not separator:
        adopted.lost(
            given, "an anonymous volume is empty and goes with the container; the root file system is writable"
        )
        return
    if not source.startswith(("/", ".", "${", "~")):
        adopted.lost(given, f"{source!r} is a volume of the engine's storage: name a folder")
        return
    target, _, options = rest.partition(":")
    if source == target == "/dev/shm":
        adopted.holds(given, _HOLDS["ipc"])
        return
    _bind(source, target, options.split(",") if options else [], given, adopted)


def _after_variable(value: str) -> tuple[str, str, str]:
    """Source, colon and rest of a volume whose source begins with a variable, perhaps one with a default."""
    source, *rest = split_fields(value)
    return source, ":" if rest else "", ":".join(rest)


def _bind(source: str, target: str, options: Sequence[str], given: str, adopted: Adopted) -> None:
    flags = [option for option in options if option and option not in _NO_FLAGS]
    unknown = [option for option in flags if option in {"U", "O", "copy"} or "=" in option]
    for option in unknown:
        adopted.lost(f"{given} ({option})", "an EDF's mount has no such flag")
    flags = [option for option in flags if option not in unknown]
    text = f"{source}:{target}"
    adopted.mount(f"{text}:{'+'.join(flags)}" if flags else text, given)


def _mount(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    fields = dict(entry.partition("=")[::2] for entry in value.split(","))
    if fields.get("type", "volume") != "bind":
        adopted.lost(given, f"an EDF mounts folders and files, no {fields.get('type', 'volume')}")
        return
    source = fields.get("source") or fields.get("src", "")
    target = fields.get("target") or fields.get("destination") or fields.get("dst", "")
    read_only = any(fields.get(key, "no").lower() in {"", "true", "1"} for key in ("readonly", "ro"))
    propagation = fields.get("bind-propagation", "")
    for key in fields.keys() - {
        *("type", "source", "src", "target", "destination", "dst", "readonly", "ro", "bind-propagation", "relabel"),
        "consistency",
    }:
        adopted.lost(f"{given} ({key})", "an EDF's mount has no such flag")
    _bind(source, target, [*(("ro",) if read_only else ()), propagation], given, adopted)


def _env(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    name, equals, text = value.partition("=")
    if equals:
        adopted.variable(name, text, given)
    else:
        adopted.holds(given, "the host's variables enter, except where the image has its own")


def _env_file(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    try:
        lines = (folder / value).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        adopted.lost(given, f"cannot read it: {getattr(error, 'strerror', None) or error}")
        return
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            _env(literal(line.lstrip()), f"{given} ({line.partition('=')[0]})", adopted, folder)


def _unset(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    adopted.env[value] = ""


def _workdir(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    adopted.workdir = value


def _read_only(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    adopted.writable = value.lower() == "false"


def _gpus(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    adopted.env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
    adopted.changed(given, "the job's GPUs are seen by NVIDIA_VISIBLE_DEVICES; how many, the job says: gpus_per_node")


def _device(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    if value.startswith("nvidia.com/gpu"):
        _gpus(value, given, adopted, folder)
        return
    adopted.devices.append(value)
    adopted.changed(given, "`devices` is a key that Sarus Suite, podman and docker know, and the Container Engine not")


def _annotation(value: str, given: str, adopted: Adopted, folder: Path) -> None:
    name, _, text = value.partition("=")
    adopted.annotations[name] = text


_READERS: dict[str, Callable[[str, str, Adopted, Path], None]] = {
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
    """Whether an option of srun or sbatch is about the container."""
    return option.name.startswith(_PREFIXES) or option.name in NAMES


def read_flags(options: Sequence[Option], adopted: Adopted) -> None:
    """Take over the flags. Source: pyxis 0.24.0, args.c."""
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
        adopted.changed(given, "is a mount like others now; PYTHONNOUSERSITE keeps ~/.local from shadowing the image")
        adopted.env.setdefault("PYTHONNOUSERSITE", "1")
    elif name == "container-env":
        _names(value, given, adopted)
    elif name in _PYXIS_HOLDS:
        adopted.holds(given, _PYXIS_HOLDS[name])
    else:
        adopted.lost(given, _PYXIS_LOST.get(name, "an EDF has no word for it"))


_PYXIS_HOLDS = {
    "no-container-mount-home": "the home folder is mounted where an EDF says so",
    "no-container-remap-root": "inside you are yourself",
    "no-container-entrypoint-log": "it is off unless asked for",
}
_PYXIS_LOST = {
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


def _pyxis_mount(entry: str, given: str, adopted: Adopted) -> None:
    source, *_ = split_fields(entry)
    if source in {"tmpfs", "umount"}:
        adopted.lost(f"{given} ({entry})", f"an EDF's mount has a file or folder as its source, not {source}")
    elif entry:
        adopted.mount(entry, f"{given} ({entry})")


def _names(value: str, given: str, adopted: Adopted) -> None:
    for name in value.split(","):
        if name not in adopted.env:
            adopted.lost(f"{given} ({name})", f'write its value into [env], which wins over the image\'s: {name} = "…"')
