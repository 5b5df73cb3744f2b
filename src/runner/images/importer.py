"""From an image to one squashfs file: its names, its lock, its sidecar, and that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.images import metadata
from runner.images.engine import choose_engine, open_store
from runner.images.image import Image
from runner.images.leftovers import LABEL, clear_leftovers, container_name
from runner.images.locate import Shelf, engine_of, locate
from runner.images.oci.digest import sha256_of
from runner.images.oci.store import Store
from runner.images.source import Source, parse_source
from runner.images.squashfs import packer
from runner.images.squashfs_file import Squashfs, as_json, is_whole, read_squashfs, sidecar
from runner.machine import files, probe, process
from runner.machine.folders import cache_folder
from runner.machine.report import Report
from runner.project import Project


@dataclass(frozen=True)
class ImportOptions:
    """What the user may choose about an import."""

    output: Path | None = None
    """a file of the user's own name, without a symlink"""
    compression: str = "zstd:1"
    again: bool = False
    """make it anew (--force, --no-cache); with `output`, replace a file that is not ours"""
    engine: str | None = None
    architecture: str | None = None
    """what the site's nodes are (default: this machine)"""


@dataclass(frozen=True)
class ImportPlan:
    """What an import reads and writes."""

    image: Image
    source: str
    target: Path
    link: Path
    content: str
    compression: str
    reuse: Squashfs | None
    """the file that is there already, of the same content"""


def import_image(
    source: str,
    images: Path,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: ImportOptions = ImportOptions(),
) -> Squashfs:
    """The squashfs file of an image in the folder `images`; made where the same content is not there yet.

    Raises RunnerError for an unknown or foreign image, a refused folder, a full disk; nothing half-made is left.
    """
    process.need(("tar2sqfs", "unsquashfs"))
    packer.compression_flags(options.compression)
    parsed = parse_source(source, project.start)
    shelf = open_shelf(parsed, project, environ, report, options.engine)
    image = locate(parsed, shelf)
    plan = plan_import(parsed, source, image, images, options)
    try:
        with files.locked(plan.target):
            return _import_locked(plan, shelf.store, report, options)
    except OSError as error:
        raise files.explain(error, f"write {plan.target}") from error


def explain_import(
    source: str, images: Path, project: Project, environ: Mapping[str, str], report: Report, options: ImportOptions
) -> tuple[str, ...]:
    """What an import would read, reuse and write; nothing is pulled or written."""
    parsed = parse_source(source, project.start)
    if parsed.scheme not in ("", "podman", "dockerd"):
        verb = "pulled" if parsed.scheme == "docker" else "loaded into the engine's storage"
        return (
            f"reads:  {source} ({verb} first; its content decides the file's name)",
            f"writes: {images}/{parsed.name}-*.sqsh",
        )
    shelf = open_shelf(parsed, project, environ, report, options.engine)
    plan = plan_import(parsed, source, locate(parsed, shelf), images, options)
    reads = f"reads:  {plan.image.reference} ({plan.image.size_bytes / 1e6:,.0f} MB, {plan.image.architecture})"
    if plan.reuse:
        return (reads, f"reuses: {plan.target} (the same content)", "writes: nothing")
    link = "" if plan.link == plan.target else f" and {plan.link} -> {plan.target.name}"
    return (reads, "reuses: nothing", f"writes: {plan.target}, {sidecar(plan.target).name}{link}")


def open_shelf(
    parsed: Source, project: Project, environ: Mapping[str, str], report: Report, engine: str | None
) -> Shelf:
    """The engine and storage that a source is read with; which, and why, is said."""
    chosen = choose_engine(engine_of(parsed) or engine, environ)
    report.say(f"engine: {chosen.name} ({chosen.why})")
    for note in chosen.notes:
        report.detail(note)
    log = cache_folder(environ) / "build" / "import.log"
    return Shelf(chosen, open_store(chosen), project, log, report)


