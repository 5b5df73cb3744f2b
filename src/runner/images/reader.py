"""What bytes are read from."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """A source of bytes: as many as asked for, fewer only at its end; all that is left for -1."""

    def read(self, size: int = -1, /) -> bytes: ...


def view(reader: Reader, size: int) -> bytes | memoryview:
    """As `read`; a reader that has a `view` of its own copies nothing where it has the bytes in one piece."""
    direct = getattr(reader, "view", None)
    data: bytes | memoryview = direct(size) if direct is not None else reader.read(size)
    return data
