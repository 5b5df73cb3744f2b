"""Images made by hand: layers member by member, written as an OCI layout."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MTIME = 1_600_000_000
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
Member = tuple[tarfile.TarInfo, bytes]


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


def whiteout(name: str) -> Member:
    """What deletes `name` of the layers below."""
    above, slash, last = name.rpartition("/")
    return file(f"{above}{slash}.wh.{last}", b"")


def opaque(name: str) -> Member:
    """What empties the folder `name` of the layers below."""
    return file(f"{name}/.wh..wh..opq", b"")


def tar(members: Sequence[Member], format: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer's tar."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format, errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def layout(
    target: Path,
    tars: Sequence[bytes],
    runtime: Mapping[str, Any] | None = None,
    diff_ids: Sequence[str] | None = None,
) -> Path:
    """Write an OCI layout with one image, tag `latest`, of these layers, bottom first, as gzip.

    `diff_ids` are what the configuration claims instead of the truth.
    """
    blobs = target / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(runtime or {}),
        "rootfs": {
            "type": "layers",
            "diff_ids": list(diff_ids or (f"sha256:{hashlib.sha256(data).hexdigest()}" for data in tars)),
        },
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": put(json.dumps(config).encode(), CONFIG),
        "layers": [put(gzip.compress(data, 1, mtime=0), LAYER) for data in tars],
    }
    named = put(json.dumps(manifest).encode(), MANIFEST)
    named["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    return target
