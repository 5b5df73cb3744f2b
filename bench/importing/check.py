"""Our file of the bench's image, entry by entry beside what umoci unpacks and what enroot's way packs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.importing import reading
from tests.images.trees import Tree, differences, walk

# what an import as root of all adds, changes or leaves out
OURS = (b"etc/rc", b"etc/rc.local", b"etc/environment", b"etc/fstab", b"workspace")


def against_umoci(image: Path, squashfs: Path, scratch: Path) -> tuple[int, list[str]]:
    """How many entries were compared, and the differences; owners are not, since the import makes all root's."""
    bundle = scratch / "bundle"
    subprocess.run(("umoci", "unpack", "--image", f"{image}:latest", str(bundle)), check=True)
    expected = _trim(walk(bundle / "rootfs"))
    shutil.rmtree(bundle)
    with reading.mounted(squashfs, "kernel", scratch / "mount") as mount:
        found = _trim(walk(mount))
    return len(expected), differences(expected, found, without=frozenset({"owner"}))


def _trim(tree: Tree) -> Tree:
    return {name: node for name, node in tree.items() if name not in OURS and not name.startswith(b"dev/")}
