"""An image straight from the storage of podman: layer by layer, nothing exported, mounted or written to the disk.

The layout of the storage, for the drivers `overlay` (fuse-overlayfs too) and `vfs`, as podman 4.3.1 leaves it:
    DRIVER-images/images.json      [{id, layer (the uppermost), ...}]
    DRIVER-images/ID/manifest      the manifest; its config is ID/=BASE64 of "sha256:HEX"
    DRIVER-layers/layers.json      [{id, parent, "diff-digest" (of the plain tar), "diff-size" (its bytes), ...}]
    DRIVER-layers/ID.tar-split.gz  what unpacking would lose of the tar, see tar_split.py
    overlay/ID/diff, vfs/dir/ID    the layer's files (vfs: those below it too)
Images of a container that is kept while it runs may be in volatile-layers.json. Read-only stores
(additionalimagestores) have the same layout; a layer's parent may be in one.
Source: containers/storage 1.43, images.go, layers.go, store.go, drivers/overlay/overlay.go, drivers/vfs/driver.go.
"""

import base64
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from runner.errors import RunnerError
from runner.images.layers.layer import Layer, LayeredImage, Reader
from runner.images.sources import tar_split
from runner.images.sources.engine_storage import Image
from runner.images.sources.manifest import (
    CONFIG_BYTES,
    LAYERS,
    MANIFEST_BYTES,
    Fields,
    descriptor,
    is_index,
    parse_object,
    parse_objects,
    read_config,
    verified,
)
from runner.machine import probe, process

_LIST_BYTES = 1 << 30
_FOLDERS = {"overlay": "overlay/{}/diff", "vfs": "vfs/dir/{}"}


class NotRebuildable(Exception):
    """The layers of an image cannot be read one by one: why, in a few words."""


@dataclass(frozen=True)
class StoredLayer:
    """A layer in the storage."""

    id: str
    parent: str
    diff_id: str
    """of the plain tar; empty where the storage has never seen the whole of it"""
    size_bytes: int
    split: Path
    root: Path


@contextmanager
def open_stored(
    image: Image, env: Mapping[str, str], *, architecture: str, reference: str
) -> Iterator[LayeredImage]:
    """The image with its layers from podman's storage. Raises NotRebuildable if they cannot be read one by one."""
    driver, roots = _storage(env)
    tops = ((root, read_top(root, driver, image.id)) for root in roots)
    root, top = next((found for found in tops if found[1] is not None), (Path(), None))
    if top is None:
        raise NotRebuildable("podman's storage folders do not list the image")
    known: dict[str, StoredLayer] = {}
    for folder in reversed(roots):
        # the engine's own storage takes precedence over read-only stores
        known |= {layer.id: layer for layer in read_layers(folder, driver)}
    chain = chain_of(top, known)
    folder = root / f"{driver}-images" / image.id
    described, diff_ids = read_described(folder, len(chain), architecture, reference)
    check(chain, diff_ids)
    with rebuilder(env, reference, rootless=not probe.is_root()) as helper:
        openers = (partial(helper.layer, layer.split, layer.root) for layer in chain)
        found = zip(diff_ids, chain, openers, strict=True)
        layers = tuple(
            Layer(diff_id, "", layer.size_bytes, opener) for diff_id, layer, opener in found
        )
        yield replace(described, layers=layers)


def read_described(
    folder: Path, layers: int, architecture: str, reference: str
) -> tuple[LayeredImage, tuple[str, ...]]:
    """An image without its layers, and their diff_ids, from its folder. Raises NotRebuildable if they are missing."""
    data = _read(folder / "manifest", MANIFEST_BYTES)
    manifest = parse_object(data, f"the manifest of {reference}")
    if is_index(manifest):
        raise NotRebuildable("podman's storage has an index instead of a manifest")
    config = descriptor(manifest.object("config"))
    name = "=" + base64.b64encode(config.digest.encode()).decode()
    settings = _read(folder / name, CONFIG_BYTES)
    image, diff_ids = read_config(settings, config.digest, layers, architecture, reference)
    return replace(image, digest=verified(data, "", reference)), diff_ids


def check(chain: Sequence[StoredLayer], diff_ids: Sequence[str]) -> None:
    """Raise NotRebuildable unless all layers are there, in the order of their diff_ids."""
    for layer, diff_id in zip(chain, diff_ids, strict=True):
        if layer.diff_id not in (diff_id, ""):
            raise NotRebuildable(
                f"podman's storage has layer {layer.diff_id[:19]} instead of {diff_id[:19]}"
            )
        if not layer.split.is_file():
            raise NotRebuildable(
                f"podman's storage has no {layer.split.name}, the record of the layer's tar archive"
            )
        if not layer.root.is_dir() or (layer.root.parent / "composefs-data").exists():
            raise NotRebuildable(
                f"podman's storage does not have layer {layer.id[:12]} as plain files"
            )


def _storage(env: Mapping[str, str]) -> tuple[str, tuple[Path, ...]]:
    """The storage's driver and its folders, the engine's own first. Raises NotRebuildable for other drivers."""
    done = process.run(("podman", "info", "--format", "json"), env=env)
    store = parse_object(done.stdout.encode(), "podman's description of its storage").object(
        "store"
    )
    driver = store.text("graphDriverName")
    if driver not in _FOLDERS:
        raise NotRebuildable(f"podman's storage driver is {driver}")
    options = store.object("graphOptions")
    # podman 4.3 lists the last read-only store, newer ones all
    more = [
        *options.texts(f"{driver}.imagestore"),
        *options.texts(f"{driver}.additionalImageStores"),
    ]
    return driver, tuple(Path(path) for path in (store.text("graphRoot"), *more))


