"""Sizes at which squashfs changes its shape: large and deep directories, far inodes, files over 4 GiB; and its ends."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import stat
import struct
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.squashfs.compression import Compression
from runner.images.squashfs.data import DataWriter, Directory, Leaf
from runner.images.squashfs.tables import write_tables
from tests.images.squashfs import readers, trees
from tests.images.squashfs.trees import Link, Zeros, directory, file, special, symlink

SMALL = Compression("zstd", 1, block_size=4096)
EVERY_READER = pytest.mark.parametrize(
    "reader", [pytest.param(name, marks=pytest.mark.uses(*readers.PARTS[name])) for name in readers.usable_readers()]
)
UNSQUASHFS = pytest.mark.uses("unsquashfs")


def numbered(count: int, length: int) -> trees.Tree:
    return {b"%0*d" % (length, number): symlink(b"%d" % number) for number in range(count)}


@EVERY_READER
def test_directories_of_every_size_are_read_whole(reader: str, tmp_path: Path) -> None:
    """255 to 257 entries (a header holds 256), listings around 8 KiB (an index begins) and over 64 KiB (extended)."""
    tree: dict[bytes, trees.Node | Link] = {}
    for count, length in ((0, 1), (1, 255), (255, 4), (256, 4), (257, 4), (513, 5), (40, 196), (41, 192), (700, 110)):
        folder = b"%d-of-%d" % (count, length)
        tree[folder] = directory()
        tree |= {folder + b"/" + name: node for name, node in numbered(count, length).items()}
    image = tmp_path / "a.sqsh"
    trees.make(tree, image, SMALL)
    readers.compare(reader, tree, image, tmp_path / "read")


@pytest.mark.skipif(not readers.can_mount(), reason="mounting takes root")
def test_the_kernel_finds_every_name_of_an_indexed_directory(tmp_path: Path) -> None:
    """A lookup goes through the index of the directory, in which a wrong place means "no such file"."""
    tree = {b"%x-%s" % (number, b"n" * (number % 200)): file(b"%d" % number) for number in range(20_000)}
    image = tmp_path / "a.sqsh"
    trees.make(tree, image, Compression("zstd", 1))
    (tmp_path / "at").mkdir()
    with readers.mounted("kernel", image, tmp_path / "at") as top:
        for number, name in enumerate(tree):
            if number % 7 == 0:
                assert (top / os.fsdecode(name)).stat().st_size == len(b"%d" % number)
        assert not (top / "2-nope").exists()


@pytest.mark.uses("tar2sqfs")
@pytest.mark.parametrize("reader", [name for name in readers.usable_readers() if name in ("sqfs2tar", "kernel")])
def test_hard_links_reach_across_more_than_32768_inodes(reader: str, tmp_path: Path) -> None:
    """An entry's inode number counts from that of its header in 16 bits."""
    many = {b"b/%05d" % number: special(stat.S_IFIFO) for number in range(33_000)}
    tree = {
        b"a/first": file(b"1"),
        **many,
        b"c/far": Link(b"a/first"),
        b"c/near": file(b"2"),
        b"c/zz": Link(b"b/00001"),
    }
    image = tmp_path / "a.sqsh"
    trees.make(tree, image)
    readers.compare(reader, tree, image, tmp_path / "read")


def handle_of(path: Path) -> ctypes.Array[ctypes.c_char]:
    """What the NFS server remembers of a file: its inode number, no path."""
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 120, 0) + bytes(120))
    mount = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.name_to_handle_at(-100, os.fsencode(path), handle, ctypes.byref(mount), 0)
    assert done == 0, os.strerror(ctypes.get_errno())
    return handle


@pytest.mark.skipif(not readers.can_mount(), reason="mounting takes root")
def test_the_export_table_leads_from_an_inode_number_to_its_file(tmp_path: Path) -> None:
    """An NFS server opens files by number after a restart: here the image is mounted again in between."""
    tree = {b"%d/%05d" % (number % 9, number): file(b"%d" % number) for number in range(3000)}
    tree[b"8/link"] = Link(b"1/00001")
    image = tmp_path / "a.sqsh"
    trees.make(tree, image)
    (tmp_path / "at").mkdir()
    chosen = [*map(os.fsdecode, list(tree)[::37]), "8/link"]
    with readers.mounted("kernel", image, tmp_path / "at") as top:
        handles = {path: (handle_of(top / path), (top / path).read_bytes()) for path in chosen}
    with readers.mounted("kernel", image, tmp_path / "at") as top:
        place = os.open(top, os.O_RDONLY)
        for path, (handle, content) in handles.items():
            opened = ctypes.CDLL(None, use_errno=True).open_by_handle_at(place, handle, os.O_RDONLY)
            assert opened >= 0, (path, os.strerror(ctypes.get_errno()))
            assert os.read(opened, 100) == content
            os.close(opened)
        os.close(place)


