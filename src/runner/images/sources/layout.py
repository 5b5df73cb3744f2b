"""Images in an OCI layout, which is a folder or (with archive.py) a tar file.

Source: image-spec 1.1, image-layout.md. A layout without the file `oci-layout` is accepted, but a newer version is not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage, Reader
from runner.images.sources.manifest import (
    MANIFEST_BYTES,
    Descriptor,
    choose,
    damaged,
    descriptors,
    is_index,
    may_be_image,
    parse_object,
    read_image,
)
from runner.images.sources.section import Section, open_regular, unreadable


class Files(Protocol):
    """The files of a folder or archive, by relative name."""

    def has(self, name: str) -> bool:
        """Whether the file exists."""

    def size(self, name: str) -> int:
        """The size of a file in bytes. Raises RunnerError if it is missing or not a regular file."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """The content of a file."""


class Folder:
    """The files of a folder. Links to files outside the folder are rejected."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def has(self, name: str) -> bool:
        return os.path.exists(self.root / name)  # noqa: PTH110  Path's raises where the folder may not be read

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable(str(self.root / name), error) from error
        if not stat.S_ISREG(found.st_mode):
            raise damaged(str(self.root / name), "it is not a regular file")
        return found.st_size

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        what = str(self.root / name)
        with open_regular(self._path(name), what) as descriptor:
            yield Section(descriptor, 0, os.fstat(descriptor).st_size, what)

    def _path(self, name: str) -> Path:
        try:
            path = (self.root / name).resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise unreadable(str(self.root / name), OSError(errno.ELOOP, str(error))) from error
        if not path.is_relative_to(self.root):
            raise RunnerError(
                f"cannot read {self.root / name}",
                f"it is a link to {path}, outside the layout",
                f"import a copy that has files instead of links: cp -rL {self.root} COPY",
            )
        return path


def read_small(files: Files, name: str, limit: int, what: str) -> bytes:
    """Read a small file as a whole. Raises RunnerError if it is larger than `limit`."""
    size = files.size(name)
    if size > limit:
        raise damaged(what, f"{name} has {size} bytes, more than {limit}")
    with files.open(name) as reader:
        return reader.read()


def read_layout(files: Files, tag: str, *, architecture: str, reference: str) -> LayeredImage:
    """The image of a layout, by tag, or the only one. Otherwise, raises a RunnerError that lists the tags."""
    if not files.has("index.json"):
        raise damaged(reference, "it has no index.json: it is not an OCI layout")
    if files.has("oci-layout"):
        head = parse_object(read_small(files, "oci-layout", MANIFEST_BYTES, reference), f"oci-layout of {reference}")
        version = head.text("imageLayoutVersion")
        if not version.startswith("1."):
            raise damaged(reference, f"its layout has version {version!r}; 1.x is supported")
    what = f"index.json of {reference}"
    fields = parse_object(read_small(files, "index.json", MANIFEST_BYTES, reference), what)
    if not is_index(fields):
        raise damaged(what, "it lists no manifests")
    entries = [entry for entry in descriptors(fields, "manifests") if may_be_image(entry)]
    chosen = _choose_tag(entries, tag, architecture, reference)
    blobs = LayoutBlobs(files, reference)
    data = blobs.read(chosen, MANIFEST_BYTES)
    return read_image(data, chosen.digest, blobs, architecture=architecture, reference=reference)


def _choose_tag(entries: Sequence[Descriptor], tag: str, architecture: str, reference: str) -> Descriptor:
    names = sorted({name for entry in entries for name in entry.names[:1]})
    if tag:
        named = [entry for entry in entries if any(is_called(name, tag) for name in entry.names)]
        if not named:
            raise RunnerError(
                f"{reference}: no image has the tag {tag!r}",
                f"its tags are {', '.join(names[:40])}" if names else "none of its images has a tag",
                "choose one of its tags; if the layout contains only one image, leave out the tag",
            )
        entries = named
    elif len(names) > 1:
        raise RunnerError(
            f"{reference} contains several images",
            f"their tags are {', '.join(names[:40])}",
            "add :TAG to choose one of them",
        )
    if not entries:
        raise damaged(reference, "its index.json lists no image")
    if len({entry.digest for entry in entries}) == 1:
        return entries[0]
    return choose(entries, architecture, reference)


def is_called(name: str, tag: str) -> bool:
    """Whether an image has the tag. podman writes a whole reference; skopeo and the specification only a tag."""
    return tag in (name, name.rpartition(":")[2])


class LayoutBlobs:
    """The blobs of a layout."""

    def __init__(self, files: Files, what: str) -> None:
        self.files = files
        self.what = what

    def read(self, descriptor: Descriptor, limit: int) -> bytes:
        return read_small(self.files, _blob(descriptor), limit, self.what)

    def opener(self, descriptor: Descriptor) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens the blob. Checks at once that the blob exists and has the expected size."""
        name = _blob(descriptor)
        size = self.files.size(name)
        if size != descriptor.size_bytes:
            raise damaged(self.what, f"{name} has {size} bytes, but its descriptor says {descriptor.size_bytes}")
        return lambda: self.files.open(name)


def _blob(descriptor: Descriptor) -> str:
    return "blobs/" + descriptor.digest.replace(":", "/", 1)