def read_layers(root: Path, driver: str) -> Iterator[StoredLayer]:
    """The layers that a store lists."""
    folder = root / f"{driver}-layers"
    for name in ("layers.json", "volatile-layers.json"):
        for fields in _read_list(folder / name):
            identity = _identity(fields, "id")
            yield StoredLayer(
                id=identity,
                parent=_identity(fields, "parent"),
                diff_id=fields.text("diff-digest"),
                size_bytes=fields.number("diff-size"),
                split=folder / f"{identity}.tar-split.gz",
                root=root / _FOLDERS[driver].format(identity),
            )


def read_top(root: Path, driver: str, image: str) -> str | None:
    """The uppermost layer of an image (empty where it has none); None where the store does not list the image."""
    for fields in _read_list(root / f"{driver}-images/images.json"):
        if fields.text("id") == image:
            return _identity(fields, "layer")
    return None


def chain_of(top: str, layers: Mapping[str, StoredLayer]) -> tuple[StoredLayer, ...]:
    """The layer `top` and all below it, the lowest first. Raises NotRebuildable."""
    chain: list[StoredLayer] = []
    while top:
        if top not in layers or len(chain) >= LAYERS:
            raise NotRebuildable(f"podman's storage does not list layer {top[:12]}")
        chain.append(layers[top])
        top = layers[top].parent
    return tuple(reversed(chain))


def _read_list(path: Path) -> Sequence[Fields]:
    """The objects of a list of the storage; none where there is no such file."""
    return parse_objects(_read(path, _LIST_BYTES) or b"[]", str(path)) if path.exists() else ()


def _read(path: Path, limit: int) -> bytes:
    try:
        if path.stat().st_size > limit:
            raise NotRebuildable(f"{path} is larger than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise NotRebuildable(f"{path}: {error.strerror}") from error


def _identity(fields: Fields, key: str) -> str:
    """An id, which is a name of a file or folder too."""
    identity = fields.text(key)
    if "/" in identity or identity in (".", ".."):
        raise RunnerError(
            f"cannot read {fields.what}",
            f"{key!r} is {identity!r}, which cannot be an id: podman's storage is damaged",
            "pull the image again; a recent podman can also repair its storage: podman system check --repair",
        )
    return identity


# 1 MiB is what a user may have by default (fs.pipe-max-size)
_PIPE_BYTES = 1 << 20
_END_SECONDS = 5.0


class Rebuilder:
    """A running helper; it ends when we do, whatever ends us, since its socket is then closed."""

    def __init__(self, requests: socket.socket, words: IO[bytes], what: str) -> None:
        self.requests = requests
        self.words = words
        self.what = what

    @contextmanager
    def layer(self, split: Path, root: Path) -> Iterator[Reader]:
        """The tar of a layer. Raises RunnerError where it ends, when it could not be put together."""
        data, target = os.pipe2(os.O_CLOEXEC)
        verdict, status = os.pipe2(os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a machine with smaller pipes is slower, no more
                fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            message = json.dumps({"split": str(split), "root": str(root)}).encode()
            # a helper that has gone: the pipes end at once, and the reader says so
            with suppress(OSError):
                socket.send_fds(self.requests, [message], [target, status])
        finally:
            os.close(target)
            os.close(status)
        with os.fdopen(data, "rb", 1 << 16) as stream, os.fdopen(verdict, "rb", 0) as said:
            yield _Tar(stream, said, self)

    def failure(self, error_text: str) -> RunnerError:
        """The error for a layer that could not be put together."""
        self.words.seek(0)
        last = self.words.read()[-2000:].decode(errors="replace").strip().splitlines()[-3:]
        why = error_text or "\n".join(
            ("the process that reads the engine's storage has died", *last)
        )
        return RunnerError(
            f"cannot read {self.what}",
            why,
            "import it again, and do not remove it meanwhile (podman rmi, podman image prune, podman system prune); "
            "if it fails again: podman pull or build it again",
        )


class _Tar:
    """The tar as it comes through the pipe; its end is believed only when the helper says that it was the end."""

    def __init__(self, stream: IO[bytes], said: IO[bytes], owner: Rebuilder) -> None:
        self.stream = stream
        self.said = said
        self.owner = owner

    def read(self, size: int = -1, /) -> bytes:
        data = self.stream.read(size)
        if len(data) < size or size < 0:
            words = self.said.read() if not self.said.closed else b"ok"
            self.said.close()
            if words != b"ok":
                raise self.owner.failure(words.decode(errors="replace"))
        return data


@contextmanager
def rebuilder(env: Mapping[str, str], what: str, *, rootless: bool) -> Iterator[Rebuilder]:
    """A helper for the layers of one image; for an ordinary user within podman's user namespace."""
    inside = ("podman", "unshare") if rootless else ()
    argv = (*inside, sys.executable, "-I", "-S", str(Path(tar_split.__file__)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryFile() as words:
        with theirs:
            streams = {"stdin": theirs.fileno(), "stdout": subprocess.DEVNULL, "stderr": words}
            child = process.start(argv, env, cwd="/", start_new_session=True, **streams)
        try:
            yield Rebuilder(ours, words, what)
        finally:
            ours.close()
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.end_group(child.pid)
                child.wait()
