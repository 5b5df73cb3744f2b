"""Choose the engine that builds and stores images on this machine."""

import hashlib
import os
import resource
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunnerError, unknown
from runner.images.sources.engine_storage import PodmanStore, Store, connect_docker
from runner.machine import files, folders, probe, process
from runner.machine.folders import cache_folder, home

ENGINES = ("podman", "docker")


@dataclass(frozen=True)
class Engine:
    """A usable engine, and the variables that its executable needs."""

    name: str
    why: str
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """adjustments for this machine, one line each"""


def choose_engine(requested: str | None, environ: Mapping[str, str]) -> Engine:
    """The requested engine, or else podman, or else docker if its daemon answers.

    Raises RunnerError with the reason for each engine.
    """
    if requested is not None and requested not in ENGINES:
        raise unknown("engine", requested, ENGINES)
    reasons: dict[str, str] = {}
    for name in (requested,) if requested else ENGINES:
        if name == "podman" and process.which("podman"):
            why = "requested" if requested else "it is on PATH and needs no daemon"
            return Engine("podman", why, *podman_environment(environ))
        reasons[name] = "it is not on PATH" if name == "podman" else docker_refusal(environ)
        if not reasons[name]:
            if requested:
                return Engine("docker", "requested")
            return Engine("docker", f"podman: {reasons['podman']}; docker's daemon answers")
    what = f"{requested} cannot be used here"
    if requested is None:
        what = "no container engine can be used here"
    fix = "use a machine that has podman or docker, or ask an administrator to install podman"
    fix += " (on Debian: apt-get install --no-install-recommends podman)"
    if requested == "docker":
        fix = "make docker work here, or name no engine: runner then takes podman first, and else docker"
    raise RunnerError(what, "\n".join(f"{name}: {reason}" for name, reason in reasons.items()), fix)


def open_store(engine: Engine, environ: Mapping[str, str]) -> Store:
    """The storage of an engine."""
    env = {**environ, **engine.env}
    return PodmanStore(env) if engine.name == "podman" else connect_docker(env)


def docker_refusal(environ: Mapping[str, str]) -> str:
    """Why docker cannot be used on this machine; empty if its daemon, that of docker's current context, answers."""
    import docker
    from docker.context import ContextAPI

    host = environ.get("DOCKER_HOST") or ""
    try:
        host = host or ContextAPI.kwargs_from_context(environment=environ).get("base_url", "")
        socket = Path(host.removeprefix("unix://"))
        if host.startswith("unix://") and not socket.exists():
            return f"there is no socket {socket}: the daemon is not running (to use another socket, set DOCKER_HOST)"
        if host.startswith("unix://") and not os.access(socket, os.R_OK | os.W_OK):
            return f"the socket {socket} refuses this user (an admin can add you to its group: usermod -aG docker USER)"
        docker.from_env(environment=dict(environ), timeout=5).ping()
    except Exception as error:
        # docker's and those of requests; for a damaged context, Exception itself
        return f"{host or 'docker'} does not answer: {error}"
    return ""


_CAP_SYS_RESOURCE = 24  # Source: linux/capability.h
_PODMAN_OPEN_FILES = (
    1048576  # podman's default limit for containers of root; Source: containers-common 0.49
)


