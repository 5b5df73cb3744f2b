"""A small corpus of layers, and ways to damage them: what fuzzing the importer's readers starts from."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from contextlib import nullcontext

import zstandard

from runner.errors import RunnerError
from runner.images.flatten.flatten import Flattener
from runner.images.layers.decode import decoded
from runner.images.layers.layer import Layer, Reader
from runner.images.layers.tar import Entry, entries

BLOCK = 512
# a damaged size is no reason to read gigabytes of holes
_READ = 4 << 20
_NUMBERS = (b"\0" * 12, b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\x80" + bytes(10) + b"\1", b" 7 \0")
_WORDS = (b"path", b"size", b"GNU.sparse.map", b"GNU.sparse.major", b"SCHILY.xattr.user.a", b"..", b"/", b"\0", b".wh.")
_NAMES = ("a", "a/b", "a/b/c", "./d/", "long/" * 40 + "name", ".wh.a", "a/.wh..wh..opq", "a/.wh.b", "l/x", "é" * 70)


def tar(choice: random.Random) -> bytes:
    """A valid layer with entries of every kind, in one of tarfile's formats."""
    out = io.BytesIO()
    form = choice.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for _ in range(choice.randrange(1, 12)):
            name = choice.choice(_NAMES[:4] if form == tarfile.USTAR_FORMAT else _NAMES)
            entry = tarfile.TarInfo(name)
            entry.type = choice.choice(b"0123456".decode()).encode()
            entry.linkname = choice.choice(("a", "a/b", "../x", "/etc", "l"))
            entry.uid, entry.mtime = choice.randrange(1 << 20), choice.randrange(1 << 31)
            if form == tarfile.PAX_FORMAT:
                entry.pax_headers = choice.choice(_HEADERS)
            data = choice.randbytes(choice.choice((0, 1, 511, 512, 3000))) if entry.type == b"0" else b""
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"SCHILY.xattr.user.a": "x" * 50, "SCHILY.xattr.security.capability": "\1"},
    {"GNU.sparse.map": "0,1,600,1", "GNU.sparse.size": "1000", "GNU.sparse.name": "sparse"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5000"},
    {"mtime": "1.5", "uid": "70000", "comment": "x" * 600},
)


def old_sparse(choice: random.Random) -> bytes:
    """A layer with a sparse file of GNU's old kind, whose map goes on behind the header."""
    pieces = choice.randrange(1, 30)
    number = b"%011o\0"
    table = b"".join(number % (at * 1000) + number % 10 for at in range(pieces))
    head = tar(random.Random(1))[:BLOCK]
    block = bytearray(
        head[:124] + number % (pieces * 10) + head[136:156] + b"S" + bytes(100) + b"ustar  \0" + bytes(121)
    )
    block += table[:96].ljust(96, b"\0") + bytes([pieces > 4]) + number % (pieces * 1000)
    rest = table[96:]
    out = sealed(bytes(block).ljust(BLOCK, b"\0"))
    while rest:
        out += rest[:504].ljust(504, b"\0") + bytes([len(rest) > 504]) + bytes(7)
        rest = rest[504:]
    return out + choice.randbytes(pieces * 10).ljust(BLOCK, b"\0") + bytes(2 * BLOCK)


def sealed(block: bytes) -> bytes:
    """The header with a right checksum."""
    return block[:148] + b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 256) + block[156:]


def damaged(data: bytes, choice: random.Random, *, blocks: bool) -> bytes:
    """The bytes with some of them changed; `blocks`: they are a tar, whose headers are changed and made whole again."""
    for _ in range(choice.randrange(1, 4)):
        data = choice.choice(_WAYS[: None if blocks else 5])(data, choice) if data else choice.randbytes(BLOCK)
    return data


def _flip(data: bytes, choice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choice.choice((1, 2, 10, 100))):
        changed[choice.randrange(len(changed))] = choice.choice((0, 255, choice.randrange(256)))
    return bytes(changed)


def _cut(data: bytes, choice: random.Random) -> bytes:
    return data[: choice.randrange(len(data) + 1)]


