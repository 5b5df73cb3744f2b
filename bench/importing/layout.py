"""An OCI layout from plain tar streams, in Python alone: what the importers under test read."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
RUNTIME = {
    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONPATH=/opt/stack"],
    "Cmd": ["python3"],
    "WorkingDir": "/workspace",
    "Labels": {"org.opencontainers.image.title": "bench"},
}


@dataclass(frozen=True)
class Blob:
    """A gzip layer in a folder of blobs, named by its digest's hex."""

    digest: str
    size: int
    diff_id: str
    plain_size: int

    def path(self, blobs: Path) -> Path:
        """Where it lies."""
        return blobs / self.digest.removeprefix("sha256:")


def compress(stream: BinaryIO, blobs: Path, level: int = 6) -> Blob:
    """Write a tar stream as a gzip blob with pigz; returns what a manifest needs to know of it."""
    blobs.mkdir(parents=True, exist_ok=True)
    partial = blobs / "layer.partial"
    plain, plain_size = hashlib.sha256(), 0
    with (
        partial.open("wb") as target,
        subprocess.Popen(("pigz", f"-{level}", "-n"), stdin=subprocess.PIPE, stdout=target) as pigz,
    ):
        assert pigz.stdin is not None
        while chunk := stream.read(CHUNK):
            plain.update(chunk)
            plain_size += len(chunk)
            pigz.stdin.write(chunk)
        pigz.stdin.close()
    if pigz.returncode != 0:
        raise SystemExit(f"pigz ended with {pigz.returncode}")
    with partial.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    size = partial.stat().st_size
    partial.rename(blobs / digest)
    return Blob(f"sha256:{digest}", size, f"sha256:{plain.hexdigest()}", plain_size)


def write(folder: Path, layers: Sequence[Blob], blobs: Path, runtime: Mapping[str, Any] = RUNTIME) -> Path:
    """Make `folder` an OCI layout with one image, tag `latest`; the layers, bottom first, are links to the blobs."""
    target = folder / "blobs/sha256"
    target.mkdir(parents=True, exist_ok=True)
    for layer in layers:
        name = target / layer.path(blobs).name
        if not name.exists():
            name.hardlink_to(layer.path(blobs))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": runtime,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, **_put(target, config)},
        "layers": [{"mediaType": LAYER, "digest": layer.digest, "size": layer.size} for layer in layers],
    }
    named = {"mediaType": MANIFEST, **_put(target, manifest)}
    named["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    return folder


def layers_of(folder: Path) -> tuple[Path, ...]:
    """The blobs of the layout's one image, bottom first."""
    blobs = folder / "blobs/sha256"
    index = json.loads((folder / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].removeprefix("sha256:")).read_text())
    return tuple(blobs / layer["digest"].removeprefix("sha256:") for layer in manifest["layers"])


def save(blobs: Sequence[Blob], file: Path) -> None:
    """Note blobs, so that they are made once."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(blob) for blob in blobs]))
    partial.rename(file)


def load(file: Path) -> tuple[Blob, ...]:
    """The blobs that `save` noted; none where it did not."""
    return tuple(Blob(**entry) for entry in json.loads(file.read_text())) if file.exists() else ()


def _put(blobs: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}
