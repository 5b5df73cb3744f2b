"""Pack layers into one squashfs in one pass: read from the top layer down, flatten, and copy unchanged layers."""

from __future__ import annotations

import gc
import io
import stat
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import BinaryIO

from runner.errors import RunnerError
from runner.images.flatten.flatten import Flattener
from runner.images.importer.hot import HotRegion, Trace
from runner.images.importer.layer_index import (
    LayerIndex,
    LayerLog,
    LayerRecord,
    needed_hash,
    read_frame,
    write_index,
)
from runner.images.layers.decode import decoded
from runner.images.layers.layer import Layer, LayeredImage
from runner.images.layers.tar import Entry, entries
from runner.images.squashfs.compression import SUPERBLOCK, Compression
from runner.images.squashfs.data import DataWriter, FileData, Leaf, Place
from runner.images.squashfs.tables import write_tables

# parameters of mallopt, from glibc's malloc.h: sizes above which memory is mapped separately, and returned
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations.

    Otherwise, each buffer of 100 KiB to 1 MiB gets new pages from the kernel, which costs 5% of an import's CPU time.
    With another C library, this does nothing.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


_SWITCH_SECONDS = 0.0002


@contextmanager
def set_for_streams() -> Iterator[None]:
    """Tune Python for threads that process streams while one thread builds a large tree. Restored on exit.

    By default, threads that inflate and hash wait up to 5 ms for the thread that parses, and the garbage collector
    repeatedly scans the whole tree, which costs 10% of the time. The block must not create large reference cycles.
    """
    interval, collecting = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collecting:
            gc.enable()


# increase when the same image is packed to different bytes. 1 was tar2sqfs; up to 2, own files hid a linked /etc
PACKING = 3


@dataclass(frozen=True)
class PackOptions:
    """The options that determine the bytes of the squashfs, and the number of threads."""

    compression: Compression
    threads: int
    owners: str = "root"
    """root: everything belongs to root, as with enroot; keep: the owners in the layers"""
    xattrs: str = "keep"
    """keep: user.* and security.capability; drop: none"""
    devices: bool = False
    """whether to keep the content of /dev, which every engine hides with its own /dev"""
    epoch: int | None = None
    """SOURCE_DATE_EPOCH: the latest time of any file, and the time of the squashfs itself"""
    verify_diff_ids: bool = True
    """verify diff_ids too; the digests of blobs are always verified"""
    trace: Trace | None = None
    """what a start reads: it is stored in one region"""

    @property
    def run_settings(self) -> str:
        """The settings that determine the bytes of a run, besides its layer and the visible files of that layer."""
        return f"packing {PACKING}, {self.compression.identity}"

    @property
    def settings(self) -> str:
        """The settings that determine the bytes of the squashfs, besides its image."""
        epoch = "" if self.epoch is None else f", times to {self.epoch}"
        trace = (
            f", trace {sha256(repr(self.trace).encode()).hexdigest()[:12]}" if self.trace else ""
        )
        return f"{self.run_settings}, owners {self.owners}, xattrs {self.xattrs}{epoch}{trace}"


