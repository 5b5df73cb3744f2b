"""The storages of engines: inspect an image, and read the file tree of a container as a tar stream.

podman is used through its executable, because it has no daemon; docker through its socket, with the docker SDK.
"""

import io
import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from runner.errors import RunnerError
from runner.images.layers.layer import Layer, LayeredImage, Reader
from runner.images.reference import split_tag
from runner.images.sources.manifest import refuse_architecture
from runner.machine import probe, process, sessions
from runner.machine.report import Report


@dataclass(frozen=True)
class Image:
    """An image in the storage of podman or docker."""

    name: str
    """without the tag: `localhost/runner/cpu`"""
    tag: str
    """the tag; for images that runner builds, the content hash (12 hex digits); empty: none"""
    engine: str
    id: str
    """sha256 of the image's configuration, hex"""
    architecture: str
    """as OCI names it: amd64, arm64"""
    size_bytes: int
    config: Mapping[str, Any]
    """the runtime part of the OCI configuration: Env, Entrypoint, Cmd, WorkingDir, Labels, Volumes"""
    digest: str = ""
    """the digest of the manifest, `sha256:…`; empty if the engine does not know it"""
    repo_digests: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """NAME:TAG, or the id of an image without a name."""
        if not self.name:
            return self.id
        return f"{self.name}:{self.tag}" if self.tag else self.name

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


def from_inspect(data: Mapping[str, Any], engine: str, reference: str = "") -> Image:
    """The image that `podman image inspect` or docker's `GET /images/NAME/json` describes."""
    name, tag = split_tag(reference) if reference else ("", "")
    return Image(
        name=name,
        tag=tag,
        engine=engine,
        id=str(data["Id"]).removeprefix("sha256:"),
        architecture=probe.oci_architecture(str(data.get("Architecture") or "")),
        size_bytes=int(data.get("Size") or 0),
        config=data.get("Config") or {},
        digest=str(data.get("Digest") or ""),
        repo_digests=tuple(data.get("RepoDigests") or ()),
    )


LABEL = "runner.import.process"
"""label with the process that created a container: MACHINE PID BOOT:START"""
# creating a container requires a command even if the image has none; the container is never started
NEVER_STARTED = "runner-import"
_LIST_SECONDS = 5.0
_REMOVE_SECONDS = 60.0


# what podman says about a missing image, and about a name that no image can have, such as enroot's REGISTRY#IMAGE
_MISSING = (
    "image not known",
    "no such image",
    "failed to find image",
    "invalid reference format",
    "repository name must be lowercase",
)


class PodmanStore:
    """podman's storage through its executable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def find(self, reference: str) -> Image | None:
        """The image with a name or id; None if the storage does not have it. Pulls nothing."""
        done = process.run(("podman", "image", "inspect", reference), env=self.env, check=False)
        if done.exit_code == 0:
            return from_inspect(json.loads(done.stdout)[0], "podman", reference)
        if any(words in done.stderr for words in _MISSING):
            return None
        raise process.failed(done, "podman info   (prints what is wrong with the storage)")

    def create(self, image: Image, name: str, labels: Mapping[str, str]) -> str:
        """Create, but do not start, a container with a name and labels. Returns its id."""
        flags = tuple(f"--label={key}={value}" for key, value in labels.items())
        # volumes that the image declares must be plain folders: their content belongs in the squashfs
        argv = (
            "podman",
            "create",
            "--pull=never",
            "--image-volume=ignore",
            "--network=none",
            *flags,
        )
        argv = (*argv, f"--name={name}")
        done = process.run((*argv, image.id, NEVER_STARTED), env=self.env)
        return done.stdout.split()[-1]

    @contextmanager
    def export(self, container: str) -> Iterator[Reader]:
        """The container's file tree as a tar stream. Raises RunnerError at the end if the engine fails."""
        # podman keeps both ends of its stdout open, so it does not notice that its reader has died (4.3.1). It would
        # then hold the container's lock forever, and block `podman ps`. With this, it dies when we do.
        dies_with_us = ("setpriv", "--pdeathsig", "KILL") if process.which("setpriv") else ()
        argv = (*dies_with_us, "podman", "export", container)
        pipe = subprocess.PIPE
        child = process.start(
            argv, self.env, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=1 << 20
        )
        assert child.stdout is not None and child.stderr is not None
        try:
            yield child.stdout
            words = child.stderr.read().decode(errors="replace")
            if child.wait() != 0:
                raise process.failed(process.Completed(argv, child.returncode, "", words))
        finally:
            if child.poll() is None:
                process.end_group(child.pid)
            child.stdout.close()
            child.stderr.close()
            child.wait()

    def containers(self, label: str) -> dict[str, Mapping[str, str]]:
        """The ids of the containers, running or not, that have a label, each with all its labels."""
        argv = ("podman", "ps", "--all", "--filter", f"label={label}", "--format", "json")
        # podman locks each container for this, and another running import holds the lock of its container
        found = (
            json.loads(
                process.run(argv, env=self.env, timeout_seconds=_LIST_SECONDS).stdout or "null"
            )
            or ()
        )
        return {entry["Id"]: entry.get("Labels") or {} for entry in found}

    def remove(self, container: str) -> None:
        """Remove, by id or name, a container that runner created. A missing container is not an error."""
        argv = ("podman", "rm", "--force", "--ignore", "--volumes", container)
        process.run(argv, env=self.env, check=False, timeout_seconds=_REMOVE_SECONDS)


