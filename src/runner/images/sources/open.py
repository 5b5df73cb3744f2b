"""From what the user named to an image whose layers can be read: one door for all kinds of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.errors import RunnerError
from runner.images.engine import docker_environment
from runner.images.image import Image
from runner.images.layers.layer import LayeredImage
from runner.images.source import Source
from runner.images.sources import archive, layout
from runner.images.sources.engine_storage import PodmanStore, Store, connect_docker, exported, find, unnamed
from runner.images.sources.podman_storage import NotRebuildable, open_stored


@dataclass(frozen=True)
class SourceOptions:
    """What may be chosen about reading."""

    allow_http: int = 0
    """docker: 1: a registry on another machine may be read without TLS; 2: and be sent a login so"""
    connections: int = 8
    """docker: at a time, to the registry"""
    engine_env: Mapping[str, str] = field(default_factory=dict)
    """podman: what its executable needs in its environment (Engine.env)"""
    name_container: Callable[[], tuple[str, Mapping[str, str]]] = unnamed
    """dockerd, and podman where layers cannot be had: name and labels of the container that is created when the
    layer is opened, by which the left-over of a killed import is known; asked then, not before"""


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
    elif source.scheme == "docker":
        from runner.images.sources.registry.image import open_registry_image

        with open_registry_image(
            source.reference,
            source.user,
            architecture=architecture,
            environ=environ,
            allow_http=options.allow_http,
            connections=options.connections,
        ) as image:
            yield image
    elif source.scheme in ("podman", "dockerd"):
        store = PodmanStore(options.engine_env) if source.scheme == "podman" else connect_docker(
            {**environ, **docker_environment(environ)}
        )  # fmt: skip
        found = find(store, source.reference, source.scheme.removesuffix("d"))
        with open_found(found, store, architecture=architecture, reference=reference, options=options) as image:
            yield image
    else:
        raise RunnerError(f"cannot read {reference}", "this kind of source is not known here", "runner import --help")


@contextmanager
def open_found(
    found: Image, store: Store, *, architecture: str, reference: str, options: SourceOptions
) -> Iterator[LayeredImage]:
    """An image that was found in an engine's storage: podman's layer by layer, docker's, and podman's where that cannot
    be had, all in one as the engine exports it."""
    whole = exported(found, store, options.name_container, architecture=architecture, reference=reference)
    if found.engine != "podman":
        yield whole
        return
    with ExitStack() as stack:
        try:
            opened = open_stored(found, options.engine_env, architecture=architecture, reference=reference)
            image = stack.enter_context(opened)
        except NotRebuildable as reason:
            image = replace(whole, notes=(f"{reference} is read as one layer, by podman export: {reason}",))
        yield image


def spoken(source: Source) -> str:
    """The source as the user writes it: `oci:DIR:TAG`, `podman://NAME`."""
    if source.scheme in ("oci", "oci-archive", "docker-archive"):
        return ":".join(part for part in (source.scheme, source.reference, source.tag) if part)
    user = f"{source.user}@" if source.user else ""
    return f"{source.scheme}://{user}{source.reference}" if source.scheme else source.reference
