"""Decide what an import reads and writes, before anything is written."""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.images.importer.hot import Trace, read_trace
from runner.images.importer.layer_index import LayerIndex, open_index
from runner.images.importer.pack import PackOptions
from runner.images.layers.layer import LayeredImage
from runner.images.recipe import image_name
from runner.images.sources.open import Access
from runner.images.squashfs.compression import Compression
from runner.images.squashfs_file import Squashfs, index_path, read_squashfs
from runner.machine import probe, process
from runner.project import Project

# one storage server for the first 4 MiB, four up to 64 MiB, then all, as CSCS recommends for image folders
STRIPING = "-E 4M -c 1 -E 64M -c 4 -E -1 -c -1 -S 4M"


def stripe(unfinished: Path, layout: str) -> Iterator[str]:
    """On Lustre, create the empty file with this layout (`lfs setstripe`). Yields lines for the user."""
    if not process.which("lfs"):
        return
    if process.run(("lfs", "getstripe", "-d", str(unfinished.parent)), check=False).exit_code != 0:
        return  # not on Lustre
    done = process.run(("lfs", "setstripe", *shlex.split(layout), str(unfinished)), check=False)
    if done.exit_code == 0:
        yield f"Lustre: the file is striped with {layout}"
        return
    words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    yield f"Lustre: the file is not striped ({words}); to stripe all files of a folder: lfs setstripe {layout} FOLDER"


_LOOKED_AT = 20  # the number of files in the image folder whose layers are compared


@dataclass(frozen=True)
class ImportOptions:
    """The user's options for an import. Raises RunnerError for an invalid value."""

    output: Path | None = None
    """the user's own file name; no symlink is created"""
    compression: str = "lz4"
    again: bool = False
    """write the file again from all layers"""
    force: bool = False
    """with `output`, replace a file of another program"""
    engine: str | None = None
    architecture: str | None = None
    """of the site's nodes (default: this machine's)"""
    owners: str = "root"
    xattrs: str = "keep"
    threads: int | None = None
    """for compression (default: one per processor that this process may use)"""
    allow_http: int = 0
    """see Access"""
    verify: str = "all"
    """digest: do not verify the diff_ids of layers whose blobs have digests"""
    connections: int = 8
    """simultaneous connections to a registry"""
    striping: str = STRIPING
    """arguments of `lfs setstripe`, for a target on Lustre"""
    trace: Path | None = None
    """what a start reads (default: the trace beside the recipe of the image)"""
    importer: bool = False
    """the file is one of `runner-importer`, which starts a container as soon as the file is there"""
    check_room: bool = False
    """fail at once if the disk has less free space than the image's layers need"""

    def __post_init__(self) -> None:
        Compression.parse(self.compression)
        choices = (
            ("--owners", self.owners, ("root", "keep")),
            ("--xattrs", self.xattrs, ("keep", "drop")),
            ("--verify", self.verify, ("all", "digest")),
        )
        for flag, value, known in choices:
            if value not in known:
                why = f"the possible values are {', '.join(known)}"
                raise RunnerError(
                    f"{flag} cannot be {value!r}", why, f"{flag} {known[0]}", exit_code=2
                )
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise RunnerError(
                f"--threads cannot be {self.threads}",
                "it must be a number from 1 to 1024",
                "leave out --threads",
                exit_code=2,
            )


@dataclass(frozen=True)
class ImportRequest:
    """An import: what to read, where to write it, and how."""

    source: str
    """as the user named it"""
    images: Path
    """the folder to write to, unless the options have `output`"""
    project: Project
    environ: Mapping[str, str]
    options: ImportOptions = ImportOptions()

    @property
    def access(self) -> Access:
        """How the image is reached."""
        options = self.options
        architecture = options.architecture or probe.architecture()
        return Access(
            environ=self.environ,
            project=self.project,
            architecture=architecture,
            engine=options.engine,
            allow_http=options.allow_http,
            connections=options.connections,
        )


