"""Every program that reads squashfs finds in ours what was put in, entry by entry."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from runner.images.squashfs.compression import Compression
from tests.images.squashfs import readers, trees
from tests.images.squashfs.trees import Link, directory, file, special, symlink

BLOCK = 131072
NOISE = random.Random(7).randbytes(3 * BLOCK)

# without what some reader cannot show: a tar has no sockets and no root, ordinary file systems no owner 2**32 - 1
ALL_KINDS: trees.Tree = {
    b"": directory(0o751, mtime=11, uid=3),
    b"empty": file(),
    b"small": file(b"hello\n", 0o4755, uid=1000, gid=3_000_000, mtime=1),
    b"one-block": file(NOISE[:BLOCK]),
    b"block-less-one": file(NOISE[: BLOCK - 1]),
    b"block-and-one": file(b"A" * (BLOCK + 1)),
    b"text": file(b"all work and no play\n" * 40_000),
    b"noise": file(NOISE + b"end"),
    b"holes": file(bytes(2 * BLOCK) + NOISE[:1000] + bytes(3 * BLOCK) + b"x"),
    b"hole-at-the-end": file(b"x" + bytes(4 * BLOCK)),
    b"only-hole": file(bytes(2 * BLOCK)),
    b"only-hole-and-tail": file(bytes(2 * BLOCK + 77)),
    b"small-zeros": file(bytes(1000)),
    b"capable": file(
        b"#!", 0o755, xattrs=((b"security.capability", bytes.fromhex("0100000200200000000000000000000000000000")),)
    ),
    b"notes": file(b"n", xattrs=((b"user.b", bytes(range(256))), (b"user.a", b""), (b"trusted.t", b"1" * 3000))),
    b"notes-2": file(b"m", xattrs=((b"user.a", b""), (b"trusted.t", b"1" * 3000), (b"user.b", bytes(range(256))))),
    b"first": file(b"three names" * 20_000, xattrs=((b"user.a", b"x"),)),
    b"deep/er/second": Link(b"first"),
    b"aaa": Link(b"first"),
    b"link": symlink(b"small"),
    b"link-2": Link(b"link"),
    b"link-long": symlink(b"/" + b"/".join([b"a-rather-long-part"] * 100)),
    b"link-odd": symlink(b"\xff\n \xc3\xa9", mtime=2**31 - 1),
    b"link-noted": symlink(b"x", xattrs=((b"trusted.t", b"v"),)),
    b"deep/empty": directory(0o1777, uid=70_000, gid=70_001),
    b"deep/noted": directory(0o2775, xattrs=((b"user.d", b"of a folder"),)),
    b"deep/noted/below": file(b"x"),
    b"fifo": special(stat.S_IFIFO, 0o666),
    b"fifo-noted": special(stat.S_IFIFO, 0o600, xattrs=((b"trusted.t", b"v"),)),
    b"null": special(stat.S_IFCHR, 0o666, device=(1, 3)),
    b"far": special(stat.S_IFCHR, 0o660, device=(4095, 1_048_575)),
    b"disk": special(stat.S_IFBLK, 0o660, device=(8, 300), xattrs=((b"trusted.t", b"v"),)),
    b"disk-2": Link(b"disk"),
    b"name\nwith newline, \xff and " + b"l" * 200: file(b"odd"),
    b"n" * 255: file(b"long name"),
}


@pytest.mark.parametrize(
    "reader", [pytest.param(name, marks=pytest.mark.uses(*readers.PARTS[name])) for name in readers.usable_readers()]
)
@pytest.mark.parametrize("compression", ["zstd:1", "gzip:1", "xz:0", "lz4", "none"])
def test_every_reader_finds_every_kind_of_entry(reader: str, compression: str, tmp_path: Path) -> None:
    """Type, mode, owner, size, content, target, device, extended attributes, hard links and time are as given."""
    image = tmp_path / "a.sqsh"
    trees.make(ALL_KINDS, image, Compression.parse(compression), runs=3)
    assert image.stat().st_size % 4096 == 0
    readers.compare(reader, ALL_KINDS, image, tmp_path / "read")
