"""An image as its layers, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from runner.images.oci.reader import Reader


@dataclass(frozen=True)
class Layer:
    """One layer's blob."""

    diff_id: str  # "sha256:HEX" of the uncompressed tar; "" where the source cannot say
    digest: str  # "sha256:HEX" of the blob as it lies in the source; "" where only diff_id is known
    size_bytes: int  # of the blob; 0 where unknown
    media_type: str  # as the manifest says; decoding goes by the first bytes
    open: Callable[[], AbstractContextManager[Reader]]  # the blob's bytes, not decoded


@dataclass(frozen=True)
class LayeredImage:
    """An image whose layers can be read."""

    reference: str
    id: str  # hex of the config's digest
    digest: str  # of the manifest; "" unknown
    architecture: str  # OCI's word
    config: Mapping[str, Any]  # the runtime part (Env, Entrypoint, ...); {} where null
    layers: tuple[Layer, ...]  # bottom first, as in the manifest
