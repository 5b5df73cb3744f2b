"""A squashfs file: one immutable file per image, with a sidecar and a stable symlink that points to it."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.machine import files


@dataclass(frozen=True)
class Squashfs:
    """A squashfs file that runner made, as its sidecar describes it."""

    path: Path
    """named by content: IMAGES/NAME-<12 hex>.sqsh; with `import -o`, the user's own name"""
    link: Path
    """IMAGES/NAME.sqsh; the same as `path` with `import -o`"""
    image_digest: str
    """sha256 of the image's configuration, hex; docker and podman call it the image id"""
    sha256: str
    """the checksum of the file; empty until it is needed, because computing it takes long (`with_sha256`)"""
    size_bytes: int
    architecture: str
    """as OCI names it"""
    source: str = ""
    """the image as the user named it"""
    created: float = 0.0
    """seconds since 1970"""
    version: str = ""
    """the version of runner that made it"""
    compression: str = ""
    content: str = ""
    """12 hex digits: the hash of the image, the options, the version of our packing, and the compressor's version"""
    settings: str = ""
    """the options as text: the same image and settings give the same bytes"""
    digest: str = ""
    """the digest of the image's manifest, `sha256:…`; empty if unknown"""
    importer: bool = False
    """made by `runner-importer`, which removes it when `limit_gb` is reached"""
    labels: Mapping[str, str] = field(default_factory=dict)
    """the image's labels that describe its build: recipe, content hash, base"""

    def record(self) -> dict[str, object]:
        """What --json prints."""
        made = None
        if self.created:
            made = datetime.fromtimestamp(self.created).astimezone().isoformat("T", "seconds")
        return {**asdict(self), "created": made}


# labels that `runner build` adds to an image; those for the base have OCI's names. Source: image-spec, annotations.md
_LABELS = ("runner.", "org.opencontainers.image.base.", "org.opencontainers.image.revision")


def recorded_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of an image that its sidecar stores."""
    return {name: str(value) for name, value in sorted(labels.items()) if name.startswith(_LABELS)}


def sidecar(path: Path) -> Path:
    """The JSON file beside a squashfs file."""
    if path.suffix == ".sqsh":
        return path.with_suffix(".json")
    return path.with_name(path.name + ".json")


def index_path(target: Path) -> Path:
    """The index beside a squashfs file."""
    if target.suffix == ".sqsh":
        return target.with_suffix(".layers")
    return target.with_name(target.name + ".layers")


def as_json(squashfs: Squashfs) -> str:
    """The sidecar's text."""
    fields = asdict(squashfs)
    fields["path"], fields["link"] = squashfs.path.name, squashfs.link.name
    return json.dumps(fields, indent=2) + "\n"


def read_squashfs(path: Path) -> Squashfs | None:
    """The squashfs file at a path, from its sidecar; None if there is no sidecar, or it does not match the file."""
    try:
        data: Mapping[str, Any] = json.loads(sidecar(path).read_text())
        known = {name: data[name] for name in Squashfs.__dataclass_fields__ if name in data}
        labels = recorded_labels(data.get("labels") or {})  # missing in sidecars of older versions
        found = Squashfs(
            **{**known, "path": path, "link": path.with_name(str(data["link"])), "labels": labels}
        )
        return found if path.stat().st_size == found.size_bytes else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_sidecar(path: Path, target: Path) -> bool:
    """Whether the file at `path` is a sidecar that `import` wrote for `target`, or for a file that no longer exists."""
    try:
        data = json.loads(path.read_text())
        named = path.with_name(data["path"])
        ours = {"image_digest", "size_bytes", "content", "settings"} <= data.keys()
        return ours and not path.is_symlink() and (named.name == target.name or not named.exists())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def link_is_ours(link: Path) -> bool:
    """Whether a symlink NAME.sqsh was made by `import`: it points to NAME-<12 hex>.sqsh beside it."""
    return (
        re.fullmatch(re.escape(link.stem) + r"-[0-9a-f]{12}\.sqsh", str(link.readlink()))
        is not None
    )


def with_sha256(squashfs: Squashfs) -> Squashfs:
    """The same with the sha256 of its file. If it is unknown, it is computed and recorded in the sidecar.

    Raises OSError if the file cannot be read.
    """
    if squashfs.sha256:
        return squashfs
    known = replace(squashfs, sha256=sha256_of(squashfs.path))
    # if the folder belongs to another user, the checksum is computed each time
    with suppress(RunnerError):
        files.write(sidecar(squashfs.path), as_json(known))
    return known


def find_squashfs(link_or_path: Path) -> Squashfs | None:
    """The squashfs file that a stable symlink or a path names; None if there is none that runner made.

    The symlink is resolved once, so that the result stays valid when the link later points to a newer image.
    """
    try:
        return read_squashfs(link_or_path.resolve(strict=True))
    except OSError:
        return None


def list_squashfs(folder: Path) -> list[tuple[Squashfs, tuple[str, ...]]]:
    """The squashfs files of a folder, the newest first, each with the names of the symlinks that point to it."""
    links: dict[str, list[str]] = {}
    real = folder.resolve()
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        # a link of the user's own may have another suffix; a hidden one was left by a killed import
        if path.is_symlink() and not path.name.startswith("."):
            with suppress(OSError, RuntimeError):  # links in a circle
                target = path.resolve()
                if target.parent == real:
                    links.setdefault(target.name, []).append(path.name)
    files = [path for path in paths if path.suffix == ".sqsh" and not path.is_symlink()]
    found = []
    for path in files:
        squashfs = read_squashfs(path)
        if squashfs:
            found.append((squashfs, tuple(links.get(path.name, ()))))
    return sorted(found, key=lambda pair: -pair[0].created)


def is_whole(path: Path) -> bool:
    """Whether the file has a superblock of squashfs 4.0, and the length that the superblock states.

    The superblock is written last. Source: Linux 6.1, fs/squashfs/squashfs_fs.h.
    """
    try:
        with path.open("rb") as file:
            magic, major, minor, used = struct.unpack("<4s24xHH8xQ", file.read(48))
            return (magic, major, minor) == (b"hsqs", 4, 0) and 96 <= used <= path.stat().st_size
    except (OSError, struct.error):
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
