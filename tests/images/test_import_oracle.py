"""The imported tree is the image's tree: read back in five ways, it equals what umoci and podman unpack."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.images.importer.layer_index import LayerIndex, open_index
from runner.images.importer.pack import PackOptions, index_of, pack_image
from runner.images.reference import Source
from runner.images.squashfs.compression import Compression
from runner.images.squashfs_file import index_path
from tests.images import trees
from tests.images.handmade import file, layout, open_source, tar, whiteout
from tests.images.stacks import CASES
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


def imported(image: Path, target: Path, previous: LayerIndex | None = None) -> Path:
    """The OCI layout as a squashfs file, owners and devices kept, without enroot's files; its index lies beside it."""
    options = PackOptions(Compression("zstd", 1), threads=2, owners="keep", devices=True)
    source = Source("oci", str(image), "latest")
    with open_source(source, os.environ) as opened, target.open("w+b") as stream:
        packed = pack_image(opened, stream, {}, options, previous, lambda count: None)
        with index_path(target).open("wb") as index:
            index_of(packed, stream, options, index)
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


@pytest.mark.parametrize("name", CASES)
def test_flattening(name: str, tmp_path: Path, podman: Podman) -> None:
    case = CASES[name]
    image = layout(tmp_path / "image", [tar(layer, case.format) for layer in case.layers])
    check(image, tmp_path, podman, case.oracles, case.without)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.layers) > 1])
def test_an_incremental_import_gives_the_bytes_of_a_full_one(name: str, tmp_path: Path) -> None:
    """From the file of the layers below, from that of one layer more, and from one with another last layer."""
    tars = [tar(layer, CASES[name].format) for layer in CASES[name].layers]
    other = tar([file("another", b"last layer"), whiteout("d")])
    stacks = {"below": tars[:-1], "whole": tars, "more": [*tars, other], "other": [*tars[:-1], other]}
    files = {
        kind: imported(layout(tmp_path / kind, stack), tmp_path / f"{kind}.sqsh") for kind, stack in stacks.items()
    }
    for kind in ("below", "more", "other", "whole"):
        previous = open_index(index_path(files[kind]), files[kind])
        assert previous is not None
        again = imported(tmp_path / "whole", tmp_path / f"from-{kind}.sqsh", previous)
        previous.close()
        assert again.read_bytes() == files["whole"].read_bytes(), kind


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
