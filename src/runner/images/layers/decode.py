"""A layer's tar stream: read, checked and decompressed by threads that run ahead of the reader.

One thread reads the blob and hashes it, one decompresses, one hashes the plain bytes; all three release the
interpreter lock while they work on a chunk. At most 20 MiB are in flight.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.errors import RunnerError
from runner.images.layers.inflate import READ, inflated
from runner.images.layers.layer import Layer, Reader, RemoteReader, ViewReader

# a layer that exceeds both is a decompression bomb
LARGEST_PLAIN = 64 << 30
LARGEST_RATIO = 500
_RAW, _PLAIN = 4 << 20, 8 << 20  # bytes in flight
# how long to wait for the thread of a source that hangs in a read, which its own time limit ends
_LEAVE_SECONDS = 5.0


@contextmanager
def decoded(
    layer: Layer, *, verify_diff_id: bool = True, advance: Callable[[int], None]
) -> Iterator[Reader]:
    """The layer's tar bytes. `advance` gets the number of bytes read from the blob, in the caller's thread.

    On normal exit the rest is read, and digest, size and diff_id are checked: RunnerError if they differ. After an
    exception the threads end without that.
    """
    pump = _Pump(layer, verify_diff_id=verify_diff_id, advance=advance)
    try:
        yield pump
        pump.finish()
    finally:
        pump.stop()


class _Pump(ViewReader):
    """The threads between a blob and its reader, who calls `read`."""

    def __init__(
        self, layer: Layer, *, verify_diff_id: bool, advance: Callable[[int], None]
    ) -> None:
        self._layer, self._advance = layer, advance
        self._diff_id = layer.diff_id if verify_diff_id else ""
        self._blob_hash = hashlib.sha256() if layer.digest else None
        self._plain_hash = hashlib.sha256() if self._diff_id else None
        self._raw, self._plain, self._hashed = Pipe(_RAW), Pipe(_PLAIN), Pipe(_PLAIN)
        self._read_bytes = self._reported_bytes = 0
        self._chunk, self._position = b"", 0
        self._blob: Reader | None = None
        works = [self._read_blob, self._inflate]
        if self._plain_hash:
            works.append(self._hash_plain)
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()

    def read(self, size: int = -1, /) -> bytes:
        """`size` plain bytes, fewer only at the end. Raises RunnerError for a damaged layer."""
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
        """As `read`, without a copy if one chunk has all the bytes."""
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
            _compare(
                self._diff_id,
                self._plain_hash,
                "the image's configuration lists the layer's content as",
            )

    def stop(self) -> None:
        """End the threads."""
        for pipe in (self._raw, self._plain, self._hashed):
            pipe.abandon()
        if isinstance(self._blob, RemoteReader):
            self._blob.abandon()
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)

    def _next(self) -> bytes:
        chunk = self._plain.get()
        read = self._read_bytes
        if read != self._reported_bytes:
            self._advance(read - self._reported_bytes)
            self._reported_bytes = read
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
                _compare(
                    self._layer.digest, self._blob_hash, "the image's manifest lists the layer as"
                )
        except Abandoned:
            pass
        except OSError as error:
            what = f"the layer {self._layer.digest or self._layer.diff_id} cannot be read"
            failure = RunnerError(
                what, str(error), "check that the image still exists, and try again"
            )
            failure.__cause__ = error
            self._raw.end(failure)
        except BaseException as error:  # raised again in the reader's thread
            self._raw.end(error)
        else:
            self._raw.end()

    def _check_size(self, *, ended: bool) -> None:
        expected = self._layer.size_bytes if self._layer.digest else 0
        if expected and (self._read_bytes > expected or (ended and self._read_bytes < expected)):
            more = "more" if self._read_bytes > expected else f"{self._read_bytes}"
            raise RunnerError(
                f"the layer {self._layer.digest} is damaged",
                f"the image's manifest says {expected} bytes, but the layer has {more}",
                "pull or copy the image again",
            )

    def _inflate(self) -> None:
        produced = 0
        try:
            compression, chunks = inflated(self._raw.get)
            # the hash of an uncompressed blob is also that of its plain bytes
            hashed = self._plain_hash and (compression or not self._blob_hash)
            for chunk in chunks:
                produced += len(chunk)
                if produced > LARGEST_PLAIN and produced > LARGEST_RATIO * self._read_bytes:
                    raise RunnerError(
                        f"cannot import the layer {self._layer.digest or self._layer.diff_id}",
                        f"{self._read_bytes} bytes of the layer decompress to more than {produced >> 30} GiB, as in a "
                        "decompression bomb",
                        "find the huge file in this layer, and build the image without it",
                    )
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

    def _hash_plain(self) -> None:
        assert self._plain_hash is not None
        update = self._plain_hash.update
        try:
            while chunk := self._hashed.get():
                update(chunk)
        except Abandoned:
            pass


def _compare(digest: str, found: hashlib._Hash, named: str) -> None:
    if f"sha256:{found.hexdigest()}" != digest:
        raise RunnerError(
            "a layer of the image is damaged",
            f"{named} {digest}, but the layer's content hashes to sha256:{found.hexdigest()}",
            "pull or copy the image again",
        )


class Abandoned(Exception):
    """The reader has gone: the writing thread can end."""


class Pipe:
    """Chunks from one thread to another, about `limit` bytes at most in flight."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._chunks: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = self._abandoned = False
        self._error: BaseException | None = None

    def put(self, chunk: bytes) -> None:
        """Pass a chunk on; waits for room. Raises Abandoned if the reader has gone."""
        with self._changed:
            while self._held and self._held + len(chunk) > self._limit and not self._abandoned:
                self._changed.wait()
            if self._abandoned:
                raise Abandoned
            self._chunks.append(chunk)
            self._held += len(chunk)
            self._changed.notify_all()

    def get(self) -> bytes:
        """The next chunk, b"" at the end however often it is called. Raises the error that the writer ended with."""
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
        """No more chunks follow: the stream is complete, or `error` ended it."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Release both threads and the bytes."""
        with self._changed:
            self._abandoned = True
            self._chunks.clear()
            self._changed.notify_all()
