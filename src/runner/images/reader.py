"""What bytes are read from."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """A source of bytes: as many as asked for, fewer only at its end; all that is left for -1."""

    def read(self, size: int = -1, /) -> bytes: ...
