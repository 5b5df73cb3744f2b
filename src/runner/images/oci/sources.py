"""From what the user named to an image whose layers can be read: one door for all kinds of sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import RunnerError
from runner.images.oci import archive, layout
from runner.images.oci.layer import LayeredImage
from runner.images.source import Source


@dataclass(frozen=True)
class SourceOptions:
    """What may be chosen about reading."""

    allow_http: bool = False
    """docker: a registry without TLS that is not on this machine"""
    connections: int = 4
    """docker: at a time, to the registry"""
    engine_env: Mapping[str, str] = field(default_factory=dict)
    """podman: what its executable needs in its environment (Engine.env)"""
    target: Path | None = None
    """dockerd: the file that is made, by which left-overs of killed imports are known"""


@contextmanager
def open_image(
    source: Source, *, architecture: str, environ: Mapping[str, str], options: SourceOptions = SourceOptions()
) -> Iterator[LayeredImage]:
    """The image of a source, open for as long as the context lasts; no layer is read before it is opened.

    Raises RunnerError where there is none, where it is damaged or for another architecture.
    """
    path, reference = Path(source.reference), spoken(source)
    if source.scheme == "oci":
        folder = layout.Folder(path)
        yield layout.read_layout(folder, source.tag, architecture=architecture, reference=reference)
    elif source.scheme in ("oci-archive", "docker-archive"):
        read = layout.read_layout if source.scheme == "oci-archive" else archive.read_docker_archive
        with archive.open_archive(path) as files:
            yield read(files, source.tag, architecture=architecture, reference=reference)
    else:
        raise RunnerError(f"cannot read {reference}", "this kind of source is not known", "")


def spoken(source: Source) -> str:
    """The source as the user writes it: `oci:DIR:TAG`, `podman://NAME`."""
    if source.scheme in ("oci", "oci-archive", "docker-archive"):
        return ":".join(part for part in (source.scheme, source.reference, source.tag) if part)
    user = f"{source.user}@" if source.user else ""
    return f"{source.scheme}://{user}{source.reference}" if source.scheme else source.reference
