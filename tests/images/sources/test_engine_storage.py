"""docker's socket gives an image as one layer, and no container stays behind; spoken to podman's socket."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage
from runner.images.source import Source
from runner.images.sources.open import SourceOptions, open_image
from runner.machine import probe
from tests.images.sources import stored
from tests.images.sources.handmade import make_tar, read_layer, write_docker_archive
from tests.lab.podman import Podman
from tests.lab.processes import wait_until

pytestmark = pytest.mark.uses("podman")
NAME = "runner-import-of-this-test"


@contextmanager
def opened(socket: str, name: str, architecture: str = "") -> Iterator[LayeredImage]:
    def name_container() -> tuple[str, Mapping[str, str]]:
        return NAME, {"runner.import.target": "/nowhere/x.sqsh"}

    source, options = Source("dockerd", name), SourceOptions(name_container=name_container)
    wanted = architecture or probe.architecture()
    with open_image(source, architecture=wanted, environ={"DOCKER_HOST": socket}, options=options) as image:
        yield image


def left(podman: Podman) -> str:
    return podman.run("ps", "--all", "--filter", f"name={NAME}", "--format={{.Names}}").stdout


@pytest.fixture(scope="module")
def handmade(podman: Podman) -> str:
    return stored.load_handmade(podman)


def test_the_tree_is_one_layer_without_digests(podman: Podman, docker_socket: str, handmade: str) -> None:
    with opened(docker_socket, handmade) as image:
        assert image.reference == f"dockerd://{handmade}"
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
            assert left(podman) == f"{NAME}\n"
        assert left(podman) == ""
        with pytest.raises(KeyError), image.layers[0].open():
            raise KeyError
    assert left(podman) == ""


def test_the_left_over_of_a_killed_import_is_replaced(podman: Podman, docker_socket: str, handmade: str) -> None:
    podman.run("create", f"--name={NAME}", handmade, "nothing")
    with opened(docker_socket, handmade) as image:
        assert read_layer(image.layers[0])
    assert left(podman) == ""


def test_what_cannot_be_read_is_said(podman: Podman, docker_socket: str, handmade: str) -> None:
    with pytest.raises(RunnerError, match="docker has no image 'localhost/absent'"):
        opened(docker_socket, "localhost/absent").__enter__()
    with pytest.raises(RunnerError, match="is an image for amd64" if probe.architecture() != "s390x" else "x"):
        opened(docker_socket, handmade, architecture="s390x").__enter__()
    with pytest.raises(RunnerError, match="daemon cannot be reached"):
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
                with pytest.raises(RunnerError, match="docker could not export a container to its end"):
                    while stream.read(1 << 20):
                        pass
        finally:
            server.kill()
            podman.run("rm", "--force", NAME, check=False)  # the daemon could not any more
            podman.run("rmi", "--force", "localhost/heavy:1", stored.HANDMADE, check=False)
