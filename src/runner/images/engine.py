"""Which engine builds and keeps images here, why, and what podman must be told on machines that its defaults miss."""

from __future__ import annotations

import hashlib
import os
import resource
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError, unknown
from runner.machine import files, probe, process

if TYPE_CHECKING:
    from runner.images.oci.store import Store

ENGINES = ("podman", "docker")
_CAP_SYS_RESOURCE = 24  # Source: linux/capability.h
_PODMAN_OPEN_FILES = 1048576  # podman's default limit for containers of root; Source: containers-common, 0.49


@dataclass(frozen=True)
class Engine:
    """An engine that can be used here, and what its executable needs in its environment."""

    name: str
    why: str
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """what was adjusted for this machine, one line each"""


def choose_engine(asked: str | None, environ: Mapping[str, str]) -> Engine:
    """The engine that was asked for, else podman, else docker where its daemon answers.

    Raises RunnerError that says of each why it cannot be used.
    """
    if asked is not None and asked not in ENGINES:
        raise unknown("engine", asked, ENGINES)
    reasons: dict[str, str] = {}
    for name in (asked,) if asked else ENGINES:
        reason = "it is not on PATH" if name == "podman" else docker_refusal(environ)
        if name == "podman" and process.which("podman"):
            reason = ""
        if not reason:
            return _podman(asked, environ) if name == "podman" else _docker(asked, reasons)
        reasons[name] = reason
    raise RunnerError(
        "no container engine can be used here" if asked is None else f"{asked} cannot be used here",
        "\n".join(f"{name}: {reason}" for name, reason in reasons.items()),
        "apt-get install --no-install-recommends podman   (or start docker: systemctl start docker)",
    )


def open_store(engine: Engine) -> Store:
    """The storage of an engine."""
    from runner.images.oci.store import DockerStore, PodmanStore

    if engine.name == "podman":
        return PodmanStore(engine.env)
    import docker

    return DockerStore(docker.from_env(timeout=600))


def _podman(asked: str | None, environ: Mapping[str, str]) -> Engine:
    env, notes = podman_environment(environ)
    why = "asked for" if asked else "it is on PATH and needs no daemon"
    return Engine("podman", why, env, notes)


def _docker(asked: str | None, reasons: Mapping[str, str]) -> Engine:
    why = "asked for" if asked else f"podman: {reasons.get('podman', '')}; docker's daemon answers"
    return Engine("docker", why)


def docker_refusal(environ: Mapping[str, str]) -> str:
    """Why docker cannot be used here; empty when its daemon answers."""
    host = environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    socket = Path(host.removeprefix("unix://"))
    if host.startswith("unix://"):
        if not socket.exists():
            return f"there is no socket {socket}: the daemon does not run (DOCKER_HOST names another socket)"
        if not os.access(socket, os.R_OK | os.W_OK):
            return f"the socket {socket} refuses this user (an admin can add you to its group: usermod -aG docker USER)"
    import docker
    import docker.errors
    import requests

    try:
        docker.from_env(environment=dict(environ), timeout=5).ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        return f"{host} does not answer: {error}"
    return ""


def podman_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What must stand in podman's environment on this machine, and a line about each adjustment.

    Where the defaults of containers.conf cannot work, a private copy of the user's own configuration with the
    missing keys is written and named by CONTAINERS_CONF. Keys that the user or the admin has set stay as they are.
    """
    wanted = needed_settings(_has_resource_capability(), *_open_file_limits(), _is_hybrid())
    own = read_configuration(environ)
    missing = [(table, key, value, why) for table, key, value, why in wanted if key not in own.get(table, {})]
    if not missing:
        return {}, ()
    merged = {table: dict(content) if isinstance(content, dict) else content for table, content in own.items()}
    for table, key, value, _ in missing:
        merged.setdefault(table, {})[key] = value
    import tomlkit

    text = tomlkit.dumps(merged)
    path = cache_folder(environ) / f"containers-{hashlib.sha256(text.encode()).hexdigest()[:12]}.conf"
    if not path.is_file():
        files.write(path, text)
    reasons = "; ".join(f"{key}: {why}" for _, key, _, why in missing if why)
    return {"CONTAINERS_CONF": str(path)}, (f"podman gets a private containers.conf here, {path}: {reasons}",)


def needed_settings(
    may_raise_limits: bool, soft_files: int, hard_files: int, hybrid: bool
) -> list[tuple[str, str, Any, str]]:
    """(table, key, value, why) of what containers.conf needs on such a machine. Pure."""
    settings: list[tuple[str, str, Any, str]] = []
    if not may_raise_limits and hard_files < _PODMAN_OPEN_FILES:
        # the number of processes is left to podman: it stays below the machine's own limit by itself
        limits = [f"nofile={min(soft_files, hard_files)}:{hard_files}"]
        settings.append(("containers", "default_ulimits", limits, "root without CAP_SYS_RESOURCE cannot raise limits"))
    if hybrid and process.which("runc"):
        settings.append(("engine", "runtime", "runc", "crun refuses hosts with cgroups v1 and v2 mixed"))
        settings.append(("engine", "cgroup_manager", "cgroupfs", ""))
        settings.append(("engine", "events_logger", "file", ""))
    return settings


def read_configuration(environ: Mapping[str, str]) -> dict[str, Any]:
    """The containers.conf that podman would read, all its files merged. Source: containers.conf(5)."""
    merged: dict[str, Any] = {}
    for path in _configuration_files(environ):
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise RunnerError(f"cannot read {path}", str(error), "podman reads this file too: mend it") from error
        for table, content in data.items():
            merged[table] = {**merged.get(table, {}), **content} if isinstance(content, dict) else content
    return merged


def _configuration_files(environ: Mapping[str, str]) -> Sequence[Path]:
    if named := environ.get("CONTAINERS_CONF"):
        return (Path(named),)
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config")
    found = [Path("/usr/share/containers/containers.conf")]
    for folder in (Path("/etc/containers"), config / "containers"):
        found += [folder / "containers.conf", *sorted((folder / "containers.conf.d").glob("*.conf"))]
    return found


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder for what can be made again: private configurations, staged contexts, logs of builds."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return Path(base) / "runner"


def _has_resource_capability() -> bool:
    """Whether limits can be raised; an ordinary user's podman keeps the limits as they are and needs no help."""
    if not probe.is_root():
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _open_file_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _is_hybrid() -> bool:
    """Whether cgroups v1 and v2 are both mounted, which crun refuses."""
    unified = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return unified.is_file() and bool(unified.read_text().strip())