def podman_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that podman needs on this machine, and a line about each adjustment."""
    configuration, notes = _configuration(environ)
    storage, more = _storage(environ)
    return {**configuration, **storage}, (*notes, *more)


def _configuration(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """If the defaults of containers.conf do not work here, a private copy of the user's file with the missing keys.

    Keys that the user or the admin has set are kept.
    """
    wanted = needed_settings(
        _has_resource_capability(), *resource.getrlimit(resource.RLIMIT_NOFILE), _is_hybrid()
    )
    own = read_configuration(environ)
    missing = [
        (table, key, value, why)
        for table, key, value, why in wanted
        if key not in own.get(table, {})
    ]
    if not missing:
        return {}, ()
    merged = {
        table: dict(content) if isinstance(content, dict) else content
        for table, content in own.items()
    }
    for table, key, value, _ in missing:
        merged.setdefault(table, {})[key] = value
    import tomlkit

    text = tomlkit.dumps(merged)
    path = (
        cache_folder(environ) / f"containers-{hashlib.sha256(text.encode()).hexdigest()[:12]}.conf"
    )
    if not path.is_file():
        files.write(path, text)
    reasons = "; ".join(f"{key}: {why}" for _, key, _, why in missing if why)
    return {"CONTAINERS_CONF": str(path)}, (
        f"podman reads a containers.conf made by runner, {path}{f': {reasons}' if reasons else ''}",
    )


def _storage(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """For an ordinary user without a storage.conf, choose overlay if it works, because podman 4 would choose vfs.

    vfs copies every file of an image into every layer: an image with ten layers and 2 GB needs 20 GB.
    """
    config = (
        Path(environ.get("XDG_CONFIG_HOME") or home(environ) / ".config")
        / "containers/storage.conf"
    )
    named = environ.get("STORAGE_DRIVER") or environ.get("CONTAINERS_STORAGE_CONF")
    written = (
        config,
        Path("/etc/containers/storage.conf"),
        Path("/usr/share/containers/storage.conf"),
    )
    if probe.is_root() or named or any(path.is_file() for path in written):
        return {}, ()
    root = (
        Path(environ.get("XDG_DATA_HOME") or home(environ) / ".local/share") / "containers/storage"
    )
    overlay = {"STORAGE_DRIVER": "overlay"}
    if (root / "overlay-images").is_dir():
        return overlay, ()
    advice = (
        f"""mkdir -p {config.parent} && printf '[storage]\\ndriver = "overlay"\\n' > {config}"""
    )
    if (root / "vfs-images").is_dir():
        note = f"podman's storage {root} uses the driver vfs, which writes a full copy of the image for each layer"
        if _overlay_works(root.parent):
            note += f"; to use overlay instead (this removes all images): podman system reset && {advice}"
        return {}, (note,)
    if not _overlay_works(root.parent):
        return {}, ()
    return overlay, (
        f"runner uses podman with the storage driver overlay; to use it outside runner too: {advice}",
    )


def _overlay_works(folder: Path) -> bool:
    """Whether podman can use the overlay driver below the folder. Tested with a temporary storage."""
    trial = folder / f"runner-trial-{os.getpid()}"
    # podman allows at most 50 characters for this path
    with folders.temporary("run-", Path("/tmp")) as run:
        where = (f"--root={trial}", f"--runroot={run}", "--storage-driver=overlay")
        done = process.run(("podman", *where, "info"), check=False)
        clean = 'umount "$1/overlay"; rm -rf "$1" "$2"/*'
        process.run(
            ("podman", *where, "unshare", "sh", "-c", clean, "sh", str(trial), str(run)),
            check=False,
        )
    return done.exit_code == 0


def needed_settings(
    may_raise_limits: bool, soft_files: int, hard_files: int, hybrid: bool
) -> list[tuple[str, str, Any, str]]:
    """(table, key, value, reason) of the settings that containers.conf needs on such a machine. Pure."""
    settings: list[tuple[str, str, Any, str]] = []
    if not may_raise_limits and hard_files < _PODMAN_OPEN_FILES:
        # podman itself limits the number of processes to the machine's limit
        limits = [f"nofile={min(soft_files, hard_files)}:{hard_files}"]
        settings.append(
            (
                "containers",
                "default_ulimits",
                limits,
                "root without CAP_SYS_RESOURCE cannot raise limits",
            )
        )
    if hybrid and process.which("runc"):
        settings.append(
            ("engine", "runtime", "runc", "crun refuses hosts with cgroups v1 and v2 mixed")
        )
        settings.append(("engine", "cgroup_manager", "cgroupfs", ""))
        settings.append(("engine", "events_logger", "file", ""))
    return settings


def read_configuration(environ: Mapping[str, str]) -> dict[str, Any]:
    """The merged containers.conf files that podman reads. Source: containers.conf(5)."""
    merged: dict[str, Any] = {}
    for path in _configuration_files(environ):
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise RunnerError(
                f"cannot read {path}", str(error), "fix the file: podman reads it too"
            ) from error
        for table, content in data.items():
            merged[table] = (
                {**merged.get(table, {}), **content} if isinstance(content, dict) else content
            )
    return merged


def _configuration_files(environ: Mapping[str, str]) -> Sequence[Path]:
    if named := environ.get("CONTAINERS_CONF"):
        return (Path(named),)
    config = Path(environ.get("XDG_CONFIG_HOME") or home(environ) / ".config")
    found = [Path("/usr/share/containers/containers.conf")]
    for folder in (Path("/etc/containers"), config / "containers"):
        found += [
            folder / "containers.conf",
            *sorted((folder / "containers.conf.d").glob("*.conf")),
        ]
    return found


def _has_resource_capability() -> bool:
    """Whether limits can be raised. An ordinary user's podman does not change limits, and needs no adjustment."""
    if not probe.is_root():
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _is_hybrid() -> bool:
    """Whether cgroups v1 and v2 are both mounted, which crun does not support."""
    unified = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return unified.is_file() and bool(unified.read_text().strip())
