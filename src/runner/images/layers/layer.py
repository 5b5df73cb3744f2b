"""An image as its layers, independent of where it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Layer:
    """One layer: its digests, its size, and how to open its blob."""

    diff_id: str
    """"sha256:HEX" of the uncompressed tar; empty if the source does not record it (an engine's export)"""
    digest: str
    """"sha256:HEX" of the blob as stored; empty if only diff_id is known"""
    size_bytes: int
    """of the blob as stored; 0 if unknown"""
    open: Callable[[], AbstractContextManager[Reader]]
    """the blob's bytes, not decoded; can be called several times"""


@dataclass(frozen=True)
class LayeredImage:
    """An image whose layers can be read one by one."""

    reference: str
    """as the user named it"""
    id: str
    """sha256 of the configuration, hex"""
    digest: str
    """"sha256:HEX" of the manifest; empty if unknown"""
    architecture: str
    """as OCI names it: amd64, arm64"""
    config: Mapping[str, Any]
    """the runtime part of the configuration: Env, Entrypoint, Cmd, WorkingDir, Labels, Volumes; {} if null"""
    layers: tuple[Layer, ...]
    """the lowest first, as in the manifest"""
    estimate_bytes: int = 0
    """approximate total, for layers of unknown size"""
    expect: Callable[[Sequence[Layer]], None] = lambda layers: None
    """a hint to fetch these layers ahead, in the order in which they will be opened"""

    @property
    def size_bytes(self) -> int:
        """Bytes to read if every layer is read: the total of a progress bar; 0 if unknown."""
        sizes = [layer.size_bytes for layer in self.layers]
        return sum(sizes) if all(sizes) else self.estimate_bytes


class Reader(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer only at the end; -1: all that remain."""


class ViewReader:
    """A reader that can hand out its bytes without a copy. A base class: isinstance() is slow for a Protocol."""

    __slots__ = ()

    def view(self, size: int, /) -> bytes | memoryview:
        """As `read`, without a copy if the bytes are in one piece."""
        raise NotImplementedError


@runtime_checkable
class RemoteReader(Reader, Protocol):
    """A reader that waits for a server."""

    def abandon(self) -> None:
        """End a `read` that is waiting in another thread."""


def view(reader: Reader, size: int) -> bytes | memoryview:
    """As `read`, without a copy if the reader can do that."""
    return reader.view(size) if isinstance(reader, ViewReader) else reader.read(size)
