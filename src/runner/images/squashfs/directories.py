"""The listing of a directory as squashfs has it: headers with up to 256 entries each, and an index of the headers."""

from __future__ import annotations

import struct

from runner.errors import RunnerError
from runner.images.squashfs.inodes import DIRECTORY, Listing
from runner.images.squashfs.metadata import METADATA_SIZE, MetadataStream

_HEADER = struct.Struct("<III")  # entries - 1, inode block, inode number that the entries count from
_ENTRY = struct.Struct("<HhHH")  # offset in the inode block, inode number - that of the header, type, name length - 1
_INDEX = struct.Struct("<III")  # where the header lies in the listing, its metadata block, name length - 1
_MOST_ENTRIES = 256
_LONGEST_NAME = 256
_MOST_INDEXES = 65535  # counted in 16 bits; without more, a reader only searches longer


class ListingWriter:
    """Writes the entries of one directory, given in the order of their names."""

    def __init__(self, stream: MetadataStream) -> None:
        self._stream = stream
        self._reference = stream.reference()
        self._size = 0
        self._last_block = stream.start  # in which the header before lies
        self._index = bytearray()
        self._indexes = 0
        self._subdirectories = 0
        self._begin(0, 0, b"")

    def _begin(self, block: int, number: int, name: bytes) -> None:
        self._block, self._number, self._name = block, number, name
        self._count = 0
        self._entries = bytearray()
        self._room = METADATA_SIZE - len(self._stream.buffer) - _HEADER.size

    def add(self, name: bytes, reference: int, number: int, kind: int) -> None:
        """An entry. Raises RunnerError for a name that squashfs cannot hold or that is none."""
        # find(): `in` takes its left side for a number first, which lasts longer than the search
        if not 0 < len(name) <= _LONGEST_NAME or name.find(b"/") >= 0 or name.find(0) >= 0 or name in (b".", b".."):
            raise _bad_name(name)
        block, difference = reference >> 16, number - self._number
        # a header never reaches far into the next metadata block: the index leads a reader to the right block
        if (
            block != self._block
            or not -32768 <= difference <= 32767
            or self._count == _MOST_ENTRIES
            or len(self._entries) >= self._room
        ):
            self._flush()
            self._begin(block, number, name)
            difference = 0
        elif self._count == 0:
            self._number, self._name, difference = number, name, 0
        self._entries += _ENTRY.pack(reference & 0xFFFF, difference, kind, len(name) - 1) + name
        self._count += 1
        if kind == DIRECTORY:
            self._subdirectories += 1

    def finish(self) -> Listing:
        self._flush()
        return Listing(self._reference, self._size, self._indexes, bytes(self._index), self._subdirectories)

    def _flush(self) -> None:
        """Write the header and the entries that are held; index it where it is the first of a metadata block."""
        if not self._count:
            return
        stream = self._stream
        if stream.start != self._last_block and self._indexes < _MOST_INDEXES:
            self._index += _INDEX.pack(self._size, stream.start, len(self._name) - 1) + self._name
            self._indexes += 1
        self._last_block = stream.start
        stream.write(_HEADER.pack(self._count - 1, self._block, self._number) + self._entries)
        self._size += _HEADER.size + len(self._entries)


def _bad_name(name: bytes) -> RunnerError:
    shown = name[:80].decode(errors="replace")
    why = (
        f"squashfs holds names up to {_LONGEST_NAME} bytes" if len(name) > _LONGEST_NAME else "it is no name of a file"
    )
    return RunnerError(f"the image has a file named {shown!r}", why, "mend the image's layer")
