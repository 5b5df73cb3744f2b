"""Which engine builds and keeps images here, and why."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError, unknown
from runner.images.podman_setup import podman_environment
from runner.machine import process

if TYPE_CHECKING:
    from runner.images.oci.store import Store

ENGINES = ("podman", "docker")


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
            return _podman(asked, environ) if name == "podman" else _docker(asked, environ, reasons)
        reasons[name] = reason
    raise RunnerError(
        "no container engine can be used here" if asked is None else f"{asked} cannot be used here",
        "\n".join(f"{name}: {reason}" for name, reason in reasons.items()),
        "apt-get install --no-install-recommends podman   (or start docker: systemctl start docker)",
    )


def open_store(engine: Engine) -> Store:
    """The storage of an engine."""
    from runner.images.oci.store import PodmanStore, connect_docker

    return PodmanStore(engine.env) if engine.name == "podman" else connect_docker({**os.environ, **engine.env})


def _podman(asked: str | None, environ: Mapping[str, str]) -> Engine:
    env, notes = podman_environment(environ)
    why = "asked for" if asked else "it is on PATH and needs no daemon"
    return Engine("podman", why, env, notes)


def _docker(asked: str | None, environ: Mapping[str, str], reasons: Mapping[str, str]) -> Engine:
    why = "asked for" if asked else f"podman: {reasons.get('podman', '')}; docker's daemon answers"
    return Engine("docker", why, docker_environment(environ))


def docker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that lead to the daemon of docker's current context, as Colima and rootless docker set one.

    Empty where DOCKER_HOST is set, which wins, and for the default context. Source: docker/cli, cli/command/cli.go.
    """
    if environ.get("DOCKER_HOST"):
        return {}
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or "~").expanduser() / ".docker")
    name = environ.get("DOCKER_CONTEXT") or _json(folder / "config.json").get("currentContext")
    if not name or name == "default":
        return {}
    key = hashlib.sha256(str(name).encode()).hexdigest()
    endpoint = (_json(folder / "contexts/meta" / key / "meta.json").get("Endpoints") or {}).get("docker") or {}
    if not endpoint.get("Host"):
        return {}
    certificates = folder / "contexts/tls" / key / "docker"
    verify = {} if endpoint.get("SkipTLSVerify") else {"DOCKER_TLS_VERIFY": "1"}
    tls = {"DOCKER_CERT_PATH": str(certificates), **verify} if certificates.is_dir() else {}
    return {"DOCKER_HOST": str(endpoint["Host"]), **tls}


def _json(path: Path) -> dict[str, Any]:
    """A JSON object of docker's; empty where the file is missing or damaged."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def docker_refusal(environ: Mapping[str, str]) -> str:
    """Why docker cannot be used here; empty when its daemon answers."""
    environ = {**environ, **docker_environment(environ)}
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
