"""Blobs as streams, fetched ahead in parallel ranges with bounded memory; broken connections resume.

A blob is fetched in parts of 4 MiB by several threads, in the order in which it will be read. Parts that are not read
yet hold at most WINDOW bytes over all blobs; the part that a reader waits for is fetched beyond that, so that blobs
that are read at the same time never wait for each other. A server without ranges is read in one stream per blob.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from runner.errors import RunnerError
from runner.images.sources.registry.web import Answer, Tries, Web
from runner.images.sources.registry.web_errors import Transient

PART = 4 << 20
WINDOW = 32 << 20
CHUNK = 256 << 10
PROGRESS = 1 << 20  # bytes; an attempt that received more resets the count of attempts
JOIN_SECONDS = 2.0

Fetch = Callable[[str, int, int, int], Answer]
"""(digest, first byte, end, blob's size) -> 206 with the range, or 200 with the whole blob."""


class Downloads:
    """The blobs of one image: threads, memory, order. Thread-safe."""

    def __init__(self, fetch: Fetch, web: Web, registry: str) -> None:
        self._fetch = fetch
        self._web = web
        self._registry = registry
        self._connections = max(1, web.connections)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._blobs: list[Blob] = []
        self._threads: list[threading.Thread] = []
        self._held = 0
        self._probe: Part | None = None
        self._ranges: bool | None = None
        """whether the server supports ranges; None: not known yet"""

    def expect(self, blobs: Sequence[tuple[str, int]]) -> None:
        """Fetch these (digest, size) ahead, in the order in which they will be opened."""
        with self._lock:
            self._drop([blob for blob in self._blobs if not blob.opened])
            self._blobs += [Blob(digest, size, self._lock) for digest, size in blobs]
            self._start()
            self._work.notify_all()

    @contextmanager
    def open(self, digest: str, size: int) -> Iterator[BlobReader]:
        """The blob's bytes in order; starts to fetch unless `expect` did."""
        with self._lock:
            blob = self._expected(digest, size) or Blob(digest, size, self._lock)
            if blob not in self._blobs:
                self._blobs.insert(sum(other.opened for other in self._blobs), blob)
            blob.opened = True
            self._start()
            self._work.notify_all()
        try:
            yield BlobReader(blob, self._used, self._release)
        finally:
            self._release(blob)

    def close(self) -> None:
        """End every thread and connection at once; open blobs can no longer be read."""
        self._web.stopped.set()
        with self._lock:
            self._drop(list(self._blobs))
            self._work.notify_all()
        self._web.close()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:  # a connecting daemon thread ends by itself
            thread.join(max(0.0, deadline - time.monotonic()))

    def _expected(self, digest: str, size: int) -> Blob | None:
        """The blob being fetched ahead; earlier expected blobs are dropped."""
        waiting = [blob for blob in self._blobs if not blob.opened]
        place = next(
            (at for at, blob in enumerate(waiting) if (blob.digest, blob.size) == (digest, size)),
            None,
        )
        self._drop(waiting[:place])
        return None if place is None else waiting[place]

    def _drop(self, blobs: Sequence[Blob]) -> None:
        for blob in blobs:
            blob.close()
            self._held -= blob.held
            blob.held = 0
            if blob in self._blobs:
                self._blobs.remove(blob)

    def _release(self, blob: Blob) -> None:
        with self._lock:
            self._drop([blob])
            self._work.notify_all()

    def _start(self) -> None:
        if self._web.stopped.is_set():
            raise RunnerError(
                "cannot read a layer", "the download has been stopped", "import the image again"
            )
        while len(self._threads) < self._connections:
            name = f"download-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _used(self, blob: Blob, part: Part, count: int) -> None:
        """The reader has taken `count` bytes of the part. Called with the lock held."""
        blob.held -= count
        self._held -= count
        if part.streamed:
            self._work.notify_all()
        elif part.spent:
            self._work.notify()

    # the threads

    def _run(self) -> None:
        while claim := self._next():
            blob, part = claim
            try:
                self._fill(blob, part)
            except BaseException as error:
                with self._lock:
                    blob.fail(error)
            self._answered(part)

    def _answered(self, part: Part) -> None:
        """The first answer told whether the server has ranges, or will not arrive."""
        with self._lock:
            if self._probe is part:
                self._probe = None
                self._work.notify_all()

    def _next(self) -> tuple[Blob, Part] | None:
        """The next part to fetch; None at the end of all work."""
        with self._lock:
            while not self._web.stopped.is_set():
                for blob in self._blobs:
                    if part := self._claim(blob):
                        self._work.notify()  # there may be memory for another part
                        return blob, part
                self._work.wait()
        return None

    def _claim(self, blob: Blob) -> Part | None:
        """The blob's next part, if it may be fetched now."""
        left = blob.size - blob.claimed
        if not left or blob.error or self._probe:
            return None
        if self._ranges is False and left > PART:
            return blob.claim(left, streamed=True) if blob.opened else None
        length = min(PART, left)
        waited_for = blob.opened and not blob.parts
        if self._held + length > WINDOW and not waited_for:
            return None
        part = blob.claim(length)
        self._held += length
        blob.held += length
        if self._ranges is None and length < blob.size:
            self._probe = part  # the first answer decides how to continue
        return part

    def _fill(self, blob: Blob, part: Part) -> None:
        tries = Tries(self._web, f"blob {blob.digest}", self._registry)
        while not part.full and not blob.closed:
            before = part.got
            try:
                self._receive(blob, part)
            except Transient as trouble:
                if self._web.stopped.is_set() or blob.closed:
                    return
                if part.got - before >= PROGRESS:
                    tries.count = 0
                why = f"{trouble.why}, at byte {part.start + part.got:,}"
                tries.failed(Transient(why, delay=trouble.delay, status=trouble.status))

    def _receive(self, blob: Blob, part: Part) -> None:
        """The bytes of one request, from the end of the part so far."""
        start = part.start + part.got
        with self._fetch(blob.digest, start, part.end, blob.size) as answer:
            if answer.status == 206:
                check_range(answer, blob, start, self._registry)
                self._ranges = True
            else:
                check_length(answer, blob)
                if start or part.end < blob.size:
                    self._take_whole(blob, part)
                skip(answer, start)
            self._answered(part)
            while not part.full and not blob.closed:
                chunk = answer.read(min(CHUNK, part.end - part.start - part.got))
                if not chunk:
                    raise Transient("the connection ended early")
                self._deliver(blob, part, chunk)

    def _take_whole(self, blob: Blob, part: Part) -> None:
        """The server sends whole blobs only: this part becomes the rest of the blob unless another part has it."""
        with self._lock:
            self._ranges = False
            if blob.claimed == part.end < blob.size and not part.streamed:
                unread = part.end - part.start - part.got
                blob.held -= unread
                self._held -= unread
                blob.claimed = part.end = blob.size
                part.streamed = True

    def _deliver(self, blob: Blob, part: Part, chunk: bytes) -> None:
        with self._lock:
            if part.streamed:
                while part.chunks and self._held + len(chunk) > WINDOW and not blob.closed:
                    self._work.wait()
                if not blob.closed:
                    self._held += len(chunk)
                    blob.held += len(chunk)
            part.append(chunk)
            blob.readable.notify()


def check_range(answer: Answer, blob: Blob, start: int, registry: str) -> None:
    """Raise if a 206 has other bytes than requested, or belongs to a blob of another size."""
    unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    if not rest:
        raise Transient("the server sent a partial answer without the header Content-Range")
    if unit != "bytes" or span.partition("-")[0] != str(start):
        raise Transient(
            f"the server sent {unit} {rest}, but the requested range begins at byte {start:,}"
        )
    if total.isdecimal() and int(total) != blob.size:
        raise RunnerError(
            f"the blob {blob.digest} on {registry} does not match the manifest",
            f"the registry has {int(total):,} bytes, but the manifest says {blob.size:,}",
            "push the image again, or use another tag",
        )


def check_length(answer: Answer, blob: Blob) -> None:
    """Raise if a 200 announces another length than the blob's."""
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) != blob.size:
        raise Transient(
            f"the server sends {int(length):,} bytes, but the manifest says {blob.size:,}"
        )


