"""An image as its layers, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Layer:
    """One layer's blob: what is known of it, and how it is opened."""

    diff_id: str
    """"sha256:HEX" of the uncompressed tar; empty where the source cannot say (an engine's export)"""
    digest: str
    """"sha256:HEX" of the blob as it lies in the source; empty where only diff_id is known"""
    size_bytes: int
    """of the blob as it lies in the source; 0 where unknown"""
    media_type: str
    """as the manifest says; decoding goes by the first bytes, not by this"""
    open: Callable[[], AbstractContextManager[Reader]]
    """the blob's bytes, not decoded; may be called again"""


@dataclass(frozen=True)
class LayeredImage:
    """An image whose layers can be read one by one."""

    reference: str
    """as the user named it"""
    id: str
    """sha256 of the configuration, hex"""
    digest: str
    """"sha256:HEX" of the manifest; empty where unknown"""
    architecture: str
    """in OCI's words: amd64, arm64"""
    config: Mapping[str, Any]
    """the runtime part of the configuration: Env, Entrypoint, Cmd, WorkingDir, Labels, Volumes; {} where null"""
    layers: tuple[Layer, ...]
    """the lowest first, as in the manifest"""
    estimate_bytes: int = 0
    """about what the layers have, where they do not know their sizes themselves"""
    expect: Callable[[Sequence[Layer]], None] = lambda layers: None
    """fetch these layers ahead, in the order in which they will be opened; a help, never a duty"""

    @property
    def size_bytes(self) -> int:
        """What is read from the source when every layer is: the total of a progress bar; 0 where unknown."""
        sizes = [layer.size_bytes for layer in self.layers]
        return sum(sizes) if all(sizes) else self.estimate_bytes


class Reader(Protocol):
    """A source of bytes: as many as asked for, fewer only at its end; all that is left for -1."""

    def read(self, size: int = -1, /) -> bytes: ...


def view(reader: Reader, size: int) -> bytes | memoryview:
    """As `read`; a reader that has a `view` of its own copies nothing where it has the bytes in one piece."""
    direct = getattr(reader, "view", None)
    data: bytes | memoryview = direct(size) if direct is not None else reader.read(size)
    return data
