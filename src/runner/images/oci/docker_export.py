"""An image as ONE layer: the file tree of a container that is created for it and never started.

What docker's socket can give without a copy on the disk, and podman where its storage cannot be read by layers. The
stream is no layer of the image: it has no digest that could be known before, and no whiteouts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

from runner.errors import RunnerError
from runner.images.image import Image
from runner.images.oci.layer import Layer, LayeredImage
from runner.images.oci.manifest import refuse_architecture
from runner.images.oci.store import Store
from runner.images.reader import Reader


def unnamed() -> tuple[str, Mapping[str, str]]:
    """A name and labels for a container whose left-over nobody looks for."""
    return f"runner-import-{os.getpid()}-{secrets.token_hex(4)}", {}


def find(store: Store, name: str, engine: str) -> Image:
    """The image of a name in an engine's storage. Raises RunnerError where it has none; nothing is pulled."""
    image = store.find(name)
    if image is None:
        raise RunnerError(
            f"{engine} has no image {name!r}",
            "its storage was asked, nothing was pulled",
            f"{engine} images   (lists them); docker://REGISTRY#IMAGE:TAG fetches one",
        )
    return image


def exported(
    image: Image,
    store: Store,
    name_container: Callable[[], tuple[str, Mapping[str, str]]],
    *,
    architecture: str,
    reference: str,
) -> LayeredImage:
    """The image as one layer. Raises RunnerError for one of another architecture."""
    refuse_architecture(image.architecture, architecture, reference)

    def open_tree() -> AbstractContextManager[Reader]:
        return _tree(image, store, *name_container())

    return LayeredImage(
        reference=reference,
        id=image.id,
        digest=image.digest,
        architecture=image.architecture or architecture,
        config=image.config,
        layers=(Layer("", "", 0, "application/vnd.oci.image.layer.v1.tar", open_tree),),
        estimate_bytes=image.size_bytes,
    )


@contextmanager
def _tree(image: Image, store: Store, name: str, labels: Mapping[str, str]) -> Iterator[Reader]:
    """The tree of a container that is there for as long as this lasts."""
    store.remove(name)  # the left-over of an import that was killed
    container = store.create(image, name, labels)
    try:
        with store.export(container) as stream:
            yield stream
    finally:
        with suppress(RunnerError):  # the next import removes it
            store.remove(container)
