"""A layer's tar stream: read, checked and decompressed by threads that run ahead of whoever reads it.

Reading with the blob's sha256, inflating, and the sha256 of the plain bytes each have a thread; all three let other
threads run while they work on a chunk. At most 20 MiB are under way.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.errors import RunnerError
from runner.images.layers.inflate import READ, inflated
from runner.images.layers.layer import Layer, Reader

# a layer that is larger and inflates by more than this is made to fill a disk
LARGEST_PLAIN = 64 << 30
LARGEST_RATIO = 500
_RAW, _PLAIN = 4 << 20, 8 << 20  # bytes under way
_ALGORITHMS = ("sha256", "sha384", "sha512")
# a source that hangs in a read ends by its own time limit; its thread is not waited for longer than this
_LEAVE_SECONDS = 5.0


@contextmanager
def decoded(layer: Layer, *, verify_diff_id: bool = True, advance: Callable[[int], None]) -> Iterator[Reader]:
    """The layer's tar bytes. `advance` is told of bytes read from the blob, in the caller's own thread.

    On leaving, what was not read is read, and digest, size and diff_id are checked: RunnerError where they differ.
    When an exception leaves, the threads end instead.
    """
    pump = _Pump(layer, verify_diff_id=verify_diff_id, advance=advance)
    try:
        yield pump
        pump.finish()
    finally:
        pump.stop()


class _Pump:
    """The threads between a blob and its reader; the reader's side is `read`."""

    def __init__(self, layer: Layer, *, verify_diff_id: bool, advance: Callable[[int], None]) -> None:
        self._layer, self._advance = layer, advance
        self._diff_id = layer.diff_id if verify_diff_id else ""
        self._blob_hash, self._plain_hash = _hash_of(layer.digest), _hash_of(self._diff_id)
        self._raw, self._plain, self._hashed = Pipe(_RAW), Pipe(_PLAIN), Pipe(_PLAIN)
        self._read_bytes = self._told_bytes = 0
        self._chunk, self._position = b"", 0
        self._blob: Reader | None = None
        works = (self._read_blob, self._inflate, *((self._hash_plain,) if self._plain_hash else ()))
        self._threads = [threading.Thread(target=work, name=work.__name__, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def read(self, size: int = -1, /) -> bytes:
        """As many plain bytes as asked for, fewer only at the end. Raises RunnerError for a damaged layer."""
        start = self._position
        end = start + size
        if size >= 0 and end <= len(self._chunk):
            self._position = end
            return self._chunk[start:end]
        parts = [self._chunk[start:]]
        left = size - len(parts[0])
        while left > 0 or size < 0:
            self._chunk = self._next()
            if not self._chunk:
                break
            parts.append(self._chunk if size < 0 else self._chunk[:left])
            left -= len(parts[-1])
        self._position = len(parts[-1]) if self._chunk else 0
        return b"".join(parts)

    def view(self, size: int, /) -> bytes | memoryview:
        """As `read`, without a copy where a chunk holds all of it."""
        start = self._position
        if start == len(self._chunk):
            self._chunk, start = self._next(), 0
        end = start + size
        if end <= len(self._chunk):
            self._position = end
            return memoryview(self._chunk)[start:end]
        self._position = start
        return self.read(size)

    def finish(self) -> None:
        """Read to the end and check. Raises RunnerError."""
        while self._next():
            pass
        if self._plain_hash:
            self._threads[-1].join()
            _compare(self._diff_id, self._plain_hash, "the image's config calls its content")

    def stop(self) -> None:
        """End the threads."""
        for pipe in (self._raw, self._plain, self._hashed):
            pipe.abandon()
        wake = getattr(self._blob, "abandon", None)  # what waits for a server wakes up
        if wake:
            wake()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)

    def _next(self) -> bytes:
        chunk = self._plain.get()
        read = self._read_bytes
        if read != self._told_bytes:
            self._advance(read - self._told_bytes)
            self._told_bytes = read
        return chunk

    def _read_blob(self) -> None:
        try:
            with self._layer.open() as blob:
                self._blob = blob
                while chunk := blob.read(READ):
                    self._read_bytes += len(chunk)
                    self._check_size(ended=False)
                    if self._blob_hash:
                        self._blob_hash.update(chunk)
                    self._raw.put(chunk)
            self._check_size(ended=True)
            if self._blob_hash:
                _compare(self._layer.digest, self._blob_hash, "the image's manifest calls it")
        except Abandoned:
            pass
        except OSError as error:
            self._raw.end(_unreadable(self._layer, error))
        except BaseException as error:  # whatever it is, the reader's side raises it
            self._raw.end(error)
        else:
            self._raw.end()

    def _check_size(self, *, ended: bool) -> None:
        expected = self._layer.size_bytes if self._layer.digest else 0
        if expected and (self._read_bytes > expected or (ended and self._read_bytes < expected)):
            more = "more" if self._read_bytes > expected else f"{self._read_bytes}"
            raise RunnerError(
                f"the layer {self._layer.digest} is damaged",
                f"the image's manifest says {expected} bytes, and there are {more}",
                "pull or copy the image again",
            )

    def _inflate(self) -> None:
        produced = 0
        try:
            compression, chunks = inflated(self._raw.get)
            hashed = self._plain_hash and (compression or not self._one_hash())
            for chunk in chunks:
                produced += len(chunk)
                if produced > LARGEST_PLAIN and produced > LARGEST_RATIO * self._read_bytes:
                    raise _bomb(self._layer, produced, self._read_bytes)
                if hashed:
                    self._hashed.put(chunk)
                self._plain.put(chunk)
            if self._plain_hash and not hashed:
                self._plain_hash = self._blob_hash
        except Abandoned:
            pass
        except BaseException as error:
            self._hashed.end()
            self._plain.end(error)
        else:
            self._hashed.end()
            self._plain.end()

    def _one_hash(self) -> bool:
        """Whether the blob's hash is that of the plain bytes too, where it is not compressed."""
        both = self._blob_hash, self._plain_hash
        return both[0] is not None and both[1] is not None and both[0].name == both[1].name

    def _hash_plain(self) -> None:
        assert self._plain_hash is not None
        update = self._plain_hash.update
        try:
            while chunk := self._hashed.get():
                update(chunk)
        except Abandoned:
            pass


def _hash_of(digest: str) -> hashlib._Hash | None:
    """What computes a digest of that kind; None for "". Raises RunnerError for a kind that is not known."""
    algorithm, _, value = digest.partition(":")
    if not digest:
        return None
    if algorithm not in _ALGORITHMS or len(value) != 2 * hashlib.new(algorithm).digest_size:
        raise RunnerError(
            f"the digest {digest!r} cannot be checked", f"known are {', '.join(_ALGORITHMS)}", "build the image again"
        )
    return hashlib.new(algorithm)


def _compare(digest: str, found: hashlib._Hash, named: str) -> None:
    if found.hexdigest() != digest.partition(":")[2].lower():
        raise RunnerError(
            "a layer of the image is damaged",
            f"{named} {digest}, and its bytes are {found.name}:{found.hexdigest()}",
            "pull or copy the image again",
        )


def _unreadable(layer: Layer, error: OSError) -> RunnerError:
    failure = RunnerError(
        f"the layer {layer.digest or layer.diff_id} cannot be read",
        str(error),
        "see that the image is still there, and try again",
    )
    failure.__cause__ = error
    return failure


def _bomb(layer: Layer, plain: int, read: int) -> RunnerError:
    return RunnerError(
        f"the layer {layer.digest or layer.diff_id} is refused",
        f"{read} bytes of it inflate to more than {plain >> 30} GiB: such layers are made to fill disks",
        "build the image without that file",
    )


class Abandoned(Exception):
    """The reading side has gone: the writing thread has nothing left to do."""


class Pipe:
    """Chunks from one thread to another, at most about `limit` bytes under way."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._chunks: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = self._abandoned = False
        self._error: BaseException | None = None

    def put(self, chunk: bytes) -> None:
        """Hand a chunk on; waits while there is no room. Raises Abandoned when nobody will read it."""
        with self._changed:
            while self._held and self._held + len(chunk) > self._limit and not self._abandoned:
                self._changed.wait()
            if self._abandoned:
                raise Abandoned
            self._chunks.append(chunk)
            self._held += len(chunk)
            self._changed.notify_all()

    def get(self) -> bytes:
        """The next chunk, b"" at the end, again and again. Raises what the writing side ended with."""
        with self._changed:
            while not self._chunks and not self._ended and not self._abandoned:
                self._changed.wait()
            if self._abandoned:
                raise Abandoned
            if self._chunks:
                chunk = self._chunks.popleft()
                self._held -= len(chunk)
                self._changed.notify_all()
                return chunk
            if self._error is not None:
                raise self._error
            return b""

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes: all was handed on, or `error` broke it off."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let go of both sides, and of the bytes."""
        with self._changed:
            self._abandoned = True
            self._chunks.clear()
            self._changed.notify_all()
