"""One blob on its way: the parts that are being fetched, and the reader that takes them in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Part:
    """A piece of a blob, `start` to `end`, that one thread fetches."""

    __slots__ = ("chunks", "end", "got", "start", "streamed", "taken")

    def __init__(self, start: int, end: int, *, streamed: bool = False) -> None:
        self.start = start
        self.end = end
        self.streamed = streamed
        """too long to be held as a whole: its bytes count as they come"""
        self.got = 0
        self.taken = 0
        self.chunks: deque[memoryview] = deque()

    @property
    def full(self) -> bool:
        """Whether all its bytes have come."""
        return self.got == self.end - self.start

    @property
    def spent(self) -> bool:
        """Whether all its bytes have been read."""
        return self.taken == self.end - self.start

    def append(self, chunk: bytes) -> None:
        """The bytes that come next."""
        self.chunks.append(memoryview(chunk))
        self.got += len(chunk)

    def take(self, size: int) -> memoryview:
        """At most `size` bytes of the first chunk."""
        chunk = self.chunks.popleft()
        if len(chunk) > size:
            self.chunks.appendleft(chunk[size:])
            chunk = chunk[:size]
        self.taken += len(chunk)
        return chunk


class Blob:
    """A blob's parts in order. Every method is called with `lock` held."""

    def __init__(self, digest: str, size: int, lock: threading.Lock) -> None:
        self.digest = digest
        self.size = size
        self.lock = lock
        self.readable = threading.Condition(lock)
        self.parts: deque[Part] = deque()
        self.claimed = 0
        self.position = 0
        self.held = 0
        """bytes of memory that its parts take or will take"""
        self.opened = False
        self.closed = False
        self.error: BaseException | None = None

    def claim(self, length: int, *, streamed: bool = False) -> Part:
        """The next part, which the caller will fill."""
        part = Part(self.claimed, self.claimed + length, streamed=streamed)
        self.claimed = part.end
        self.parts.append(part)
        return part

    def fail(self, error: BaseException) -> None:
        """The reader will get this error."""
        self.error = self.error or error
        self.readable.notify_all()

    def close(self) -> None:
        """Forget what has come; wake a reader that waits in another thread."""
        self.closed = True
        self.parts.clear()
        self.readable.notify_all()


class BlobReader:
    """The Reader of an open blob."""

    def __init__(self, blob: Blob, used: Callable[[Blob, Part, int], None], release: Callable[[Blob], None]) -> None:
        self._blob = blob
        self._used = used
        self._release = release

    def abandon(self) -> None:
        """Stop fetching; a read that waits in another thread ends at once with ValueError, as of a closed file."""
        self._release(self._blob)

    def read(self, size: int = -1, /) -> bytes:
        """As many bytes as asked, fewer only at the end. Raises RunnerError where the blob cannot be fetched."""
        blob = self._blob
        pieces: list[memoryview] = []
        with blob.lock:
            left = blob.size - blob.position
            left = left if size < 0 else min(size, left)
            while left:
                self._wait()
                part = blob.parts[0]
                piece = part.take(left)
                if part.spent:
                    blob.parts.popleft()
                pieces.append(piece)
                left -= len(piece)
                blob.position += len(piece)
                self._used(blob, part, len(piece))
        whole = pieces[0].obj if len(pieces) == 1 else None
        if isinstance(whole, bytes) and len(whole) == len(pieces[0]):
            return whole
        return b"".join(pieces)

    def _wait(self) -> None:
        """Until the next bytes are here."""
        blob = self._blob
        while not (blob.parts and blob.parts[0].chunks):
            if blob.closed:
                raise ValueError("read of a closed blob")
            if blob.error:
                raise blob.error
            blob.readable.wait()
        if blob.closed:
            raise ValueError("read of a closed blob")
