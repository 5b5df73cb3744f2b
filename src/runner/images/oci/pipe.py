"""A bounded queue of bytes between two threads, which either side can end."""

from __future__ import annotations

import threading
from collections import deque


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
