"""import of an OCI layout: one whole file or none, whatever is killed, full, raced or taken away."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.images.bench import Bench
from tests.images.handmade import file, folder, layout, symlink, tar
from tests.images.trees import by_unsquashfs
from tests.waiting import until

pytestmark = pytest.mark.uses("unsquashfs")
KILLS = int(os.environ.get("RUNNER_KILLS", "12"))
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Images:
    """Two images that share their lower layer, which does not compress, and what a whole import of each gives."""

    one: Path
    two: Path
    sha256: tuple[str, str]
    names: tuple[str, ...]  # what a whole import leaves beside each other
    seconds: float

    def lowest(self) -> Path:
        """The shared lower layer's blob in the first image, 24 MiB."""
        return max((self.one / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)


def image(target: Path, seed: int) -> Path:
    lower = random.Random(1).randbytes(24 * MEBIBYTE)
    upper = random.Random(seed).randbytes(8 * MEBIBYTE)
    small = [file(f"small/{number}", b"%d" % number) for number in range(500)]
    tars = [
        tar([folder("./"), file("lower", lower), folder("small"), *small]),
        tar([file("upper", upper), symlink("link", "upper")]),
    ]
    return layout(target, tars)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both images; to be copied."""
    folder = tmp_path_factory.mktemp("layouts")
    return image(folder / "one", 2), image(folder / "two", 3)


@pytest.fixture
def images(bench: Bench, layouts: tuple[Path, Path]) -> Images:
    """Both images, each imported once into a folder that is then not used again."""
    one, two = (Path(shutil.copytree(source, bench.folder / source.name)) for source in layouts)
    whole, started = bench.folder / "whole", time.monotonic()
    sha256 = tuple(run(bench, source, whole / "image.sqsh", "--force") for source in (one, two))
    seconds = (time.monotonic() - started) / 2
    assert sha256[0] != sha256[1]
    return Images(one, two, (sha256[0], sha256[1]), visible(whole), seconds)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(bench: Bench, source: Path, target: Path, *words: str) -> str:
    """Import with success; the sha256 of the file."""
    done = bench.runner("import", f"oci:{source}", "-o", str(target), *words)
    assert done.returncode == 0, done.stderr
    return digest(target)


def visible(where: Path) -> tuple[str, ...]:
    """The names that a user sees in a folder, without lock files, which stay by design."""
    if not where.is_dir():
        return ()
    names = sorted(path.name for path in where.iterdir())
    return tuple(name for name in names if not name.startswith(".") and not name.endswith(".lock"))


def hidden(where: Path) -> tuple[str, ...]:
    """What an import hides from users while it works."""
    return tuple(path.name for path in where.iterdir() if path.name.endswith((".partial", ".import")))


def failed(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether an import ended as RunnerError, told as such."""
    return done.returncode == 1 and "because:" in done.stderr and "Traceback" not in done.stderr


def test_kills_at_random_moments(bench: Bench, images: Images) -> None:
    """After each kill the file is the old one, the new one, or none; at last an import makes it and tidies up."""
    chance = random.Random(11)
    where = bench.folder / "killed"
    where.mkdir()
    target = where / "image.sqsh"
    for number in range(KILLS):
        source = (images.one, images.two)[number % 2]
        child = bench.start("import", f"oci:{source}", "-o", str(target), "--force")
        time.sleep(chance.uniform(0, images.seconds * 1.1))
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        assert set(visible(where)) <= set(images.names), number
        if target.exists():
            assert digest(target) in images.sha256, number
    assert run(bench, images.one, target, "--force") == images.sha256[0]
    assert (visible(where), hidden(where)) == (images.names, ())


@pytest.mark.parametrize("place", ("at once", "in the blocks", "in the tables"))
def test_a_full_disk(bench: Bench, images: Images, place: str) -> None:
    """A disk that is full at the start, midway or at the very end: told, nothing left, and the next import works."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    whole = (bench.folder / "whole/image.sqsh").stat().st_size
    free = {"at once": 64 * 1024, "in the blocks": whole // 2, "in the tables": whole - 8192}[place]
    where = bench.folder / "small"
    where.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={free // 4096 * 4096}", "tmpfs", str(where)), check=True)
    try:
        done = bench.runner("import", f"oci:{images.one}", "-o", str(where / "image.sqsh"))
        assert failed(done), done.stderr
        assert "No space left on device" in done.stderr
        assert (visible(where), hidden(where)) == ((), ())
        subprocess.run(("mount", "-o", "remount,size=200m", str(where)), check=True)
        assert run(bench, images.one, where / "image.sqsh") == images.sha256[0]
    finally:
        subprocess.run(("umount", str(where)), check=True)


def test_ten_imports_of_one_image_at_once(bench: Bench, images: Images) -> None:
    """All succeed with one file."""
    where = bench.folder / "raced"
    target = where / "image.sqsh"
    racers = [bench.start("import", f"oci:{images.one}", "-o", str(target)) for _ in range(10)]
    said = [racer.communicate(timeout=600) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 10, said
    assert {out for out, _ in said} == {f"{target}\n"}
    assert digest(target) == images.sha256[0]
    assert (visible(where), hidden(where)) == (images.names, ())


def test_ten_imports_of_different_images_at_once(bench: Bench, images: Images) -> None:
    """Each succeeds with its own file; five of them share all layers but the last."""
    where = bench.folder / "together"
    sources = [(images.one, images.two)[number % 2] for number in range(10)]
    targets = [where / f"image-{number}.sqsh" for number in range(10)]
    racers = [
        bench.start("import", f"oci:{source}", "-o", str(target))
        for source, target in zip(sources, targets, strict=True)
    ]
    said = [racer.communicate(timeout=600) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 10, said
    assert [digest(target) for target in targets] == [images.sha256[number % 2] for number in range(10)]
    assert hidden(where) == ()


@pytest.mark.parametrize("loss", ("removed", "truncated", "changed"))
def test_a_blob_that_is_not_what_it_was(bench: Bench, images: Images, loss: str) -> None:
    """A layer that is gone, cut or changed before the import starts: told, nothing left."""
    blob, where = images.lowest(), bench.folder / "lost"
    data = blob.read_bytes()
    spoil(blob, loss)
    done = bench.runner("import", f"oci:{images.one}", "-o", str(where / "image.sqsh"))
    assert failed(done), done.stderr
    assert visible(where) == ()
    blob.write_bytes(data)
    assert run(bench, images.one, where / "image.sqsh") == images.sha256[0]


def test_a_blob_that_is_cut_midway(bench: Bench, images: Images) -> None:
    """The lower layer is cut while the import writes: told, nothing left, no hang; put back, it works."""
    blob = images.lowest()
    data = blob.read_bytes()
    for number in range(20):
        where = bench.folder / f"cut-{number}"
        where.mkdir()
        child = bench.start("import", f"oci:{images.one}", "-o", str(where / "image.sqsh"))
        until(lambda where=where, child=child: hidden(where) or child.poll() is not None)
        os.truncate(blob, len(data) * 9 // 10)
        out, err = child.communicate(timeout=600)
        blob.write_bytes(data)
        if child.returncode:
            break
        assert digest(where / "image.sqsh") == images.sha256[0], "it had read the layer before the cut"
    assert failed(subprocess.CompletedProcess((), child.returncode, out, err)), err
    assert (visible(where), hidden(where)) == ((), ())
    assert run(bench, images.one, where / "image.sqsh") == images.sha256[0]


def spoil(blob: Path, loss: str) -> None:
    if loss == "removed":
        blob.unlink()
    elif loss == "truncated":
        os.truncate(blob, blob.stat().st_size // 2)
    else:
        with blob.open("r+b") as stream:  # one bit in data that gzip stores as they are: only the digest tells
            stream.seek(blob.stat().st_size // 2)
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 1]))


def test_the_whole_tree_is_there(bench: Bench, images: Images) -> None:
    """What the other tests count as whole holds every file of both layers."""
    tree = by_unsquashfs(bench.folder / "whole/image.sqsh", bench.folder / "unpacked")
    assert tree[b"lower"].size == 24 * MEBIBYTE and tree[b"upper"].size == 8 * MEBIBYTE
    assert tree[b"link"].target == b"upper"
    assert sum(name.startswith(b"small/") for name in tree) == 500