@dataclass(frozen=True)
class ImportPlan:
    """What an import reads and writes."""

    image: LayeredImage
    source: str
    target: Path
    link: Path
    content: str
    packing: PackOptions
    reuse: Squashfs | None
    """an existing file with the same content"""


def plan_import(name: str, image: LayeredImage, request: ImportRequest) -> ImportPlan:
    """The plan for an open image. `name` is the stem of the squashfs file."""
    options = request.options
    packing = PackOptions(
        Compression.parse(options.compression),
        options.threads or probe.cpus(),
        options.owners,
        options.xattrs,
        epoch=_epoch(request.environ),
        verify_diff_ids=options.verify == "all",
        trace=_trace(image, request),
    )
    content = content_of(image, packing)
    target = (
        options.output.absolute() if options.output else request.images / f"{name}-{content}.sqsh"
    )
    link = target if options.output else request.images / f"{name}.sqsh"
    found = read_squashfs(target)
    reuse = found if found and found.content == content and not options.again else None
    return ImportPlan(
        image=image,
        source=request.source,
        target=target,
        link=link,
        content=content,
        packing=packing,
        reuse=reuse,
    )


def content_of(image: LayeredImage, packing: PackOptions) -> str:
    """12 hex digits: the hash of the image, the options, the version of our packing, and the compressor's version."""
    # diff_ids that are not checked do not identify the content: use the blobs instead
    blobs = () if packing.verify_diff_ids else tuple(layer.digest for layer in image.layers)
    inputs = json.dumps([image.id, packing.settings, *blobs])
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


@contextmanager
def previous_index(plan: ImportPlan, options: ImportOptions) -> Iterator[LayerIndex | None]:
    """The index of the squashfs in the same folder that shares the most bytes with the image; None if there is none.

    Its squashfs stays open, so that another process can replace or remove it meanwhile.
    """
    best: tuple[int, LayerIndex] | None = None
    wanted = {layer.diff_id for layer in plan.image.layers if layer.diff_id}
    for path in () if options.again else _candidates(plan):
        index = open_index(index_path(path), path)
        if index is None:
            continue
        shared = 0
        if index.settings == plan.packing.run_settings:
            shared = sum(record.length for key, record in index.records.items() if key in wanted)
        if shared <= (best[0] if best else 0):
            index.close()
            continue
        if best:
            best[1].close()
        best = (shared, index)
    try:
        yield best[1] if best else None
    finally:
        if best:
            best[1].close()


def _candidates(plan: ImportPlan) -> list[Path]:
    """The files to compare: the target of the symlink, then the newest ones of the folder."""
    found = [plan.link.resolve()] if plan.link.exists() else []
    try:
        others = sorted(plan.target.parent.glob("*.layers"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        others = []
    found += [path.with_suffix(".sqsh") for path in others[:_LOOKED_AT]]
    return list(dict.fromkeys(found))


def _trace(image: LayeredImage, request: ImportRequest) -> Trace | None:
    """The given trace, else that of the image's recipe, containers/NAME.trace; None if there is neither."""
    recipe = (image.config.get("Labels") or {}).get("runner.recipe")
    paths = (
        path
        for root in request.project.roots
        for path in sorted((root / "containers").glob("*.trace"))
    )
    path = request.options.trace or next(
        (path for path in paths if image_name(path.stem) == recipe), None
    )
    return read_trace(path) if path else None


def _epoch(environ: Mapping[str, str]) -> int | None:
    """SOURCE_DATE_EPOCH. Raises RunnerError unless it is a number of seconds."""
    text = environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 32:
        raise RunnerError(
            f"SOURCE_DATE_EPOCH={text!r} is not a Unix timestamp",
            f"it must be a whole number of seconds since 1970, less than {1 << 32}",
            "unset SOURCE_DATE_EPOCH",
        )
    return int(text)
