"""podman's storage gives each layer's tar as it was, bit by bit; to root, to a user, with overlay and with vfs."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.errors import RunnerError
from runner.images.sources.podman_storage import NotRebuildable, StoredLayer, chain_of
from runner.machine.report import Quiet
from tests.images.handmade import make_tar, plain_digests, write_docker_archive
from tests.images.sources import stored
from tests.lab.ordinary_user import ordinary_user
from tests.lab.podman import Podman
from tests.waiting import until

pytestmark = pytest.mark.uses("podman", "busybox")


class OtherPodman(Podman):
    """A podman with another kind of storage, or with more than one."""

    driver = "vfs"
    options = ""

    def _check_that_storage_is_private(self) -> None:
        path = self.folder / "storage.conf"
        path.write_text(path.read_text().replace('"overlay"', f'"{self.driver}"') + self.options)
        super()._check_that_storage_is_private()


def agree(found: dict[str, Any]) -> None:
    """What was read is what podman says."""
    assert found["read"] == found["diff_ids"] == found["podman's layers"]
    assert (found["id"], found["digest"]) == (found["podman's id"], found["podman's digest"])
    assert not found["notes"] and not found["left"]
    assert found["size"] > 0


@pytest.fixture(scope="module")
def handmade(podman: Podman) -> str:
    return stored.load_handmade(podman)


def test_layers_come_back_bit_by_bit(podman: Podman, handmade: str) -> None:
    agree(stored.report(podman, handmade))
    built = stored.report(podman, stored.build(podman))
    agree(built)
    assert len(built["read"]) == 4
    assert built["entrypoint"] == ["/bin/sh"]


def test_vfs_gives_the_same() -> None:
    with OtherPodman() as podman:
        assert podman.run("info", "--format={{.Store.GraphDriverName}}").stdout == "vfs\n"
        agree(stored.report(podman, stored.load_handmade(podman)))
        agree(stored.report(podman, stored.build(podman)))


def test_layers_of_a_store_for_reading_alone(podman: Podman, handmade: str) -> None:
    """The lower layers lie in another storage than the image."""

    class Shared(OtherPodman):
        driver = "overlay"
        options = f'[storage.options]\nadditionalimagestores = ["{podman.folder}/storage"]\n'

    with Shared() as other:
        agree(stored.report(other, handmade))
        (other.folder / "tmp/Containerfile").write_text(f"FROM {handmade}\nCOPY Containerfile /\n")
        other.run("build", "--quiet", "--tag=localhost/above:1", str(other.folder / "tmp"))
        found = stored.report(other, "localhost/above:1")
        agree(found)
        assert len(found["read"]) == 3


@pytest.mark.uses("rootless")
def test_a_users_storage_is_read_within_its_own_namespace() -> None:
    """Its files belong to subordinate ids: the user itself could not read them."""
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    here = Path(__file__).parent
    with ordinary_user() as user:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(runner.__file__).parent, user.home / "runner", ignore=ignore)
        shutil.copytree(here, user.home / "tests/images/sources", ignore=ignore)
        shutil.copy(here.parent / "handmade.py", user.home / "tests/images")
        subprocess.run(("chown", "-R", f"{user.name}:", str(user.home)), check=True)
        done = user.run("/usr/bin/python3", "-m", "tests.images.sources.stored")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        for image in found["images"].values():
            agree(image)


def test_an_image_of_another_architecture_is_refused(podman: Podman, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY Containerfile /\n")
    podman.run("build", "--quiet", "--platform=linux/s390x", "--tag=localhost/other:1", str(tmp_path))
    with (
        pytest.raises(RunnerError, match="'localhost/other:1' is an image for s390x"),
        stored.opened(podman, "localhost/other:1"),
    ):
        pass
    with pytest.raises(RunnerError, match="podman has no image"), stored.opened(podman, "localhost/absent"):
        pass


@pytest.fixture
def many(podman: Podman) -> Iterator[str]:
    """An image of 4000 files, 40 MB: more than any pipe holds."""
    noise = random.Random(5).randbytes(10_000)
    layer = make_tar({f"f{number}": noise for number in range(4000)})
    path = write_docker_archive(podman.folder / "tmp/many.tar", [layer, make_tar({"last": b"1"})])
    podman.run("rmi", "--force", stored.HANDMADE, check=False)
    podman.run("load", "--quiet", "--input", str(path))
    podman.run("tag", stored.HANDMADE, "localhost/many:1")
    podman.run("rmi", stored.HANDMADE)
    yield "localhost/many:1"
    podman.run("rmi", "--force", "localhost/many:1", check=False)


def test_an_image_that_is_removed_meanwhile_is_an_error(podman: Podman, many: str) -> None:
    with stored.opened(podman, many) as image, image.layers[0].open() as stream:
        assert len(stream.read(1 << 20)) == 1 << 20
        podman.run("rmi", "--force", many)
        with pytest.raises(RunnerError, match="No such file") as caught:
            while stream.read(1 << 20):
                pass
        assert "import it again" in caught.value.fix
        # the other layer is gone as a whole
        with pytest.raises(RunnerError), image.layers[1].open() as second:
            second.read()


def test_a_layer_that_is_left_early_disturbs_no_other(podman: Podman, many: str) -> None:
    with stored.opened(podman, many) as image:
        with image.layers[0].open() as stream:
            stream.read(1000)
        with image.layers[0].open() as first, image.layers[1].open() as second:
            first.read(1000)
            assert len(second.read()) == image.layers[1].size_bytes
        assert plain_digests(image) == [layer.diff_id for layer in image.layers]
        assert len(helpers(os.getpid())) == 1
    assert not helpers(os.getpid())


def test_a_helper_that_dies_is_an_error_not_a_hang(podman: Podman, many: str) -> None:
    with stored.opened(podman, many) as image, image.layers[0].open() as stream:
        stream.read(1000)
        for pid in helpers(os.getpid()):
            os.killpg(pid, signal.SIGKILL)
        with pytest.raises(RunnerError, match="has died"):
            while stream.read(1 << 20):
                pass
        with pytest.raises(RunnerError, match="has died"), image.layers[1].open() as second:
            second.read()


def test_helpers_end_with_a_reader_that_was_killed(podman: Podman, many: str) -> None:
    code = (
        "import sys, time; from tests.images.sources import stored; from tests.lab.podman import Podman; "
        "podman = Podman(folder=__import__('pathlib').Path(sys.argv[1])); opened = stored.opened(podman, sys.argv[2]); "
        "stream = opened.__enter__().layers[0].open(); stream.__enter__().read(9); print('open', flush=True); "
        "time.sleep(60)"
    )
    argv = (sys.executable, "-c", code, str(podman.folder), many)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        found = helpers(child.pid)
        found += [grandchild for pid in found for grandchild in children(pid)]
        assert len(found) == 2
        child.kill()
    until(lambda: not any(is_alive(pid) for pid in found), seconds=60)  # the layer is never read to its end


def diff_folder(podman: Podman, name: str, *, layer: int) -> Path:
    """Where the storage keeps the files of one layer, counted from below."""
    driver = json.loads(podman.run("image", "inspect", name).stdout)[0]["GraphDriver"]["Data"]
    folders = [driver["UpperDir"], *filter(None, driver.get("LowerDir", "").split(":"))]
    return Path(list(reversed(folders))[layer])


def test_a_link_in_the_place_of_a_file_leads_nowhere(podman: Podman, tmp_path: Path) -> None:
    """Whoever may write to the storage cannot make the reader fetch other files of the machine."""
    if os.geteuid() != 0:
        pytest.skip("a layer's files belong to subordinate ids: their user cannot replace them from outside")
    name = stored.load_handmade(podman)
    folder = diff_folder(podman, name, layer=0)
    (tmp_path / "file").write_bytes((folder / "folder/file").read_bytes())
    try:
        shutil.move(folder / "folder", folder / "kept")
        (folder / "folder").symlink_to(tmp_path)
        refuse_first_layer(podman, name)
        (folder / "folder").unlink()
        (folder / "folder").mkdir()
        (folder / "folder/file").symlink_to(tmp_path / "file")
        refuse_first_layer(podman, name)
        (folder / "folder/file").unlink()
        os.mkfifo(folder / "folder/file")
        refuse_first_layer(podman, name)
    finally:
        podman.run("rmi", "--force", name)


def refuse_first_layer(podman: Podman, name: str) -> None:
    with (
        stored.opened(podman, name) as image,
        pytest.raises(RunnerError, match="cannot read localhost"),
        image.layers[0].open() as stream,
    ):
        while stream.read(1 << 20):
            pass


def test_without_the_tars_skeleton_the_image_is_one_layer(podman: Podman) -> None:
    name = stored.load_handmade(podman)
    folder = diff_folder(podman, name, layer=0)
    split = folder.parents[2] / "overlay-layers" / f"{folder.parent.name}.tar-split.gz"
    split.unlink()
    try:
        with stored.opened(podman, name, report := Quiet()) as image:
            assert any("using podman export, which gives one layer" in line for line in report.lines)
            assert [layer.diff_id for layer in image.layers] == [""]
            with image.layers[0].open() as stream:
                listed = subprocess.run(("tar", "t"), input=stream.read(), capture_output=True, check=True).stdout
            assert b"absolute\n" in listed and b"big\n" not in listed
        assert podman.run("ps", "--all", "--quiet", "--filter=name=runner-import").stdout == ""
    finally:
        podman.run("rmi", "--force", name)


def test_a_chain_that_bites_its_tail_ends() -> None:
    layer = StoredLayer("a", "a", "", 0, Path("x"), Path("y"))
    with pytest.raises(NotRebuildable):
        chain_of("a", {"a": layer})


def children(pid: int) -> list[int]:
    """The living children of a process, whichever of its threads started them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [child for child in found if is_alive(child)]


def helpers(pid: int) -> list[int]:
    return [child for child in children(pid) if b"tar_split.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
