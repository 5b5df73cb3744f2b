"""Images in an OCI layout, which is a folder or (with archive.py) a tar file.

Source: image-spec 1.1, image-layout.md. A layout without the file `oci-layout` is accepted, but a newer version is not.
"""

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


class Section:
    """`size` bytes of a file from `start` on. It keeps its own position: several can read one file at the same time."""

    def __init__(self, descriptor: int, start: int, size: int, what: str) -> None:
        self.descriptor = descriptor
        self.position = start
        self.end = start + size
        self.what = what

    def read(self, size: int = -1, /) -> bytes:
        left = self.end - self.position
        wanted = left if size < 0 else min(size, left)
        chunks = []
        while wanted:
            # the kernel gives at most 2 GiB at once
            try:
                chunk = os.pread(self.descriptor, min(wanted, 1 << 30), self.position)
            except OSError as error:  # a stale file handle, a broken disk
                raise unreadable(self.what, error) from error
            if not chunk:
                raise RunnerError(
                    f"cannot read {self.what}",
                    "the file is truncated",
                    "create or copy the file again",
                )
            self.position += len(chunk)
            wanted -= len(chunk)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@contextmanager
def opened(descriptor: int, start: int, size: int, what: str) -> Iterator[Reader]:
    """A reader of a part of an open file, which may be closed meanwhile."""
    own = os.dup(descriptor)
    try:
        yield Section(own, start, size, what)
    finally:
        os.close(own)


@contextmanager
def open_regular(path: Path, what: str) -> Iterator[int]:
    """A descriptor of a regular file; a FIFO or device, which may block, is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise unreadable(what, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RunnerError(
                f"cannot read {what}", "it is not a regular file", "give the path of a regular file"
            )
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield descriptor
    finally:
        os.close(descriptor)


def unreadable(what: str, error: OSError) -> RunnerError:
    """The error for a file that cannot be opened."""
    return RunnerError(
        f"cannot read {what}", error.strerror or str(error), "check the file's path and mode"
    )


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
        head = parse_object(
            read_small(files, "oci-layout", MANIFEST_BYTES, reference), f"oci-layout of {reference}"
        )
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


def _choose_tag(
    entries: Sequence[Descriptor], tag: str, architecture: str, reference: str
) -> Descriptor:
    names = sorted({name for entry in entries for name in entry.names[:1]})
    if tag:
        named = [entry for entry in entries if any(is_called(name, tag) for name in entry.names)]
        if not named:
            raise RunnerError(
                f"{reference}: no image has the tag {tag!r}",
                f"its tags are {', '.join(names[:40])}"
                if names
                else "none of its images has a tag",
                "choose one of its tags; if the layout contains only one image, leave out the tag"
                if names
                else "leave out the tag; this works if the layout contains only one image",
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
            raise damaged(
                self.what,
                f"{name} has {size} bytes, but its descriptor says {descriptor.size_bytes}",
            )
        return lambda: self.files.open(name)


def _blob(descriptor: Descriptor) -> str:
    return "blobs/" + descriptor.digest.replace(":", "/", 1)
