"""Any tree at all is read back as it was given."""

from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.images.squashfs.compression import Compression
from tests.images.squashfs import readers, trees
from tests.images.squashfs.trees import Link, Node

BLOCK = 4096
NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"\xc3\xa9", b"-", b" ", b"n" * 200]),
    st.binary(min_size=1, max_size=12)
    .map(lambda name: name.replace(b"\0", b"0").replace(b"/", b"-"))
    .filter(lambda name: name not in (b".", b"..")),
)
SIZES = st.sampled_from([0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 17])
XATTRS = st.dictionaries(st.sampled_from([b"trusted.a", b"trusted.b", b"trusted.long" * 8]), st.binary(min_size=1))
IDS = st.sampled_from([0, 1, 1000, 65_534, 3_000_000, 2**31])


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Pieces of noise, text and zeros."""
    size = draw(SIZES)
    pieces = draw(st.lists(st.tuples(st.sampled_from("znt"), st.integers(1, 2 * BLOCK)), min_size=1, max_size=4))
    made = b""
    while len(made) < size:
        for kind, length in pieces:
            made += {"z": bytes(length), "n": random.Random(length).randbytes(length), "t": b"text" * length}[kind]
    return made[:size]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from([stat.S_IFREG] * 4 + [stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO]))
    content, device, mode = b"", (0, 0), draw(st.integers(0, 0o7777))
    if kind == stat.S_IFREG:
        content = draw(contents())
    elif kind == stat.S_IFLNK:
        content, mode = draw(st.binary(min_size=1, max_size=300).map(lambda target: target.replace(b"\0", b"/"))), 0o777
    elif kind == stat.S_IFCHR:
        device = draw(st.tuples(st.integers(0, 4095), st.integers(1, 2**20 - 1)))
    pairs = tuple(draw(XATTRS).items())
    return Node(kind | mode, content, draw(IDS), draw(IDS), draw(st.integers(0, 2**31 - 1)), device, pairs)


@st.composite
def whole_trees(draw: st.DrawFn) -> dict[bytes, Node | Link]:
    folders, tree = [b""], {}
    for name, node in draw(st.lists(st.tuples(NAMES, nodes()), max_size=40)):
        folder = draw(st.sampled_from(folders))
        path = folder + b"/" + name if folder else name
        if path in tree:
            continue
        tree[path] = node
        if stat.S_ISDIR(node.mode):
            folders.append(path)
    linkable = [path for path, node in tree.items() if not stat.S_ISDIR(node.mode)]
    found: dict[bytes, Node | Link] = dict(tree)
    for number in range(draw(st.integers(0, 4)) if linkable else 0):
        folder = draw(st.sampled_from(folders))
        found[(folder + b"/" if folder else b"") + b"link-%d" % number] = Link(draw(st.sampled_from(linkable)))
    return found


@pytest.mark.uses("unsquashfs", "tar2sqfs")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tree=whole_trees(), runs=st.integers(1, 3))
def test_any_tree_is_read_back_as_it_was_given(tree: dict[bytes, Node | Link], runs: int) -> None:
    """By the kernel where it may be mounted, by unsquashfs, and by sqfs2tar."""
    place = Path(tempfile.mkdtemp())
    try:
        image = place / "a.sqsh"
        trees.make(tree, image, Compression("zstd", 1, BLOCK), runs=runs)
        for reader in ("kernel",) if readers.can_mount() else ("sqfs2tar",) if os.geteuid() else ("unsquashfs",):
            readers.compare(reader, tree, image, place / reader)
        readers.compare("sqfs2tar", tree, image, place / "tar")
    finally:
        shutil.rmtree(place)
