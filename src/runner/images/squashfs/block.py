"""Block: bytes on their way into a squashfs, and what they keep in memory meanwhile."""

from __future__ import annotations

Block = bytes | memoryview


class Memory:
    """Counts what blocks keep in memory: a view keeps all that it is a view of, counted once for views in a row."""

    __slots__ = ("_source",)

    def __init__(self) -> None:
        self._source: object = None  # of the last block, where that was a view

    def more(self, block: Block) -> int:
        """Bytes that stay for this block and did not for the one before."""
        if not isinstance(block, memoryview):
            return len(block)
        if block.obj is self._source:
            return 0
        self._source = block.obj
        return memoryview(block.obj).nbytes
