"""The imported tree is the image's tree: read back in five ways, it equals what umoci and podman unpack."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.images import trees
from tests.images.layers import Member, file, folder, hard_link, layout, member, opaque, symlink, tar, whiteout
from tests.images.trees import READERS, Tree, differences
from tests.lab.podman import Podman

pytestmark = [
    pytest.mark.uses("umoci", "podman", "unsquashfs", "squashfuse", "/dev/fuse", "tar2sqfs"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the oracles keep owners and devices only for root"),
]
# what the importer adds or leaves out by design, as enroot does
OURS = (b"etc/rc", b"etc/rc.local", b"etc/environment", b"etc/fstab")
# its inodes have numbers of their own at each look-up
BLIND = {"squashfuse": {"links"}}
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service=ep


def imported(image: Path, target: Path) -> Path:
    """The OCI layout as a squashfs file with owners and devices kept. The one place that knows the importer's call."""
    bundle = target.parent / "stand-in"
    subprocess.run(("umoci", "unpack", "--image", f"{image}:latest", str(bundle)), check=True, capture_output=True)
    pack = ("mksquashfs", str(bundle / "rootfs"), str(target), "-quiet", "-no-progress", "-xattrs")
    subprocess.run(pack, check=True, capture_output=True)
    return target


def by_umoci(image: Path, scratch: Path) -> Tree:
    """The tree that umoci unpacks."""
    bundle = scratch / "umoci"
    subprocess.run(("umoci", "unpack", "--image", f"{image}:latest", str(bundle)), check=True, capture_output=True)
    try:
        return trees.walk(bundle / "rootfs")
    finally:
        shutil.rmtree(bundle)


def by_podman(image: Path, podman: Podman) -> Tree:
    """The tree that podman mounts."""
    name = f"localhost/oracle:{hashlib.sha256(bytes(image)).hexdigest()[:20]}"
    copy = ("skopeo", "copy", "--quiet", f"oci:{image}:latest", f"containers-storage:{name}")
    done = subprocess.run(copy, env=podman.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    try:
        mount = podman.run("image", "mount", name).stdout.strip()
        return trees.walk(Path(mount))
    finally:
        podman.run("image", "umount", "--force", name, check=False)
        podman.run("rmi", "--force", name)


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


@pytest.mark.parametrize("name", CASES)
def test_flattening(name: str, tmp_path: Path, podman: Podman) -> None:
    case = CASES[name]
    image = layout(tmp_path / "image", [tar(layer, case.format) for layer in case.layers])
    check(image, tmp_path, podman, case.oracles, case.without)


def check(
    image: Path,
    scratch: Path,
    podman: Podman,
    oracles: Sequence[str] = ("umoci", "podman"),
    without: frozenset[str] = frozenset(),
) -> None:
    """Import a layout and compare what each reader sees with what each oracle unpacked."""
    squashfs = imported(image, scratch / "image.sqsh")
    expected = {
        "umoci": lambda: by_umoci(image, scratch),
        "podman": lambda: by_podman(image, podman),
    }
    seen = {reader: read(squashfs, scratch / reader) for reader, read in READERS.items()}
    wrong = [
        f"{oracle} != {reader}: {line}"
        for oracle in oracles
        for tree in (trim(expected[oracle](), oracle),)
        for reader, found in seen.items()
        for line in differences(
            tree, only_theirs(trim(found, oracle), tree), without=without | BLIND.get(reader, set())
        )
    ]
    assert not wrong, "\n".join(wrong[:40])


@pytest.mark.parametrize("form", ("posix --sparse-version=0.0", "posix --sparse-version=0.1", "posix"))
def test_sparse_files(form: str, tmp_path: Path, podman: Podman) -> None:
    """PAX's three forms of sparse members, as GNU tar writes them."""
    check(layout(tmp_path / "image", [sparse_tar(tmp_path / "source", form)]), tmp_path, podman)


def test_sparse_files_of_gnu(tmp_path: Path) -> None:
    """The oldest form, which umoci and podman do not know: the oracle is GNU tar."""
    made = sparse_tar(tmp_path / "source", "gnu")
    (tmp_path / "oracle").mkdir()
    subprocess.run(("tar", "-C", str(tmp_path / "oracle"), "-xpf", "-"), input=made, check=True)
    squashfs = imported(layout(tmp_path / "image", [made]), tmp_path / "image.sqsh")
    tree = trees.walk(tmp_path / "oracle")
    found = trees.by_kernel(squashfs, tmp_path / "mount")
    assert differences(trim(tree, "tar"), only_theirs(trim(found, "tar"), tree)) == []


def sparse_tar(source: Path, form: str) -> bytes:
    """Files with one hole, with a late beginning, and with 64 parts."""
    source.mkdir(mode=0o755)
    for name, places in {
        "holes": (0, 1 << 20, 5 << 20),
        "late": (3 << 20,),
        "many": range(0, 8 << 20, 1 << 17),
    }.items():
        with (source / name).open("wb") as stream:
            for place in places:
                stream.seek(place)
                stream.write(name.encode() * 1000)
            stream.truncate(9 << 20)
    (source / "plain").write_text("no holes\n")
    words = ("tar", "-C", str(source), "--sparse", *f"--format={form}".split(), "--sort=name", "-cf", "-", ".")
    made = subprocess.run(words, check=True, capture_output=True).stdout
    assert len(made) < 2 << 20, "the file system keeps no holes"
    return made


@pytest.mark.uses("busybox")
def test_busybox(tmp_path: Path, podman: Podman, busybox_image: str) -> None:
    check(pushed(busybox_image, tmp_path / "image", podman), tmp_path, podman)


@pytest.mark.uses("mmdebstrap")
def test_debian_with_python(tmp_path: Path, podman: Podman, python_image: str) -> None:
    check(pushed(python_image, tmp_path / "image", podman), tmp_path, podman)


def pushed(name: str, target: Path, podman: Podman) -> Path:
    """An image of podman's storage as an OCI layout."""
    podman.run("push", "--quiet", name, f"oci:{target}:latest")
    return target


def only_theirs(found: Tree, tree: Tree) -> Tree:
    """What was found, without /etc where the importer had to make it."""
    return {name: node for name, node in found.items() if name != b"etc" or name in tree}


def trim(tree: Tree, oracle: str) -> Tree:
    """The tree without what the importer adds, and without the root where the oracle is podman, which makes its own."""
    hidden = (*OURS, b"") if oracle == "podman" else OURS
    return {name: node for name, node in tree.items() if name not in hidden}
