"""Stacks of layers made by hand, one for each rule of flattening."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass

from tests.images.handmade import Member, file, folder, hard_link, member, opaque, symlink, whiteout

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service=ep


@dataclass(frozen=True)
class Case:
    """A stack of layers, bottom first; an oracle that sees it otherwise, by choice or by mistake, is not asked."""

    layers: Sequence[Sequence[Member]]
    oracles: tuple[str, ...] = ("umoci", "podman")
    without: frozenset[str] = frozenset()
    format: int = tarfile.PAX_FORMAT


ROOT = folder("./", mode=0o755)
BELOW = [folder("d"), file("d/a"), file("d/b", b"b"), folder("d/e"), file("d/e/f"), symlink("d/s", "a"), file("g")]
AGAIN = [folder("d"), file("d/a", b"new"), folder("d/e")]
LONG = "/".join("n" * 60 for _ in range(4))
DEEP = [folder("/".join(["n" * 60] * depth)) for depth in range(1, 5)]
NAMES = [*DEEP, file(f"{LONG}/f"), symlink("s", "/" + LONG), hard_link("h", f"{LONG}/f")]
BLOCK = 131072

CASES = {
    "whiteouts of a file, a folder and a symlink": Case(
        [[ROOT, *BELOW], [folder("d"), whiteout("d/a"), whiteout("d/e"), whiteout("d/s")]]
    ),
    "a whiteout of nothing": Case([[ROOT, *BELOW], [folder("d"), whiteout("d/never")]]),
    "a whiteout at the root": Case([[ROOT, *BELOW], [whiteout("g"), whiteout("d")]]),
    "a deleted name that an upper layer makes again": Case(
        [[ROOT, *BELOW], [folder("d"), whiteout("d/a"), whiteout("d/e")], AGAIN]
    ),
    "an opaque folder, marked first": Case([[ROOT, *BELOW], [folder("d"), opaque("d"), file("d/new")]]),
    # umoci touches d/e, which it empties, after it has set its time
    "an opaque folder, marked last": Case([[ROOT, *BELOW], [*AGAIN, opaque("d")]], oracles=("podman",)),
    "an opaque folder between two layers that fill it": Case(
        [[ROOT, *BELOW], [folder("d"), opaque("d")], [folder("d"), file("d/b", b"third")]]
    ),
    "a file becomes a folder": Case([[ROOT, *BELOW], [folder("g"), file("g/inside")]]),
    "a folder becomes a file": Case([[ROOT, *BELOW], [file("d", b"now a file")]]),
    "a folder becomes a symlink": Case([[ROOT, *BELOW], [symlink("d", "g")]]),
    "a symlink becomes a file": Case([[ROOT, *BELOW], [folder("d"), file("d/s", b"own")]]),
    "a file becomes a symlink": Case([[ROOT, *BELOW], [symlink("g", "d/a")]]),
    "a symlink to a folder becomes a folder": Case(
        [[ROOT, *BELOW, symlink("link", "d")], [folder("link"), file("link/own")]]
    ),
    "a folder becomes a file becomes a folder": Case(
        [[ROOT, *BELOW], [file("d", b"file")], [folder("d"), file("d/last")]]
    ),
    "hard links in one layer": Case(
        [[ROOT, file("x", b"linked"), hard_link("y", "x"), folder("d"), hard_link("d/z", "x"), hard_link("w", "y")]]
    ),
    "a hard link whose first name an upper layer deletes": Case(
        [[ROOT, file("x", b"linked"), hard_link("y", "x"), hard_link("z", "x")], [whiteout("x")]]
    ),
    "a hard link whose first name an upper layer replaces": Case(
        [[ROOT, file("x", b"linked"), hard_link("y", "x"), hard_link("z", "x")], [file("x", b"other")]]
    ),
    # podman refuses it: it unpacks each layer by itself
    "a hard link to a file of a lower layer": Case(
        [[ROOT, folder("d"), file("d/x", b"low")], [hard_link("y", "d/x")]], oracles=("umoci",)
    ),
    "a hard link to a lower file that its own layer deletes": Case(
        [[ROOT, file("x", b"low")], [hard_link("y", "x"), whiteout("x")]], oracles=("umoci",)
    ),
    "hard links to symlinks and devices": Case(
        [[ROOT, symlink("s", "there"), hard_link("t", "s"), member("p", tarfile.FIFOTYPE), hard_link("q", "p")]]
    ),
    "long names and targets, PAX": Case([[ROOT, *NAMES]]),
    "long names and targets, GNU": Case(
        [[ROOT, *NAMES]], format=tarfile.GNU_FORMAT
    ),
    "names split by ustar": Case(
        [[ROOT, *DEEP[:2], file("/".join(["n" * 60] * 2) + "/f")]], format=tarfile.USTAR_FORMAT
    ),
    "names with newline, blank, backslash, and no UTF-8": Case(
        [[ROOT, file("a\nb"), file("c d"), file("e\\f"), file("ü"), file("ba\udcffd"), symlink("-", "\n")]],
        format=tarfile.GNU_FORMAT,
    ),
    "xattrs and capabilities": Case(
        [[
            ROOT,
            file("a", pax_headers={"SCHILY.xattr.user.note": "text", "SCHILY.xattr.user.empty": ""}),
            file("b", mode=0o755, pax_headers={"SCHILY.xattr.security.capability": CAPABILITY.decode("latin-1")}),
            folder("d", pax_headers={"SCHILY.xattr.user.note": "of a folder"}),
        ]]
    ),
    "devices and fifos": Case(
        [[
            ROOT,
            folder("nodes"),
            member("nodes/null", tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            member("nodes/big", tarfile.BLKTYPE, devmajor=259, devminor=70000, mode=0o660),
            member("nodes/pipe", tarfile.FIFOTYPE, mode=0o600),
        ]]
    ),
    "modes, owners, times": Case(
        [[
            ROOT,
            file("setuid", mode=0o4755, uid=3_000_000, gid=7),
            file("setgid", mode=0o2755),
            folder("sticky", mode=0o1777, mtime=1),
            file("none", mode=0o000, mtime=2**31 + 5),
            symlink("link", "none", uid=12, gid=13, mtime=99),
        ]]
    ),
    "a folder's attributes come from the uppermost layer that names it": Case(
        [
            [ROOT, folder("d", mode=0o700, uid=5, mtime=10), file("d/a")],
            [folder("d", mode=0o2775, gid=9, mtime=20), file("d/b")],
        ]
    ),
    "sizes about a block": Case(
        [[
            ROOT,
            file("empty", b""),
            file("one", b"1"),
            file("less", os.urandom(BLOCK - 1)),
            file("block", os.urandom(BLOCK)),
            file("more", b"m" * BLOCK + b"!"),
            file("zeros", bytes(5 * BLOCK + 17)),
            file("holes", bytes(BLOCK) + b"data" + bytes(3 * BLOCK)),
        ]]
    ),
    # podman takes no layer that names a path twice
    "the same path twice in a layer: the later counts": Case(
        [[ROOT, file("a", b"first"), file("b", b"first"), file("a", b"second"), folder("d"), folder("d", mode=0o700)]],
        oracles=("umoci",),
    ),
    "the same path twice, of two kinds": Case(
        [[ROOT, file("a"), symlink("a", "b"), symlink("b", "a"), file("b"), file("d"), folder("d"), file("d/x")]],
        oracles=("umoci",),
    ),
    "names with ./ and without": Case(
        [[ROOT, folder("./d/"), file("./d/a"), file("d/b")], [folder("d"), file("./d/a", b"2"), whiteout("./d/b")]]
    ),
    # overlay, and so podman, gives a folder that a layer implies attributes of its own
    "a folder that an upper layer only implies keeps its attributes": Case(
        [[ROOT, folder("d", mode=0o700, uid=5), file("d/a")], [file("d/b")], [whiteout("d/a")]],
        oracles=("umoci",),
        without=frozenset({"mtime"}),
    ),
    "folders that no layer names": Case(
        [[ROOT, file("x/y/z")], [file("x/y/w")]], oracles=("umoci",), without=frozenset({"mtime"})
    ),
    # umoci follows the symlink, overlay does not
    "a path below a symlink of a lower layer": Case(
        [[ROOT, folder("real"), symlink("link", "real")], [file("link/inside")]],
        oracles=("podman",),
        without=frozenset({"mtime"}),
    ),
    "a path below a symlink of its own layer": Case(
        [[ROOT, folder("real"), symlink("link", "real"), file("link/inside"), symlink("top", "/real"), file("top/two")]]
    ),
    "an empty layer": Case([[ROOT, *BELOW], [], [file("last")]]),
    "many layers": Case([[ROOT, *BELOW], *([file(f"n{number}"), file("g", b"%d" % number)] for number in range(40))]),
}  # fmt: skip
