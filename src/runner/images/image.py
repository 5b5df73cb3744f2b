"""An OCI image in an engine's storage, as the engine describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.images.reference import split_tag
from runner.machine import probe


@dataclass(frozen=True)
class Image:
    """An image in the storage of podman or docker."""

    name: str
    """without the tag: `localhost/runner/cpu`"""
    tag: str
    """the tag; for images that runner builds, the content hash (12 hex digits); empty: none"""
    engine: str
    id: str
    """sha256 of the image's configuration, hex"""
    architecture: str
    """as OCI names it: amd64, arm64"""
    size_bytes: int
    config: Mapping[str, Any]
    """the runtime part of the OCI configuration: Env, Entrypoint, Cmd, WorkingDir, Labels, Volumes"""
    digest: str = ""
    """the digest of the manifest, `sha256:…`; empty if the engine does not know it"""
    repo_digests: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """NAME:TAG, or the id of an image without a name."""
        if not self.name:
            return self.id
        return f"{self.name}:{self.tag}" if self.tag else self.name

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


def from_inspect(data: Mapping[str, Any], engine: str, reference: str = "") -> Image:
    """The image that `podman image inspect` or docker's `GET /images/NAME/json` describes."""
    name, tag = split_tag(reference) if reference else ("", "")
    return Image(
        name=name,
        tag=tag,
        engine=engine,
        id=str(data["Id"]).removeprefix("sha256:"),
        architecture=probe.oci_architecture(str(data.get("Architecture") or "")),
        size_bytes=int(data.get("Size") or 0),
        config=data.get("Config") or {},
        digest=str(data.get("Digest") or ""),
        repo_digests=tuple(data.get("RepoDigests") or ()),
    )