def skip(answer: Answer, count: int) -> None:
    """Read and drop the bytes that were received before."""
    while count:
        chunk = answer.read(min(CHUNK, count))
        if not chunk:
            raise Transient("the connection ended early")
        count -= len(chunk)


class Part:
    """A piece of a blob, `start` to `end`, that one thread fetches."""

    __slots__ = ("chunks", "end", "got", "start", "streamed", "taken")

    def __init__(self, start: int, end: int, *, streamed: bool = False) -> None:
        self.start = start
        self.end = end
        self.streamed = streamed
        """too long for the memory: its bytes count as they arrive"""
        self.got = 0
        self.taken = 0
        self.chunks: deque[memoryview] = deque()

    @property
    def full(self) -> bool:
        """Whether all its bytes have arrived."""
        return self.got == self.end - self.start

    @property
    def spent(self) -> bool:
        """Whether all its bytes have been read."""
        return self.taken == self.end - self.start

    def append(self, chunk: bytes) -> None:
        """Add received bytes."""
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
        """bytes of memory that its parts use or will use"""
        self.opened = False
        self.closed = False
        self.error: BaseException | None = None

    def claim(self, length: int, *, streamed: bool = False) -> Part:
        """The next part, for the caller to fill."""
        part = Part(self.claimed, self.claimed + length, streamed=streamed)
        self.claimed = part.end
        self.parts.append(part)
        return part

    def fail(self, error: BaseException) -> None:
        """The reader will get this error."""
        self.error = self.error or error
        self.readable.notify_all()

    def close(self) -> None:
        """Drop the received bytes; wake a reader that waits in another thread."""
        self.closed = True
        self.parts.clear()
        self.readable.notify_all()


class BlobReader:
    """The Reader of an open blob."""

    def __init__(
        self, blob: Blob, used: Callable[[Blob, Part, int], None], release: Callable[[Blob], None]
    ) -> None:
        self._blob = blob
        self._used = used
        self._release = release

    def abandon(self) -> None:
        """Stop fetching; a read that waits in another thread ends at once with ValueError, as of a closed file."""
        self._release(self._blob)

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer only at the end. Raises RunnerError if the blob cannot be fetched."""
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
        """Wait for the next bytes."""
        blob = self._blob
        while not (blob.parts and blob.parts[0].chunks):
            if blob.closed:
                raise ValueError("read of a closed blob")
            if blob.error:
                raise blob.error
            blob.readable.wait()
        if blob.closed:
            raise ValueError("read of a closed blob")