def plan_import(parsed: Source, source: str, image: Image, images: Path, options: ImportOptions) -> ImportPlan:
    """What to read and write. Raises RunnerError for an image of another architecture than the nodes'."""
    wanted = options.architecture or probe.architecture()
    if image.architecture and image.architecture != wanted:
        raise RunnerError(
            f"{source!r} is an image for {image.architecture}",
            f"it would end in `exec format error` on the nodes, which are {wanted}",
            f"build or pull it for linux/{wanted}, or name a site with {image.architecture} nodes (--site)",
        )
    content = content_of(image, options.compression)
    name = parsed.name
    target = options.output.absolute() if options.output else images / f"{name}-{content}.sqsh"
    link = target if options.output else images / f"{name}.sqsh"
    found = read_squashfs(target)
    reuse = found if found and found.content == content and not options.again else None
    return ImportPlan(image, source, target, link, content, options.compression, reuse)


def content_of(image: Image, compression: str) -> str:
    """12 hex digits: the image, the compression, and our way of packing."""
    inputs = json.dumps([image.id, compression, packer.PACKING])
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


def _import_locked(plan: ImportPlan, store: Store, report: Report, options: ImportOptions) -> Squashfs:
    """The import itself, under the lock of its target."""
    clear_leftovers(plan.target, store, report)
    found = read_squashfs(plan.target)  # another import may have made it while we waited
    if found and found.content == plan.content and not options.again:
        if is_whole(plan.target):
            report.say(f"{plan.target}: the same image was imported before")
            return _with_link(found, plan)
        report.warn(f"{plan.target} is damaged (unsquashfs -s cannot read it): it is made anew")
    elif plan.target.exists() and found is None and not options.again and options.output:
        raise RunnerError(
            f"{plan.target} is there already", "it is not a file that `runner import` made", "--force replaces it"
        )
    squashfs = _make(plan, store, report)
    return _with_link(squashfs, plan)


def _make(plan: ImportPlan, store: Store, report: Report) -> Squashfs:
    left_out = metadata.unsayable(plan.image.config)
    if left_out:
        report.warn(f"variables with a line break cannot stand in /etc/environment: {', '.join(left_out)}")
    extra = metadata.metadata_files(plan.image.config)
    with files.partial(plan.target) as unfinished:
        with _container(plan, store) as container, store.export(container) as stream:
            total = plan.image.size_bytes or None
            with report.bar(f"packing {plan.image.reference}", total) as advance:
                extra = metadata.metadata_files(plan.image.config)
                packer.pack(stream, unfinished, extra, plan.compression, advance)
        if not is_whole(unfinished):
            raise RunnerError(
                f"{plan.target.name} came out damaged", "unsquashfs -s cannot read what tar2sqfs wrote", "import again"
            )
        unfinished.chmod(0o644)
        squashfs = Squashfs(
            path=plan.target,
            link=plan.link,
            image_digest=plan.image.id,
            sha256=sha256_of(unfinished),
            size_bytes=unfinished.stat().st_size,
            architecture=plan.image.architecture,
            source=plan.source,
            created=time.time(),
            version=__version__,
            compression=plan.compression,
            content=plan.content,
        )
        # before the file itself: a sidecar alone says nothing, a file alone would be taken for somebody else's
        files.write(sidecar(plan.target), as_json(squashfs))
    return squashfs


@contextmanager
def _container(plan: ImportPlan, store: Store) -> Iterator[str]:
    """A container of the image, labelled with the file that it is for; removed at the end, never started."""
    container = store.create(plan.image, container_name(plan.target), {LABEL: str(plan.target)})
    try:
        yield container
    finally:
        with suppress(RunnerError):  # the next import removes it
            store.remove(container)


def _with_link(squashfs: Squashfs, plan: ImportPlan) -> Squashfs:
    """The file with its stable symlink pointing to it."""
    if plan.link != plan.target:
        files.link(plan.link, plan.target.name)
    return replace(squashfs, link=plan.link)