@dataclass
class Packed:
    """Statistics of an import: seconds by phase, numbers of layers and files."""

    seconds: dict[str, float] = field(default_factory=dict)
    layers: int = 0
    layers_reused: int = 0
    layers_damaged: int = 0
    """layers that are damaged in the earlier squashfs, and were read again"""
    entries: int = 0
    traced: int = 0
    """files of the trace that the image has"""
    index: list[tuple[LayerRecord, bytes]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def pack_image(
    image: LayeredImage,
    file: BinaryIO,
    own_files: Mapping[str, tuple[str, int]],
    options: PackOptions,
    previous: LayerIndex | None,
    advance: Callable[[int], None],
) -> Packed:
    """Write the image to `file` as a complete squashfs, with `own_files` (path -> text, mode).

    `advance` gets the number of bytes read from blobs. Raises RunnerError for a layer that cannot be read or verified,
    and OSError for the disk.
    """
    keep_freed_memory()
    packed = Packed(layers=len(image.layers))
    if previous and previous.settings != options.run_settings:
        previous = None
    flattener = Flattener(owners=options.owners, xattrs=options.xattrs)
    with set_for_streams(), DataWriter(file, options.compression, options.threads) as writer:
        packer = _Packer(flattener, writer, options, packed)
        packer.add_own(own_files)
        image.expect(
            [layer for layer in reversed(image.layers) if not (previous and previous.find(layer))]
        )
        for layer in reversed(image.layers):
            record = previous.find(layer) if previous else None
            if previous and record:
                with packed.phase("copy"):
                    packer.reuse(layer, record, previous, advance)
            else:
                with packed.phase("pack"):
                    packer.read(layer, advance)
        with packed.phase("tables"):
            root = flattener.finish()
            packer.place_own()
            hot = options.trace and HotRegion(
                options.trace, root, writer, file, options.compression
            )
            write_tables(
                file, writer, root, time=options.epoch or 0, compression=options.compression
            )
            if hot:
                hot.write_list()
                packed.traced = hot.files
    return packed


def index_of(packed: Packed, file: BinaryIO, options: PackOptions, target: BinaryIO) -> None:
    """Write the index that goes beside the squashfs in `file`."""
    file.seek(0)
    write_index(target, file.read(SUPERBLOCK.size), options.run_settings, packed.index)


Offer = Callable[[Entry, int, bool], Leaf | None]
"""(entry, its number in the layer, whether this is the second reading) -> the leaf that needs its content"""


class _Packer:
    """Adds one layer after another, top layer first."""

    def __init__(
        self, flattener: Flattener, writer: DataWriter, options: PackOptions, packed: Packed
    ) -> None:
        self._flattener, self._writer = flattener, writer
        self._options, self._packed = options, packed
        self._own: dict[bytes, Leaf] = {}

    def add_own(self, files: Mapping[str, tuple[str, int]]) -> None:
        """Write the data of our own files."""
        self._writer.begin_run()
        for path, (text, mode) in files.items():
            data = text.encode("utf-8", "surrogateescape")
            written = self._writer.add(len(data), io.BytesIO(data))
            self._own[path.encode()] = Leaf(
                mode=stat.S_IFREG | mode,
                uid=0,
                gid=0,
                mtime=0,
                xattrs=(),
                data=written,
                layer=0,
            )
        self._writer.end_run()

    def place_own(self) -> None:
        """Put our own files into the finished tree."""
        for path, leaf in self._own.items():
            self._flattener.place(path, leaf)

    def read(self, layer: Layer, advance: Callable[[int], None]) -> None:
        """Read a layer, and pack its visible files."""
        self._flattener.begin_layer()
        self._packed.entries += self._pack(layer, self._offer, self._flattener.end_layer, advance)

    def _pack(
        self, layer: Layer, offer: Offer, more: Callable[[], bool], advance: Callable[[int], None]
    ) -> int:
        """Pack the contents for which `offer` gives a leaf, and return the number of entries.

        If `more` then returns true, the layer is read a second time. This is rare: a hard link needs a file that was
        skipped, because its own name is hidden.
        """
        log, needed, contents = LayerLog(), array("I"), list[FileData]()
        run, count = self._writer.begin_run(), 0
        # without a digest, there is only the diff_id
        verify = self._options.verify_diff_ids or not layer.digest
        for again in (False, True):
            with decoded(
                layer, verify_diff_id=verify, advance=_ignore if again else advance
            ) as stream:
                for number, (entry, content) in enumerate(entries(stream)):
                    if not again:
                        log.add(entry)
                        count += 1
                    if leaf := offer(entry, number, again):
                        data = leaf.data = self._writer.add(entry.size, content)
                        contents.append(data)
                        needed.append(number)
            if again or not more():
                break
        self._writer.end_run()
        proven = bool(layer.diff_id) and (
            self._options.verify_diff_ids or layer.diff_id == layer.digest
        )
        record = LayerRecord(
            diff_id=layer.diff_id,
            digest=layer.digest,
            proven=proven,
            needed=needed_hash(needed),
            offset=run.offset,
            length=run.length,
            fragments=run.fragments.decode("latin-1"),
            check=run.check,
            frame=0,
            frame_length=0,
        )
        self._packed.index.append((record, log.end(contents)))
        return count

    def reuse(
        self,
        layer: Layer,
        record: LayerRecord,
        previous: LayerIndex,
        advance: Callable[[int], None],
    ) -> None:
        """Copy a layer from the previous squashfs. If other files of it are visible now, pack it again."""
        data = previous.frame(record)
        if data is None or (self._options.verify_diff_ids and not previous.is_intact(record)):
            self._packed.layers_damaged += 1
            self.read(layer, advance)
            return
        places: list[Place] = []
        self._flattener.begin_layer()
        needed, leaves = array("I"), list[Leaf]()
        for again in (False, True):
            for number, entry in enumerate(read_frame(data, places)):
                leaf = self._offer(entry, number, again)
                if leaf:
                    needed.append(number)
                    leaves.append(leaf)
                self._packed.entries += not again
            if again or not self._flattener.end_layer():
                break
        if needed_hash(needed) != record.needed:
            self._read_again(layer, needed, leaves, advance)
            return
        run = self._writer.copy_run(previous.squashfs, record.run())
        for leaf, place in zip(leaves, places, strict=True):
            leaf.data = FileData(run, place)
        self._packed.layers_reused += 1
        self._packed.index.append((replace(record, offset=run.offset), data))
        advance(layer.size_bytes)

    def _read_again(
        self, layer: Layer, needed: array[int], leaves: list[Leaf], advance: Callable[[int], None]
    ) -> None:
        """Pack the contents of a layer whose entries are in the tree already, in the order of `needed`."""
        pairs = zip(needed, leaves, strict=True)
        waiting = next(pairs, None)

        def wanted(entry: Entry, number: int, again: bool) -> Leaf | None:
            nonlocal waiting
            if waiting is None or waiting[0] != number:
                return None
            leaf, waiting = waiting[1], next(pairs, None)
            return leaf

        self._pack(layer, wanted, lambda: waiting is not None, advance)
        if waiting:
            raise RunnerError(
                "the index of the previous squashfs file does not match this image",
                f"the index lists entries that layer {layer.diff_id} does not have",
                "import the image without that index: --no-cache",
            )

    def _offer(self, entry: Entry, number: int = 0, again: bool = False) -> Leaf | None:
        """The leaf that needs the entry's content, if any."""
        if not self._options.devices and (
            entry.path.startswith(b"dev/") or entry.path == b".dockerenv"
        ):
            return None
        if self._options.epoch is not None and entry.mtime > self._options.epoch:
            entry.mtime = self._options.epoch
        return self._flattener.again(entry) if again else self._flattener.offer(entry)


def _ignore(count: int) -> None:
    """Ignore bytes that were counted before."""
