"""docker's socket gives an image as one layer, and no container stays behind; spoken to podman's socket."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import docker.errors
import pytest

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage
from runner.images.reference import Source
from runner.images.sources.engine_storage import LABEL, DockerStore, PodmanStore, clear_containers
from runner.machine import probe, sessions
from runner.machine.report import Quiet
from tests.images.handmade import make_tar, open_source, read_layer, write_docker_archive
from tests.images.sources import stored
from tests.lab.podman import Podman
from tests.lab.processes import wait_until

pytestmark = pytest.mark.uses("podman")
NAME = f"runner-import-{os.getpid()}-"


def opened(socket: str, name: str, architecture: str = "") -> AbstractContextManager[LayeredImage]:
    return open_source(Source("dockerd", name), {"DOCKER_HOST": socket}, architecture or probe.architecture())


def left(podman: Podman) -> str:
    return podman.run("ps", "--all", "--filter", f"name={NAME}", "--format={{.Names}}").stdout


@pytest.fixture(scope="module")
def handmade(podman: Podman) -> str:
    return stored.load_handmade(podman)


def test_the_tree_is_one_layer_without_digests(podman: Podman, docker_socket: str, handmade: str) -> None:
    with opened(docker_socket, handmade) as image:
        assert image.reference == handmade
        assert image.id == podman.run("image", "inspect", "--format={{.Id}}", handmade).stdout.strip()
        assert image.config["Env"] == ["A=b"] and image.size_bytes > 0
        assert [(layer.diff_id, layer.digest) for layer in image.layers] == [("", "")]
        assert left(podman) == ""  # created when the layer is opened, not before
        with tarfile.open(fileobj=io.BytesIO(read_layer(image.layers[0]))) as tar:
            names = tar.getnames()
    assert "absolute" in names and "big" not in names
    assert left(podman) == ""


def test_the_container_goes_when_the_reader_leaves_early(podman: Podman, docker_socket: str, handmade: str) -> None:
    with opened(docker_socket, handmade) as image:
        with image.layers[0].open() as stream:
            assert len(stream.read(5000)) == 5000
            assert left(podman).startswith(NAME)
        assert left(podman) == ""
        with pytest.raises(KeyError), image.layers[0].open():
            raise KeyError
    assert left(podman) == ""


def test_containers_of_killed_imports_of_this_machine_go(podman: Podman, docker_socket: str, handmade: str) -> None:
    """A container stays while its process lives, and where another machine, or another program, made it."""
    machine = f"{os.uname().nodename}:{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    pid, parent = os.getpid(), sessions.identity(os.getppid())
    other = f"{parent}0"  # the parent's own may be equal to ours: both may have started at the same clock tick
    makers = {
        "killed": f"{machine} {pid} {other}",
        "rebooted": f"{machine} 1 0000:1",
        "alive": f"{machine} {os.getppid()} {parent}",
        "elsewhere": f"node7:4026531836 {pid} {other}",
        "odd": "what?",
    }
    for name, maker in makers.items():
        podman.run("create", f"--name=of-{name}", f"--label={LABEL}={maker}", handmade, "nothing")
    podman.run("create", "--name=of-stranger", handmade, "nothing")
    with opened(docker_socket, handmade) as image:
        assert read_layer(image.layers[0])
    names = podman.run("ps", "--all", "--filter", "name=of-", "--format={{.Names}}").stdout.split()
    assert sorted(names) == ["of-alive", "of-elsewhere", "of-odd", "of-stranger"]
    podman.run("rm", "--force", *names)


def test_a_container_that_another_import_is_removing_is_not_an_error() -> None:
    words = "removal of container cc is already in progress"

    def remove_container(*_: object, **__: object) -> None:
        raise docker.errors.APIError(words)

    machine = f"{os.uname().nodename}:{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    entry = {"Id": "cc", "Labels": {LABEL: f"{machine} 1 0000:1"}}
    api = SimpleNamespace(containers=lambda **_: [entry], remove_container=remove_container)
    report = Quiet()
    clear_containers(DockerStore(SimpleNamespace(api=api)), report)
    assert any("removing container cc" in line for line in report.lines)


def test_what_cannot_be_read_is_said(podman: Podman, docker_socket: str, handmade: str) -> None:
    with pytest.raises(RunnerError, match="docker has no image 'localhost/absent'"):
        opened(docker_socket, "localhost/absent").__enter__()
    with pytest.raises(RunnerError, match="is an image for amd64" if probe.architecture() != "s390x" else "x"):
        opened(docker_socket, handmade, architecture="s390x").__enter__()
    with pytest.raises(RunnerError, match="docker cannot be used here"):
        opened("unix:///nowhere.sock", handmade).__enter__()


def test_a_daemon_that_dies_midway_is_an_error(podman: Podman) -> None:
    noise = random.Random(9).randbytes(30_000_000)
    path = write_docker_archive(podman.folder / "tmp/heavy.tar", [make_tar({"noise": noise})])
    podman.run("load", "--quiet", "--input", str(path))
    podman.run("tag", stored.HANDMADE, "localhost/heavy:1")
    url = f"unix://{podman.folder}/mortal.sock"
    with subprocess.Popen(("podman", "system", "service", "--time=0", url), env=podman.environ) as server:
        try:
            wait_until((podman.folder / "mortal.sock").exists, 20, "podman's socket")
            with opened(url, "localhost/heavy:1") as image, image.layers[0].open() as stream:
                assert len(stream.read(100_000)) == 100_000
                server.kill()
                with pytest.raises(RunnerError, match="docker could not export a whole container"):
                    while stream.read(1 << 20):
                        pass
        finally:
            server.kill()
            podman.run("rm", "--force", *left(podman).split(), check=False)  # the daemon could not
            podman.run("rmi", "--force", "localhost/heavy:1", stored.HANDMADE, check=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvcr.io#nvidia/pytorch:24.06-py3", "Error: inspecting object: invalid reference format"),
        ("Mine", "Error: inspecting object: repository name must be lowercase"),
    ],
)
def test_a_name_that_no_image_can_have_is_a_missing_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "podman").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert PodmanStore(os.environ).find(name) is None

    def refuse(_: str) -> None:
        raise docker.errors.APIError("400", SimpleNamespace(status_code=400, reason="Bad Request", url=""))

    assert DockerStore(SimpleNamespace(api=SimpleNamespace(inspect_image=refuse))).find(name) is None


def test_a_machine_without_engines_tells_how_to_read_from_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"PATH": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    with pytest.raises(RunnerError) as caught, open_source(Source("", "nvcr.io/nvidia/pytorch:24.06-py3"), environ):
        pass
    assert caught.value.fix.startswith(
        "to read it from its registry: docker://nvcr.io#nvidia/pytorch:24.06-py3\nor use a machine that has"
    )