def _repeat(data: bytes, choice: random.Random) -> bytes:
    start, end = sorted(choice.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:end] * choice.choice((1, 2, 20)) + data[end:]


def _drop(data: bytes, choice: random.Random) -> bytes:
    start, end = sorted(choice.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _insert(data: bytes, choice: random.Random) -> bytes:
    at = choice.randrange(len(data) + 1)
    return data[:at] + choice.choice((choice.randbytes(20), bytes(600), *_WORDS)) + data[at:]


def _field(data: bytes, choice: random.Random) -> bytes:
    """A header's number, type or name replaced, with a right checksum."""
    at = BLOCK * choice.randrange(max(len(data) // BLOCK, 1))
    block = bytearray(data[at : at + BLOCK].ljust(BLOCK, b"\0"))
    start, width = choice.choice(((100, 8), (108, 8), (124, 12), (136, 12), (329, 8), (386, 12), (483, 12)))
    where = choice.randrange(3)
    if where == 0:
        block[start : start + width] = choice.choice(_NUMBERS)[:width].ljust(width, b"\0")
    elif where == 1:
        block[156] = choice.choice(b"\x000123456789xgXLKSMNVDA")
    else:
        block[0:100] = choice.choice((b"..", b"a/../b", b"/", b"a", b".wh.", b".wh..", b"l/" * 50)).ljust(100, b"\0")
    return data[:at] + sealed(bytes(block)) + data[at + BLOCK :]


def _record(data: bytes, choice: random.Random) -> bytes:
    """A digit of a PAX record changed, or one of its words."""
    word = choice.choice((*_WORDS, b"=", b" ", b"\n", b","))
    at = data.find(word, choice.randrange(len(data)))
    if at < 0:
        return _field(data, choice)
    return data[:at] + choice.choice((*_WORDS, b"9" * 30, b"-1", b"")) + data[at + len(word) :]


_WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _cut,
    _repeat,
    _drop,
    _insert,
    _field,
    _record,
    _field,
)


def tar_case(choice: random.Random) -> bytes:
    """A damaged tar."""
    return damaged(choice.choice((tar, tar, tar, old_sparse))(choice), choice, blocks=True)


def gzip_case(choice: random.Random) -> bytes:
    """A damaged gzip stream of one or more members."""
    members = [gzip.compress(tar(choice), choice.choice((0, 1, 9))) for _ in range(choice.randrange(1, 4))]
    return damaged(b"".join(members), choice, blocks=False)


def zstd_case(choice: random.Random) -> bytes:
    """A damaged zstd stream of one or more frames."""
    compressor = zstandard.ZstdCompressor(
        level=choice.choice((1, 3, 9)), write_checksum=choice.random() < 0.5, write_content_size=choice.random() < 0.5
    )
    frames = [compressor.compress(tar(choice)) for _ in range(choice.randrange(1, 4))]
    frames.insert(0, choice.choice((b"", b"\x50\x2a\x4d\x18\x03\0\0\0abc")))
    return damaged(b"".join(frames), choice, blocks=False)


CASES = {"tar": tar_case, "gzip": gzip_case, "zstd": zstd_case}


def taken(case: bytes) -> bool:
    """Whether the importer takes a layer of those bytes, twice over itself; anything but a RunnerError comes out."""
    made = Layer("", "", 0, lambda: nullcontext(io.BytesIO(case)))
    flattener = Flattener(owners="keep")
    try:
        for _ in range(2):
            flattener.begin_layer()
            offer: Callable[[Entry], object] = flattener.offer
            _offered(made, offer)
            if flattener.end_layer():
                _offered(made, flattener.again)
        flattener.finish()
    except RunnerError as error:
        assert error.what and error.why and error.fix
        return False
    return True


def _offered(made: Layer, offer: Callable[[Entry], object]) -> None:
    with decoded(made, advance=lambda count: None) as stream:
        for entry, content in entries(stream):
            if offer(entry) is not None:
                _drain(content)


def _drain(content: Reader) -> None:
    left = _READ
    while left > 0 and (data := content.read(131072)):
        left -= len(data)
