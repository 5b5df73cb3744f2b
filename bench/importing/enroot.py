"""How enroot imports an image, step by step with Debian's tools. Source: the behaviour of enroot 4.1.2.

1. Each layer's blob is checked against its digest, inflated by pigz, and kept in a cache as zstd -1; ten at a time.
2. Each layer is unpacked by tar into a folder of its own, without dev/ and without xattrs; as many at once as cores.
3. Everything is made readable by its owner, folders writable; whiteouts become what overlayfs knows: a character
   device 0:0 for a deleted name, trusted.overlay.opaque for an emptied folder.
4. A topmost folder holds the files that enroot adds. All folders are mounted as one overlay in a private mount
   namespace, and mksquashfs packs it, by default with `-all-root -comp lzo -noD`.
The removal of the temporary folders, which enroot does at its end, is not counted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEFAULTS = ("-comp", "lzo", "-noD")
ZSTD = ("-comp", "zstd", "-Xcompression-level", "1")
CONNECTIONS = 10
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# one reading: the digest of the compressed bytes in one branch, inflating and zstd in the other
FETCH = """set -o pipefail
{{ tee /dev/fd/3 < {blob} | pigz -d -f -c | zstd -1 -q -f -o {partial}; }} 3>&1 1>&2 | sha256sum | grep -q {hex}
"""


def import_layers(
    layers: Sequence[Path], cache: Path, scratch: Path, target: Path, options: Sequence[str] = DEFAULTS
) -> Path:
    """Import layers (bottom first) into `target`. Layers that are in the cache already are taken from there."""
    cores = len(os.sched_getaffinity(0))
    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        cached = list(pool.map(lambda blob: into_cache(blob, cache), layers))
    folders = [scratch / str(number) for number in range(len(layers) + 1)]  # 0 on top, then the topmost layer as 1
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(_unpack, reversed(cached), folders[1:]))
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(_to_overlay, folders[1:]))
    _own_files(folders[0])
    _pack(folders, scratch / "rootfs", target, (*options, "-processors", str(cores)))
    return target


def into_cache(blob: Path, cache: Path) -> Path:
    cached = cache / blob.name
    if not cached.exists():
        words = {"blob": blob, "partial": f"{cached}.partial", "hex": blob.name}
        script = FETCH.format(**{key: shlex.quote(str(word)) for key, word in words.items()})
        subprocess.run(("bash", "-c", script), check=True)
        Path(f"{cached}.partial").rename(cached)
    return cached


def _unpack(cached: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    without = ("--anchored", "--exclude=dev/*", "--exclude=./dev/*")
    how = ("--warning=no-timestamp", "--use-compress-program=zstd", "--delay-directory-restore")
    subprocess.run(("tar", "-C", str(folder), *without, *how, "-pxf", str(cached)), check=True)
    subprocess.run(("chmod", "-R", "u+rX", str(folder)), check=True)
    depth = ("-maxdepth", "15", "-type", "d", "!", "-perm", "-u+w")
    subprocess.run(("find", str(folder), *depth, "-exec", "chmod", "u+w", "{}", "+"), check=True)


def _to_overlay(folder: Path) -> None:
    found = subprocess.run(("find", str(folder), "-name", ".wh.*", "-print0"), check=True, capture_output=True)
    for name in filter(None, found.stdout.decode().split("\0")):
        path = Path(name)
        path.unlink()
        if path.name == OPAQUE:
            os.setxattr(path.parent, "trusted.overlay.opaque", b"y")
        else:
            os.mknod(path.with_name(path.name.removeprefix(WHITEOUT)), 0o20000, os.makedev(0, 0))


def _own_files(folder: Path) -> None:
    (folder / "etc").mkdir(parents=True)
    for name in ("rc", "rc.local", "environment", "fstab"):
        (folder / "etc" / name).write_text("# the bench's\n")
    (folder / "workspace").mkdir()


def _pack(folders: Sequence[Path], mount: Path, target: Path, options: Sequence[str]) -> None:
    mount.mkdir()
    target.unlink(missing_ok=True)
    pack = shlex.join(("mksquashfs", str(mount), str(target), "-all-root", "-no-progress", "-quiet", *options))
    lower = ":".join(map(str, folders))
    by = f"mount -t overlay overlay -o {shlex.quote(f'lowerdir={lower}')} {shlex.quote(str(mount))}"
    if not kernel_overlay(mount.parent):
        by = f"fuse-overlayfs -o {shlex.quote(f'lowerdir={lower}')} {shlex.quote(str(mount))}"
    subprocess.run(("unshare", "-m", "sh", "-c", f"{by} && {pack}"), check=True, stdout=subprocess.DEVNULL)


def kernel_overlay(folder: Path) -> bool:
    """Whether the kernel mounts an overlay here; else fuse-overlayfs is used, and the table says so."""
    probe = folder / "probe"
    for name in ("a", "b", "at"):
        (probe / name).mkdir(parents=True, exist_ok=True)
    script = f"mount -t overlay overlay -o lowerdir={probe}/a:{probe}/b {probe}/at"
    done = subprocess.run(("unshare", "-m", "sh", "-c", script), capture_output=True)
    shutil.rmtree(probe)
    return done.returncode == 0
