"""What bytes are read from."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """A source of bytes: as many as asked for, fewer only at its end; all that is left for -1."""

    def read(self, size: int = -1, /) -> bytes: ...


def read_into(reader: Reader, room: memoryview) -> int:
    """Fill `room`, and say how many bytes there were; a reader that has `readinto` copies them once only."""
    direct = getattr(reader, "readinto", None)
    if direct is not None:
        count: int = direct(room)
        return count
    data = reader.read(len(room))
    room[: len(data)] = data
    return len(data)
