"""Images made by hand, layer by layer, and what reading them gives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner.images.layers.layer import Layer, LayeredImage
from runner.images.reference import Source
from runner.images.sources.open import Access, open_image
from runner.machine.report import Quiet
from runner.project import Project

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURE = "amd64"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def to_json(value: object) -> bytes:
    return json.dumps(value).encode()


def make_tar(files: Mapping[str, bytes | str | None], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of files (bytes), symlinks (text) and folders (None)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                tar.addfile(entry)
            else:
                entry.size, entry.mode, entry.uid, entry.gid = len(content), 0o600, 1000, 1000
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def make_config(layers: Sequence[bytes], **more: Any) -> bytes:
    """The configuration of an image with these (plain) layers."""
    rootfs = {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]}
    return to_json({"architecture": ARCHITECTURE, "os": "linux", "rootfs": rootfs, "config": {"Env": ["A=b"]}, **more})


def describe(data: bytes, kind: str, **more: Any) -> dict[str, Any]:
    """The descriptor of a blob."""
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data), **more}


def make_manifest(config: bytes, layers: Sequence[bytes], **more: Any) -> bytes:
    return to_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(config, CONFIG_TYPE),
            "layers": [describe(layer, LAYER_TYPE) for layer in layers],
            **more,
        }
    )


def make_index(*entries: dict[str, Any]) -> bytes:
    return to_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(entries)})


def write_layout(folder: Path, index: bytes, *blobs: bytes) -> Path:
    """An OCI layout with this index.json and these blobs."""
    (folder / "blobs/sha256").mkdir(parents=True)
    (folder / "oci-layout").write_bytes(b'{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_bytes(index)
    for blob in blobs:
        (folder / "blobs/sha256" / digest_of(blob).removeprefix("sha256:")).write_bytes(blob)
    return folder


def write_docker_archive(path: Path, layers: Sequence[bytes], *, compress: bool = False) -> Path:
    """A docker-archive with these (plain) layers, which stand in it gzipped where asked."""
    config = make_config(layers)
    named = {f"{number}.tar": gzip.compress(layer) if compress else layer for number, layer in enumerate(layers)}
    entry = {"Config": "config.json", "RepoTags": ["localhost/handmade:1"], "Layers": list(named)}
    path.write_bytes(make_tar({"config.json": config, **named, "manifest.json": to_json([entry])}))
    return path


def read_layer(layer: Layer) -> bytes:
    """All bytes of a layer's blob."""
    chunks = []
    with layer.open() as stream:
        while chunk := stream.read(1 << 20):
            chunks.append(chunk)
    return b"".join(chunks)


def plain_digests(image: LayeredImage) -> list[str]:
    """The digest of each layer's plain tar, as it is read."""
    found = []
    for layer in image.layers:
        data = read_layer(layer)
        if layer.digest:
            assert digest_of(data) == layer.digest
        assert layer.size_bytes in (len(data), 0)
        found.append(digest_of(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
    return found


def diff_ids(image: LayeredImage) -> list[str]:
    """The digests that the image's configuration says its layers have."""
    return [layer.diff_id for layer in image.layers]


def open_source(
    source: Source,
    environ: Mapping[str, str] = MappingProxyType({}),
    architecture: str = "amd64",
    report: Quiet | None = None,
) -> AbstractContextManager[LayeredImage]:
    """The image of a source, in no project."""
    nowhere = Path("/nowhere")
    return open_image(source, Access(environ, Project(nowhere, nowhere, nowhere), architecture), report or Quiet())
