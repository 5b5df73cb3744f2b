"""Images made by hand: tars member by member, what stands around them, and what reading them gives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner.images.layers.layer import Layer, LayeredImage
from runner.images.reference import Source
from runner.images.sources.open import Access, open_image
from runner.machine.report import Quiet
from runner.project import Project

MTIME = 1_600_000_000
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
NAME = "org.opencontainers.image.ref.name"
ARCHITECTURE = "amd64"
Member = tuple[tarfile.TarInfo, bytes]
Operation = tuple[str, str, str, int]  # kind, path, content or target, mode and mtime


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: Any) -> Member:
    """One tar member; the fields are those of tarfile.TarInfo."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime = kind, len(data), MTIME
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def file(name: str, data: bytes = b"text\n", **fields: Any) -> Member:
    """A regular file."""
    return member(name, data=data, **fields)


def folder(name: str, **fields: Any) -> Member:
    """A folder."""
    return member(name, tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str, **fields: Any) -> Member:
    """A symlink."""
    return member(name, tarfile.SYMTYPE, linkname=target, **fields)


def hard_link(name: str, target: str, **fields: Any) -> Member:
    """A further name of a file."""
    return member(name, tarfile.LNKTYPE, linkname=target, **fields)


def whiteout(name: str, **fields: Any) -> Member:
    """What deletes `name` of the layers below."""
    above, slash, last = name.rpartition("/")
    return file(f"{above}{slash}.wh.{last}", b"", **fields)


def opaque(name: str, **fields: Any) -> Member:
    """What empties the folder `name` of the layers below."""
    return file(f"{name}/.wh..wh..opq".lstrip("/"), b"", **fields)


def tar(members: Sequence[Member], format: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer's tar."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format, errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def make_tar(files: Mapping[str, bytes | str | None], format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of files (bytes), symlinks (text) and folders (None)."""

    def made(name: str, content: bytes | str | None) -> Member:
        if content is None:
            return folder(name)
        return (
            symlink(name, content) if isinstance(content, str) else file(name, content, mode=0o600, uid=1000, gid=1000)
        )

    return tar([made(name, content) for name, content in files.items()], format)


def layer(operations: Iterable[Operation | tuple[str, str] | tuple[str, str, str]]) -> bytes:
    """The tar of operations: (kind, path, content or target, mode and mtime).

    Kinds: d, f, l (symlink), h (hard link), p (fifo), w (whiteout of the path), o (opaque marker in the path).
    """

    def made(kind: str, path: str, text: str = "", number: int = 0) -> Member:
        fields = {"mode": (number & 0o777) or 0o644, "mtime": number}
        match kind:
            case "d":
                return folder(path, **fields)
            case "l":
                return symlink(path, text, **fields)
            case "h":
                return hard_link(path, text, **fields)
            case "p":
                return member(path, tarfile.FIFOTYPE, **fields)
            case "w":
                return whiteout(path, **fields)
            case "o":
                return opaque(path, **fields)
        return file(path, text.encode(), **fields)

    return tar([made(*operation) for operation in operations])


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def to_json(value: object) -> bytes:
    return json.dumps(value).encode()


def make_config(layers: Sequence[bytes], **more: Any) -> bytes:
    """The configuration of an image with these (plain) layers."""
    rootfs = {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]}
    return to_json({"architecture": ARCHITECTURE, "os": "linux", "rootfs": rootfs, "config": {"Env": ["A=b"]}, **more})


def describe(data: bytes, kind: str, **more: Any) -> dict[str, Any]:
    """The descriptor of a blob."""
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data), **more}


def make_manifest(config: bytes, layers: Sequence[bytes], **more: Any) -> bytes:
    """The manifest of these layers, plain or gzipped."""
    kinds = [f"{LAYER_TYPE}+gzip" if layer[:2] == b"\x1f\x8b" else LAYER_TYPE for layer in layers]
    return to_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(config, CONFIG_TYPE),
            "layers": [describe(layer, kind) for layer, kind in zip(layers, kinds, strict=True)],
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


def layout(
    target: Path,
    tars: Sequence[bytes],
    runtime: Mapping[str, Any] | None = None,
    diff_ids: Sequence[str] = (),
) -> Path:
    """Write an OCI layout with one image, tag `latest`, of these layers, bottom first, as gzip.

    `diff_ids` are what the configuration claims instead of the truth.
    """
    claimed = {"rootfs": {"type": "layers", "diff_ids": list(diff_ids)}} if diff_ids else {}
    config = make_config(tars, config=dict(runtime or {}), **claimed)
    packed = [gzip.compress(data, 1, mtime=0) for data in tars]
    manifest = make_manifest(config, packed)
    index = make_index(describe(manifest, MANIFEST_TYPE, annotations={NAME: "latest"}))
    return write_layout(target, index, manifest, config, *packed)


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


# a small image for the readers of layouts and archives
LAYERS = [make_tar({"a": b"1"}), make_tar({"b": b"2"})]
CONFIG = make_config(LAYERS)
MANIFEST = make_manifest(CONFIG, LAYERS)
