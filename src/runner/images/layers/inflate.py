"""A layer's bytes decompressed. The first bytes, not the media type, decide: gzip, zstd, xz, bzip2, or none.

OCI allows only gzip, zstd and none, but podman reads and copies the others too.

A chunk is at most 4 MiB, so a small layer that inflates to gigabytes never fills the memory; with smaller chunks the
threads on both sides wake each other too often. Source: RFC 1952, RFC 8878.
"""

from collections.abc import Callable, Iterator
from typing import IO, cast

from runner.errors import RunnerError

CHUNK = 1 << 22
READ = 1 << 20
# igzip 1.9 misreads some headers that arrive in pieces of a few bytes: bytes to read before a member begins
_HEADER = 1 << 16
_FIRST_STEP = 1 << 15  # bytes of a member to decompress first: it may be small
_SMALL = 1 << 17  # smaller pieces are joined
# the largest window that every decoder must accept (RFC 8878); a larger one allocates as much memory
_WINDOW = 1 << 27
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f
_BZIP2, _XZ = b"BZh", b"\xfd7zXZ\0"
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB
# a frame of 32 times 0xa5 in one RLE block: see `_unzstd`
_SENTINEL = b"\xa5" * 32
_SENTINEL_FRAME = _ZSTD + b"\x20\x20" + (1 | 1 << 1 | 32 << 3).to_bytes(3, "little") + b"\xa5"

Pull = Callable[[], bytes]  # the next bytes; b"" at the end however often it is called


def broken(why: str) -> RunnerError:
    """The error for a layer that cannot be decompressed."""
    return RunnerError(
        "a layer of the image cannot be decompressed", why, "pull or copy the image again"
    )


def inflated(pull: Pull) -> tuple[str, Iterator[bytes]]:
    """The compression ("gzip", "zstd", "xz", "bzip2", "") and the plain chunks.

    Iterating raises RunnerError for damaged bytes.
    """
    head = b""
    while len(head) < 6 and (chunk := pull()):
        head += chunk
    if head.startswith(_GZIP):
        return "gzip", _joined(_gunzip(head, pull))
    if head.startswith(_ZSTD) or (head[1:4] == _SKIPPABLE and head[0] & 0xF0 == 0x50):
        return "zstd", _unzstd(head, pull)
    if head.startswith(_XZ):
        return "xz", _streams("xz", _XZ, head, pull)
    if head.startswith(_BZIP2):
        return "bzip2", _streams("bzip2", _BZIP2, head, pull)
    return "", _plain(head, pull)


def _plain(chunk: bytes, pull: Pull) -> Iterator[bytes]:
    while chunk:
        yield chunk
        chunk = pull()


def _gunzip(data: bytes, pull: Pull) -> Iterator[bytes]:
    """The members in order; what follows the last is ignored, as gzip does."""
    from isal import igzip_lib

    position, first = 0, True
    while True:
        while len(data) - position < _HEADER and (chunk := pull()):
            data, position = data[position:] + chunk, 0
        if data[position : position + 2] != _GZIP and not first:
            while pull():
                pass
            return
        decoder = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        step, first = _FIRST_STEP, False
        while not decoder.eof:
            if position >= len(data):
                data, position = pull(), 0
                if not data:
                    raise broken("its gzip stream is truncated")
            piece = data[position : position + step]
            position, step = position + len(piece), CHUNK
            try:
                yield decoder.decompress(piece, CHUNK)
                while not decoder.needs_input and not decoder.eof:
                    yield decoder.decompress(b"", CHUNK)
            except igzip_lib.IsalError as error:  # type: ignore[misc]  # its stub calls the class an instance
                raise broken(f"its gzip stream is damaged: {error}") from error
        position -= len(decoder.unused_data)


def _streams(name: str, magic: bytes, data: bytes, pull: Pull) -> Iterator[bytes]:
    """The streams of xz or bzip2 in order; what follows the last is ignored, such as the padding of xz."""
    import bz2
    import lzma

    while True:
        decoder = (
            bz2.BZ2Decompressor()
            if name == "bzip2"
            else lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
        )
        while not decoder.eof:
            if decoder.needs_input and not data:
                data = pull()
                if not data:
                    raise broken(f"its {name} stream is truncated")
            try:
                piece = decoder.decompress(data, CHUNK)
            except (lzma.LZMAError, OSError, EOFError) as error:
                raise broken(f"its {name} stream is damaged: {error}") from error
            data = b""
            if piece:
                yield piece
        data = decoder.unused_data
        while len(data) < len(magic) and (chunk := pull()):
            data += chunk
        if not data.startswith(magic):
            while pull():
                pass
            return


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces, small ones joined."""
    small: list[bytes] = []
    held = 0
    for piece in pieces:
        if not small and len(piece) >= _SMALL:
            yield piece
        elif piece:
            small.append(piece)
            held += len(piece)
            if held >= _SMALL:
                yield b"".join(small)
                small, held = [], 0
    if small:
        yield b"".join(small)


class _Frames:
    """The input of zstandard: the layer's bytes, then the sentinel's.

    The sentinel's first byte comes alone: libzstd 1.5 decodes a whole frame at the beginning of its input even if
    that input should be the rest of a truncated header.
    """

    def __init__(self, head: bytes, pull: Pull) -> None:
        self._head, self._pull = head, pull
        self._behind = [_SENTINEL_FRAME[1:], _SENTINEL_FRAME[:1]]

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, as received."""
        data, self._head = self._head or self._pull(), b""
        return data or (self._behind.pop() if self._behind else b"")


def _unzstd(head: bytes, pull: Pull) -> Iterator[bytes]:
    """The frames in order, without skippable ones.

    zstandard does not report a truncated last frame. So a frame with a known content follows it: if that content
    does not come out, the decoder took its bytes for the rest of the truncated frame.
    """
    import zstandard

    source = cast("IO[bytes]", _Frames(head, pull))  # only its read() is used
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
        source, read_size=READ, read_across_frames=True, closefd=False
    )
    held = b""
    try:
        while chunk := reader.read(CHUNK):
            if len(chunk) >= len(_SENTINEL):
                if held:
                    yield held
                held = chunk
            else:
                held += chunk
    except zstandard.ZstdError as error:
        raise broken(f"its zstd stream is damaged: {error}") from error
    if not held.endswith(_SENTINEL):
        raise broken("its zstd stream is truncated")
    yield held[: -len(_SENTINEL)]
