"""Images straight from a registry: no engine, nothing written to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage, Reader
from runner.images.reference import Reference
from runner.images.sources.manifest import INDEX_TYPES, MANIFEST_BYTES, MANIFEST_TYPES, Descriptor, read_image
from runner.images.sources.registry.credentials import find_login
from runner.images.sources.registry.repository import Repository
from runner.images.sources.registry.transfer import Downloads
from runner.images.sources.registry.web import Web


@contextmanager
def open_registry_image(reference: Reference, web: Web, architecture: str) -> Iterator[LayeredImage]:
    """The image in its registry, its layers readable inside `with`; on leaving, every thread and connection ends."""
    try:
        search = find_login(reference.registry, reference.repository, reference.user, web.environ)
        repository = Repository(reference, web, search)
        downloads = Downloads(repository.blob, web, registry=reference.registry, connections=web.connections)
        try:
            yield read(reference, repository, downloads, architecture=architecture)
        finally:
            downloads.close()
    finally:
        web.close()


def read(name: Reference, repository: Repository, downloads: Downloads, *, architecture: str) -> LayeredImage:
    """The image of `name`: its manifest found by tag or digest, its layers opened through `downloads`."""
    document = repository.manifest(name.version, (*INDEX_TYPES, *MANIFEST_TYPES), MANIFEST_BYTES)
    if document.media_type.startswith("application/vnd.docker.distribution.manifest.v1+"):
        raise RunnerError(
            f"cannot read {name}",
            "the registry has it only as `schema 1`, an obsolete format without a configuration",
            "convert the image: skopeo copy --format v2s2 docker://... docker://...",
        )
    blobs = RegistryBlobs(repository, downloads)
    announced = document.digest if document.digest.startswith("sha256:") else ""
    image = read_image(document.body, name.digest or announced, blobs, architecture=architecture, reference=str(name))
    return replace(image, expect=lambda layers: downloads.expect([(one.digest, one.size_bytes) for one in layers]))


class RegistryBlobs:
    """The blobs of an image in a registry, for read_image."""

    def __init__(self, repository: Repository, downloads: Downloads) -> None:
        self._repository = repository
        self._downloads = downloads

    def read(self, descriptor: Descriptor, limit: int) -> bytes:
        """A manifest of an index, or a configuration, which registries keep among the blobs."""
        documents = (*INDEX_TYPES, *MANIFEST_TYPES)
        if descriptor.media_type and descriptor.media_type not in documents:
            return self._repository.config(descriptor.digest, limit)
        accept = (descriptor.media_type,) if descriptor.media_type else documents
        return self._repository.manifest(descriptor.digest, accept, limit).body

    def opener(self, descriptor: Descriptor) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens a layer's blob."""
        return lambda: self._downloads.open(descriptor.digest, descriptor.size_bytes)