@EVERY_READER
def test_an_empty_image_is_a_root_alone(reader: str, tmp_path: Path) -> None:
    image = tmp_path / "a.sqsh"
    trees.make({b"": directory(0o700)}, image)
    readers.compare(reader, {b"": directory(0o700)}, image, tmp_path / "read")


@pytest.mark.skipif(not readers.can_mount(), reason="mounting takes root")
def test_ten_thousand_levels_need_no_recursion(tmp_path: Path) -> None:
    """Far beyond PATH_MAX: the kernel goes down step by step and finds the file at the end."""
    root = here = Directory(0o40755, 0, 0, 0, ())
    for _ in range(10_000):
        here.children[b"d"] = here = Directory(0o40755, 0, 0, 0, ())  # type: ignore[assignment]
    image = tmp_path / "a.sqsh"
    with image.open("wb") as out, DataWriter(out, SMALL, 1) as data:
        here.children[b"end"] = Leaf(stat.S_IFLNK | 0o777, 0, 0, 0, (), b"reached", 0)
        write_tables(out, data, root, time=0, compression=SMALL)
    (tmp_path / "at").mkdir()
    with readers.mounted("kernel", image, tmp_path / "at") as top:
        step = os.open(top, os.O_RDONLY)
        for _ in range(10_000):
            below = os.open(b"d", os.O_RDONLY, dir_fd=step)
            os.close(step)
            step = below
        assert os.readlink(b"end", dir_fd=step) == b"reached"
        os.close(step)


@UNSQUASHFS
@pytest.mark.skipif(not readers.can_mount(), reason="mounting takes root")
def test_a_file_over_4_gib_has_holes_and_an_end(tmp_path: Path) -> None:
    """Its logical size takes 64 bits; the zeros take no room."""
    image = tmp_path / "a.sqsh"
    size = (4 << 30) + (1 << 20) + 5
    large = Compression("zstd", 1, block_size=1 << 20)
    with image.open("wb") as out, DataWriter(out, large, 2) as data:
        data.begin_run()
        held = data.add(size, Zeros(size - 3, b"end"))
        data.end_run()
        root = Directory(0o40755, 0, 0, 0, (), {b"large": Leaf(0o100644, 0, 0, 0, (), held, 0)})
        write_tables(out, data, root, time=0, compression=large)
    assert image.stat().st_size <= 4 * (size >> 20) + 8192  # a word for each block, and the tables
    assert b" %d " % size in readers.run("unsquashfs", "-lln", image)
    (tmp_path / "at").mkdir()
    with readers.mounted("kernel", image, tmp_path / "at") as top, (top / "large").open("rb") as found:
        assert os.fstat(found.fileno()).st_size == size
        assert os.fstat(found.fileno()).st_blocks <= 8
        found.seek(-7, os.SEEK_END)
        assert found.read() == b"\0\0\0\0end"


@UNSQUASHFS
@pytest.mark.skipif(not readers.can_mount(), reason="mounting takes root")
def test_a_file_that_begins_beyond_4_gib_is_found(tmp_path: Path) -> None:
    """Where its blocks begin takes 64 bits; a seek stands in for the four GiB before it."""
    image = tmp_path / "a.sqsh"
    content = os.urandom(10_000)
    with image.open("wb") as out, DataWriter(out, SMALL, 2) as data:
        out.seek(5 << 30)
        data._position = 5 << 30
        data.begin_run()
        held = {name: data.add(len(content), io.BytesIO(content)) for name in (b"a", b"b")}
        small = data.add(5, io.BytesIO(b"small"))
        data.end_run()
        leaves = {name: Leaf(0o100644, 0, 0, 0, (), kept, 0) for name, kept in held.items()}
        root = Directory(0o40755, 0, 0, 0, (), {**leaves, b"small": Leaf(0o100644, 0, 0, 0, (), small, 0)})
        write_tables(out, data, root, time=0, compression=SMALL)
    for reader in ("unsquashfs", "kernel"):
        found = readers.read_back(reader, image, tmp_path / reader)
        digest = hashlib.sha256(content).hexdigest()
        assert [found[name].what for name in (b"a", b"b")] == [f"10000 {digest}"] * 2
        assert found[b"small"].what == f"5 {hashlib.sha256(b'small').hexdigest()}"