class DockerStore:
    """docker's storage through its socket, with the methods of PodmanStore.

    If the daemon stops, `requests` raises an error, which is an OSError.
    """

    def __init__(self, client: Any) -> None:
        self.client = client

    def find(self, reference: str) -> Image | None:
        import docker.errors

        with _asking("inspect an image"):
            try:
                return from_inspect(self.client.api.inspect_image(reference), "docker", reference)
            except docker.errors.APIError as error:
                if error.status_code not in (400, 404):  # 400: no image can have this name
                    raise
        return None

    def create(self, image: Image, name: str, labels: Mapping[str, str]) -> str:
        with _asking("create a container"):
            made = self.client.api.create_container(
                image.id, [NEVER_STARTED], name=name, labels=dict(labels)
            )
        return str(made["Id"])

    @contextmanager
    def export(self, container: str) -> Iterator[Reader]:
        with _asking("export a container"):
            chunks = self.client.api.export(container, chunk_size=1 << 20)
        try:
            yield io.BufferedReader(_Chunks(chunks), buffer_size=1 << 20)
        finally:
            chunks.close()

    def containers(self, label: str) -> dict[str, Mapping[str, str]]:
        with _asking("list containers"):
            found = self.client.api.containers(all=True, filters={"label": label})
        return {entry["Id"]: entry.get("Labels") or {} for entry in found}

    def remove(self, container: str) -> None:
        import docker.errors

        with _asking("remove a container"), suppress(docker.errors.NotFound):
            self.client.api.remove_container(container, v=True, force=True)


Store = PodmanStore | DockerStore


def connect_docker(environ: Mapping[str, str]) -> DockerStore:
    """The storage of docker's daemon. Raises RunnerError if the daemon cannot be reached."""
    import docker

    with _asking("be reached"):
        return DockerStore(docker.from_env(environment=dict(environ), timeout=600))


class _Chunks(io.RawIOBase):
    """An iterator of chunks as a raw stream."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks, self.rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read available bytes into the buffer; 0 at the end."""
        while not self.rest:
            with _asking("export a whole container"):
                chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.rest = chunk
        size = min(len(buffer), len(self.rest))
        buffer[:size], self.rest = self.rest[:size], self.rest[size:]
        return size


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Turn an error of docker into a RunnerError."""
    import docker.errors
    import urllib3.exceptions

    try:
        yield
    except (OSError, docker.errors.DockerException, urllib3.exceptions.HTTPError) as error:
        fix = (
            "docker info   (shows whether the daemon works; to use another socket, set DOCKER_HOST)"
        )
        raise RunnerError(f"docker could not {what}", str(error), fix) from error


def find(store: Store, name: str, engine: str) -> Image:
    """The image with a name in an engine's storage. Raises RunnerError if there is none. Pulls nothing."""
    image = store.find(name)
    if image is None:
        raise RunnerError(
            f"{engine} has no image {name!r}",
            "runner searched only the local storage of the engine, and pulled nothing",
            f"{engine} images   (lists its images); to read an image from a registry: docker://REGISTRY#IMAGE:TAG",
        )
    return image


def exported(
    image: Image, store: Store, report: Report, *, architecture: str, reference: str
) -> LayeredImage:
    """The image as one layer. Raises RunnerError for another architecture."""
    refuse_architecture(image.architecture, architecture, reference)
    return LayeredImage(
        reference=reference,
        id=image.id,
        digest=image.digest,
        architecture=architecture,
        config=image.config,
        layers=(Layer("", "", 0, lambda: _tree(image, store, report)),),
        estimate_bytes=image.size_bytes,
    )


@contextmanager
def _tree(image: Image, store: Store, report: Report) -> Iterator[Reader]:
    """The file tree of a temporary container."""
    clear_containers(store, report)
    name = f"runner-import-{os.getpid()}-{secrets.token_hex(4)}"
    container = store.create(
        image, name, {LABEL: f"{_machine()} {os.getpid()} {sessions.identity(os.getpid())}"}
    )
    try:
        with store.export(container) as stream:
            yield stream
    finally:
        with suppress(RunnerError):  # the next import removes it
            store.remove(container)


def clear_containers(store: Store, report: Report) -> None:
    """Remove the containers of killed imports on this machine."""
    try:
        containers = store.containers(LABEL)
    except RunnerError as error:
        report.detail(
            f"cannot look for containers that interrupted imports left behind: {error.why}"
        )
        return
    for container, labels in containers.items():
        machine, _, process_name = labels.get(LABEL, "").partition(" ")
        pid, _, identity = process_name.partition(" ")
        if machine == _machine() and pid.isdigit() and sessions.identity(int(pid)) != identity:
            report.say(
                f"removing container {container[:12]}, which an interrupted import left behind"
            )
            try:
                store.remove(container)
            except RunnerError as error:  # another import may be removing it at the same time
                report.detail(f"it was not removed: {error.why}")


def _machine() -> str:
    """An id of this machine and its process namespace. The initial namespace has the same number on every machine."""
    return f"{os.uname().nodename}:{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116  a magic link
