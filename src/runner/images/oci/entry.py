"""One entry of a layer, whatever form it had in the archive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """A file, directory, link or device as a layer names it; whiteouts are entries like others here."""

    path: bytes  # without "/" at either end; b"" is the image's root
    mode: int  # with the type bits; 0 for a hard link, whose target has the mode
    uid: int
    gid: int
    mtime: int  # whole seconds, rounded down
    size: int  # of the content as it is read, holes included
    target: bytes = b""  # of a symlink: as it is; of a hard link: a path like `path`
    device: tuple[int, int] = (0, 0)  # major and minor
    xattrs: tuple[tuple[bytes, bytes], ...] = ()  # sorted by name
    hard_link: bool = False