@UNSQUASHFS
def test_owners_and_times_at_their_ends(tmp_path: Path) -> None:
    """Both go to 2**32 - 1; the flattener refuses larger owners, and clamps other times."""
    tree = {b"most": file(uid=2**32 - 1, gid=2**32 - 2), b"past": file(mtime=0), b"future": file(mtime=2**32 - 1)}
    image = tmp_path / "a.sqsh"
    trees.make(tree, image)
    listing = readers.run("unsquashfs", "-lln", "-UTC", image).decode()
    assert "4294967295/4294967294" in listing
    found = readers.seen_in_tar(readers.run("sqfs2tar", image))
    assert (found[b"past"].mtime, found[b"future"].mtime) == (0, 2**32 - 1)


def owned_by(count: int) -> trees.Tree:
    return {b"%d/%d" % (uid % 300, uid): special(stat.S_IFIFO, uid=uid, gid=7) for uid in range(count)}


@UNSQUASHFS
def test_65535_owners_are_held_and_one_more_is_refused(tmp_path: Path) -> None:
    """The superblock counts them in 16 bits."""
    image = tmp_path / "a.sqsh"
    trees.make(owned_by(65_535), image)
    listing = readers.run("unsquashfs", "-lln", image).decode()
    assert sum(line.startswith("prw------- ") for line in listing.splitlines()) == 65_535
    assert "prw------- 65534/7 " in listing
    with pytest.raises(RunnerError, match="more than 65535 different owners"):
        trees.make(owned_by(65_536), image)


@EVERY_READER
def test_names_and_targets_at_their_ends(reader: str, tmp_path: Path) -> None:
    """The longest that Linux takes: a name of 255 bytes, a target of 4095."""
    tree = {b"n" * 255: file(b"x"), b"link": symlink(b"t" * 4095), b"short": symlink(b"t")}
    image = tmp_path / "a.sqsh"
    trees.make(tree, image)
    readers.compare(reader, tree, image, tmp_path / "read")


@pytest.mark.parametrize("name", [b"n" * 257, b"", b".", b"..", b"a\0b"])
def test_a_name_that_is_none_is_refused(name: bytes, tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="cannot import the file"):
        trees.make({b"folder": directory(), b"folder/" + name: file()}, tmp_path / "a.sqsh")


def test_a_slash_in_a_name_is_refused(tmp_path: Path) -> None:
    """What was unpacked with it would lie elsewhere."""
    root = Directory(0o40755, 0, 0, 0, (), {b"../evil": Leaf(stat.S_IFIFO, 0, 0, 0, (), None, 0)})
    with (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 1) as data, pytest.raises(RunnerError):
        write_tables(out, data, root, time=0, compression=SMALL)


@UNSQUASHFS
def test_a_target_of_65535_bytes_is_held(tmp_path: Path) -> None:
    """What unsquashfs reads, though Linux follows no more than 4095."""
    image = tmp_path / "a.sqsh"
    trees.make({b"a": symlink(b"t" * 65_535), b"b": file(b"x")}, image)
    assert b"-> " + b"t" * 65_535 in readers.run("unsquashfs", "-ll", image)


@UNSQUASHFS
def test_a_name_of_256_bytes_is_held(tmp_path: Path) -> None:
    """One more than Linux takes; squashfs has the room."""
    image = tmp_path / "a.sqsh"
    trees.make({b"n" * 256: file(b"x")}, image)
    assert b"n" * 256 in readers.run("unsquashfs", "-ll", image)


@pytest.mark.parametrize(
    "node",
    [
        symlink(b"t" * 65_536),
        file(xattrs=((b"system.posix_acl_access", b"x"),)),
        file(uid=-1),
        file(gid=2**32),
        file(mtime=-1),
        file(mtime=2**32),
        special(0o170000),
    ],
)
def test_what_squashfs_cannot_hold_is_not_written(node: trees.Node, tmp_path: Path) -> None:
    """No image leads here: the reader of tar and the flattener refuse or drop it before, as their tests show."""
    with pytest.raises((AssertionError, LookupError, struct.error)):
        trees.make({b"a": node}, tmp_path / "a.sqsh")


def test_the_superblock_counts_what_there_is(tmp_path: Path) -> None:
    """Inodes (hard links once), time, block size, fragments, owners; the file ends with a whole block of 4 KiB."""
    tree = {b"a": file(b"1", uid=5), b"c/d": file(b"2", gid=6), b"e": Link(b"a")}
    image = tmp_path / "a.sqsh"
    trees.make(tree, image, runs=2, seconds=2**40)
    magic, inodes, time, block, fragments, compressor = struct.unpack_from("<4sIIIIH", image.read_bytes())
    assert (magic, inodes, time, block, fragments, compressor) == (b"hsqs", 4, 2**32 - 1, 131072, 2, 6)
    assert struct.unpack_from("<H", image.read_bytes(), 26)[0] == 3
    assert image.stat().st_size % 4096 == 0
