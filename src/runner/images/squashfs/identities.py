"""What many inodes share and name by an index: owners, and sets of extended attributes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from runner.errors import RunnerError
from runner.images.squashfs.compression import Compress
from runner.images.squashfs.metadata import FileStream, write_lookup_table
from runner.images.squashfs.superblock import ABSENT

NO_XATTRS = 0xFFFFFFFF
_MOST_IDS = 65535  # the superblock counts them in 16 bits
_PREFIXES = ((b"user.", 0), (b"trusted.", 1), (b"security.", 2))
XattrSet = tuple[tuple[bytes, bytes], ...]


def holds_xattr(name: bytes) -> bool:
    """Whether squashfs can hold an extended attribute of this name: POSIX ACLs (system.*) it cannot."""
    return any(name.startswith(prefix) and len(name) - len(prefix) <= 0xFFFF for prefix, _ in _PREFIXES)


class IdTable(dict[int, int]):
    """uid or gid -> its index; a new one is given the next."""

    def __missing__(self, number: int) -> int:
        if not 0 <= number <= 0xFFFFFFFF:
            raise RunnerError(
                f"the image has a file of owner {number}", "an owner is a number of 32 bits", "mend the image's layer"
            )
        if len(self) == _MOST_IDS:
            raise RunnerError(
                f"the image has more than {_MOST_IDS} different owners",
                "squashfs counts users and groups together in 16 bits",
                "import it with all files owned by root",
            )
        self[number] = index = len(self)
        return index

    def write(self, file: BinaryIO, position: int, compress: Compress | None) -> tuple[int, int]:
        """Write the table: where its index begins, and where it ends."""
        return write_lookup_table(file, position, (struct.pack("<I", number) for number in self), compress)


class XattrTable(dict[XattrSet, int]):
    """A file's extended attributes -> the index of that set; equal sets share one."""

    def __init__(self) -> None:
        super().__init__({(): NO_XATTRS})
        self._sets: list[XattrSet] = []

    def __missing__(self, xattrs: XattrSet) -> int:
        ordered = tuple(sorted(xattrs))
        if ordered not in self:
            for name, _ in ordered:
                if not holds_xattr(name):
                    raise RunnerError(
                        f"the image has a file with the extended attribute {name.decode(errors='replace')!r}",
                        "squashfs holds those of user., trusted. and security. alone",
                        "import it without extended attributes",
                    )
            dict.__setitem__(self, ordered, len(self._sets))
            self._sets.append(ordered)
        self[xattrs] = index = self[ordered]
        return index

    def write(self, file: BinaryIO, position: int, compress: Compress | None) -> tuple[int, int]:
        """Write the table: where its head begins (ABSENT: there is none), and where it ends."""
        if not self._sets:
            return ABSENT, position
        pairs = FileStream(file, position, compress)
        records = list(self._write_pairs(pairs))
        pairs.finish()
        head = struct.pack("<QII", position, len(records), 0)
        return write_lookup_table(file, pairs.position, records, compress, head)

    def _write_pairs(self, stream: FileStream) -> Iterator[bytes]:
        for xattrs in self._sets:
            reference, size = stream.reference(), 0
            for name, value in xattrs:
                prefix, number = next(known for known in _PREFIXES if name.startswith(known[0]))
                key = name[len(prefix) :]
                pair = struct.pack("<HH", number, len(key)) + key + struct.pack("<I", len(value)) + value
                stream.write(pair)
                size += len(pair)
            yield struct.pack("<QII", reference, len(xattrs), size)
