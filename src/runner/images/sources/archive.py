"""Images in a tar file: an OCI layout (oci-archive), or the output of `docker save` (docker-archive).

The positions of the members are found once; blobs are then read directly from the file. Docker 25 and newer write a
file that is both: `docker-archive:` reads its manifest.json, `oci-archive:` its index.json.
Source: image-spec 1.1, image-layout.md; Moby's image specification 1.2, "Combined Image JSON + Filesystem Changeset".
"""

import io
import os
import posixpath
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from runner.errors import RunnerError
from runner.images.layers.layer import Layer, LayeredImage, Reader
from runner.images.sources.layout import is_called, open_regular, opened, read_small, unreadable
from runner.images.sources.manifest import (
    CONFIG_BYTES,
    MANIFEST_BYTES,
    Fields,
    damaged,
    parse_objects,
    read_config,
    refuse_layers,
)

_MEMBERS = 100_000
_HEADER_BYTES = 1 << 20
_LINKS = 8
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"\xfd7": "xz", b"BZ": "bzip2"}


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar, or (`link`) another name for one."""

    start: int
    size: int
    link: str = ""


class Archive:
    """The files of a tar. Links are followed only within the tar."""

    def __init__(self, descriptor: int, members: dict[str, Member], what: str) -> None:
        self.descriptor = descriptor
        self.members = members
        self.what = what

    def has(self, name: str) -> bool:
        return posixpath.normpath(name) in self.members

    def size(self, name: str) -> int:
        return self._member(name).size

    def open(self, name: str) -> AbstractContextManager[Reader]:
        member = self._member(name)
        return opened(self.descriptor, member.start, member.size, f"{name} of {self.what}")

    def _member(self, name: str) -> Member:
        name = posixpath.normpath(name)
        for _ in range(_LINKS):
            member = self.members.get(name)
            if member is None:
                raise damaged(self.what, f"the archive has no file {name!r}")
            if not member.link:
                return member
            name = member.link
        raise damaged(
            self.what, f"{name!r} is at the end of too many links, or of a circle of links"
        )


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """The files of a plain tar. Raises RunnerError for a damaged or compressed one."""
    what = str(path)
    with open_regular(path, what) as descriptor:
        if kind := _COMPRESSED.get(os.pread(descriptor, 2, 0)):
            raise RunnerError(
                f"cannot read {what}",
                f"the whole archive is compressed with {kind}, so runner cannot read single layers",
                f"{kind} -dc {what} >NEW.tar   (its layers may stay compressed)",
            )
        yield Archive(descriptor, _index(descriptor, what), what)


class _Bounded(io.FileIO):
    """A file that limits the size of each read, because tarfile reads long headers as a whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size) or b""


def _index(descriptor: int, what: str) -> dict[str, Member]:
    """Name -> member, for all regular files and links. Of several with one name, the last applies, as in unpacking."""
    found: dict[str, Member] = {}
    try:
        with (
            _Bounded(descriptor, closefd=False) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            count = 0
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                count += 1
                if count > _MEMBERS:
                    raise damaged(what, f"it has more than {_MEMBERS} files")
                name = posixpath.normpath(member.name)
                if member.isreg() and not member.issparse():
                    found[name] = Member(member.offset_data, member.size)
                elif member.islnk() or member.issym():
                    start = posixpath.dirname(name) if member.issym() else ""
                    found[name] = Member(
                        0, 0, posixpath.normpath(posixpath.join(start, member.linkname))
                    )
    except OSError as error:
        raise unreadable(what, error) from error
    except (tarfile.TarError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise damaged(what, f"the tar archive is truncated or damaged: {error}") from error
    return found


def read_docker_archive(
    files: Archive, tag: str, *, architecture: str, reference: str
) -> LayeredImage:
    """The image of a tar that `docker save` or `podman save` wrote. For its layers, only the diff_id is known."""
    if not files.has("manifest.json"):
        other = (
            "; it is an OCI layout, which oci-archive:FILE reads" if files.has("index.json") else ""
        )
        raise damaged(reference, f"it has no manifest.json{other}")
    what = f"manifest.json of {reference}"
    entries = parse_objects(read_small(files, "manifest.json", MANIFEST_BYTES, what), what)
    chosen = _choose(entries, tag, reference)
    layers = chosen.texts("Layers")
    refuse_layers([""] * len(layers), reference)
    data = read_small(files, chosen.text("Config"), CONFIG_BYTES, reference)
    image, diff_ids = read_config(data, "", len(layers), architecture, reference)
    pairs = zip(diff_ids, layers, strict=True)
    found = tuple(
        Layer(diff_id, "", files.size(name), partial(files.open, name)) for diff_id, name in pairs
    )
    return replace(image, layers=found)


def _choose(entries: tuple[Fields, ...], tag: str, reference: str) -> Fields:
    named = [
        entry
        for entry in entries
        if not tag or any(is_called(name, tag) for name in entry.texts("RepoTags"))
    ]
    if len(named) == 1:
        return named[0]
    names = sorted({name for entry in entries for name in entry.texts("RepoTags")})
    known = f"it has: {', '.join(names[:40]) or 'images without names'}"
    if not entries:
        known = "its manifest.json lists no images"
    if not named:
        raise RunnerError(
            f"{reference} does not contain {f'the image {tag!r}' if tag else 'an image'}",
            known,
            "list the files of the archive: tar tf FILE",
        )
    raise RunnerError(
        f"{reference} contains several images",
        known,
        f"copy one image and import the copy: skopeo copy docker-archive:FILE:{(names or ['@0'])[0]} oci:DIR",
    )
