"""Squashfs: one immutable file per image, its sidecar, and the stable symlink that points to it."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.machine import files, process


@dataclass(frozen=True)
class Squashfs:
    """A squashfs file that we made, as its sidecar describes it."""

    path: Path
    """named by content: IMAGES/NAME-<12 hex>.sqsh; with `import -o`, the user's own name"""
    link: Path
    """IMAGES/NAME.sqsh; the same as `path` with `import -o`"""
    image_digest: str
    """sha256 of the image's configuration, hex: what docker and podman call its id"""
    sha256: str
    """of the file; empty until it is wanted where it takes long (`with_sha256`)"""
    size_bytes: int
    architecture: str
    """in OCI's words"""
    source: str = ""
    """the image as it was named"""
    created: float = 0.0
    """seconds since 1970"""
    version: str = ""
    """of the tool that made it"""
    compression: str = ""
    content: str = ""
    """12 hex digits of what went in: image, options, our way of packing, the compressor's version"""
    settings: str = ""
    """those options in words: the same image and settings give the same bytes"""
    digest: str = ""
    """of the image's manifest, `sha256:…`, where it is known"""
    labels: Mapping[str, str] = field(default_factory=dict)
    """the image's labels about how it was built: recipe, content hash, base"""

    def record(self) -> dict[str, object]:
        """What --json prints."""
        made = datetime.fromtimestamp(self.created).astimezone().isoformat("T", "seconds") if self.created else None
        return {**asdict(self), "created": made}


# what `runner build` writes about an image, its base by OCI's names. Source: image-spec, annotations.md
_LABELS = ("runner.", "org.opencontainers.image.base.", "org.opencontainers.image.revision")


def recorded_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Those labels of an image that its sidecar keeps."""
    return {name: str(value) for name, value in sorted(labels.items()) if name.startswith(_LABELS)}


def sidecar(path: Path) -> Path:
    """The JSON file beside a squashfs file."""
    return path.with_suffix(".json") if path.suffix == ".sqsh" else path.with_name(path.name + ".json")


def index_path(target: Path) -> Path:
    """The index beside a squashfs file."""
    return target.with_suffix(".layers") if target.suffix == ".sqsh" else target.with_name(target.name + ".layers")


def as_json(squashfs: Squashfs) -> str:
    """The sidecar's text."""
    fields = asdict(squashfs)
    fields["path"], fields["link"] = squashfs.path.name, squashfs.link.name
    return json.dumps(fields, indent=2) + "\n"


def read_squashfs(path: Path) -> Squashfs | None:
    """The squashfs file at a path as its sidecar tells it; None without one, or where file and sidecar disagree."""
    try:
        data: Mapping[str, Any] = json.loads(sidecar(path).read_text())
        known = {name: data[name] for name in Squashfs.__dataclass_fields__ if name in data}
        labels = recorded_labels(data.get("labels") or {})  # not there in sidecars of older versions
        found = Squashfs(**{**known, "path": path, "link": path.with_name(str(data["link"])), "labels": labels})
        return found if path.stat().st_size == found.size_bytes else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_sidecar(path: Path, target: Path) -> bool:
    """Whether the file at `path` is a sidecar that `import` wrote for `target`, or for a file that is gone."""
    try:
        data = json.loads(path.read_text())
        named = path.with_name(data["path"])
        ours = {"image_digest", "size_bytes", "content", "settings"} <= data.keys()
        return ours and not path.is_symlink() and (named.name == target.name or not named.exists())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def link_is_ours(link: Path) -> bool:
    """Whether a symlink NAME.sqsh is one that `import` makes: it points to NAME-<12 hex>.sqsh beside it."""
    return re.fullmatch(re.escape(link.stem) + r"-[0-9a-f]{12}\.sqsh", str(link.readlink())) is not None


def with_sha256(squashfs: Squashfs) -> Squashfs:
    """The same with the sha256 of its file, computed and noted in the sidecar where it is not known yet.

    Raises OSError where the file cannot be read.
    """
    if squashfs.sha256:
        return squashfs
    known = replace(squashfs, sha256=sha256_of(squashfs.path))
    with suppress(RunnerError):  # the folder may be somebody else's: then it is computed each time
        files.write(sidecar(squashfs.path), as_json(known))
    return known


def find_squashfs(link_or_path: Path) -> Squashfs | None:
    """The file that a stable symlink (or a path) stands for; None where there is none that we made.

    The symlink is resolved once, so that the answer stays the same when the link moves on to a newer image.
    """
    try:
        return read_squashfs(link_or_path.resolve(strict=True))
    except OSError:
        return None


def list_squashfs(folder: Path) -> list[tuple[Squashfs, tuple[str, ...]]]:
    """The squashfs files of a folder, the newest first, each with the names of the symlinks that point to it."""
    links: dict[str, list[str]] = {}
    paths = sorted(folder.glob("*.sqsh")) if folder.is_dir() else []
    for path in paths:
        if path.is_symlink():
            links.setdefault(path.resolve().name, []).append(path.name)
    files = [path for path in paths if not path.is_symlink()]
    found = [(squashfs, tuple(links.get(path.name, ()))) for path in files if (squashfs := read_squashfs(path))]
    return sorted(found, key=lambda pair: -pair[0].created)


def is_whole(path: Path) -> bool:
    """Whether the file has a superblock of squashfs 4.0 and is as long as that says.

    The superblock is what is written last. Source: Linux 6.1, fs/squashfs/squashfs_fs.h.
    """
    try:
        with path.open("rb") as file:
            magic, major, minor, used = struct.unpack("<4s24xHH8xQ", file.read(48))
            return (magic, major, minor) == (b"hsqs", 4, 0) and 96 <= used <= path.stat().st_size
    except (OSError, struct.error):
        return False


def holds(path: Path, name: str, text: str) -> bool:
    """Whether a file inside reads as the text: superblock, tables, and a block of data are read for that."""
    return process.run(("unsquashfs", "-cat", str(path), name), check=False).stdout == text


def age(squashfs: Squashfs) -> str:
    """How long ago it was made, in one unit."""
    seconds = max(0.0, time.time() - squashfs.created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
