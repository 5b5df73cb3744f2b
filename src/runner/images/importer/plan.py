"""What an import reads and writes, decided before anything is written."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images.build.content import files_hash
from runner.images.engine import Engine, choose_engine, open_store
from runner.images.image import Image
from runner.images.importer.layer_index import LayerIndex, open_index
from runner.images.importer.leftovers import clear_containers, container_of
from runner.images.importer.pack import PackOptions
from runner.images.layers.layer import LayeredImage
from runner.images.recipe import load_recipe, recipe_names
from runner.images.source import Source
from runner.images.sources.engine_storage import Store, find
from runner.images.sources.open import SourceOptions, open_found, open_image
from runner.images.squashfs.compression import Compression
from runner.images.squashfs_file import Squashfs, index_path, read_squashfs
from runner.machine import probe, process
from runner.machine.report import Report
from runner.project import Project

# one server for the first 4 MiB, four up to 64 MiB, then all, as CSCS advises for image folders
STRIPING = "-E 4M -c 1 -E 64M -c 4 -E -1 -c -1 -S 4M"


def stripe(unfinished: Path, layout: str) -> Iterator[str]:
    """Make the empty file with that layout (`lfs setstripe`) if its folder is on Lustre; yields lines for the user."""
    if not process.which("lfs"):
        return
    if process.run(("lfs", "getstripe", "-d", str(unfinished.parent)), check=False).exit_code != 0:
        return  # not on Lustre
    done = process.run(("lfs", "setstripe", *shlex.split(layout), str(unfinished)), check=False)
    if done.exit_code == 0:
        yield f"Lustre: the file is striped with {layout}"
        return
    words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    yield f"Lustre: the file is not striped ({words}); for images: lfs setstripe {layout} FOLDER"


_LOOKED_AT = 20  # files of the image folder whose layers are compared


@dataclass(frozen=True)
class ImportOptions:
    """What the user may choose about an import."""

    output: Path | None = None
    """a file of the user's own name, without a symlink"""
    compression: str = "lz4"
    again: bool = False
    """make it anew (--force, --no-cache), from all layers; with `output`, replace a file that is not ours"""
    engine: str | None = None
    architecture: str | None = None
    """what the site's nodes are (default: this machine)"""
    owners: str = "root"
    xattrs: str = "keep"
    threads: int | None = None
    """that compress (default: as many as this process may use)"""
    allow_http: int = 0
    """1: a registry on another machine may be read without TLS; 2: and be sent a login so"""
    verify: str = "all"
    """digest: trust the image's configuration about its layers, where their blobs have a digest"""
    connections: int = 8
    """to a registry, at a time"""
    striping: str = STRIPING
    """words of `lfs setstripe`, for a target on Lustre"""

    def check(self) -> None:
        """Raise RunnerError for a value that there is not."""
        Compression.parse(self.compression)
        choices = (
            ("--owners", self.owners, ("root", "keep")),
            ("--xattrs", self.xattrs, ("keep", "drop")),
            ("--verify", self.verify, ("all", "digest")),
        )
        for flag, value, known in choices:
            if value not in known:
                raise RunnerError(f"no {flag} {value!r}", f"known: {', '.join(known)}", known[0], exit_code=2)
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise RunnerError(f"--threads {self.threads} is no number of threads", "1 to 1024", "leave it out")


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
    """the file that is there already, of the same content"""


def plan_import(
    name: str, source: str, image: LayeredImage, images: Path, options: ImportOptions, environ: Mapping[str, str]
) -> ImportPlan:
    """What to read and write for an image that is open."""
    packing = PackOptions(
        Compression.parse(options.compression),
        options.threads or probe.cpus(),
        options.owners,
        options.xattrs,
        epoch=_epoch(environ),
        verify_diff_ids=options.verify == "all",
    )
    content = content_of(image, packing)
    target = options.output.absolute() if options.output else images / f"{name}-{content}.sqsh"
    link = target if options.output else images / f"{name}.sqsh"
    found = read_squashfs(target)
    reuse = found if found and found.content == content and not options.again else None
    return ImportPlan(image, source, target, link, content, packing, reuse)


def content_of(image: LayeredImage, packing: PackOptions) -> str:
    """12 hex digits: the image, the options, our way of packing, and the compressor, whose bytes change with it."""
    # a configuration whose diff_ids are not checked names no contents: then the blobs are what was read
    blobs = () if packing.verify_diff_ids else tuple(layer.digest for layer in image.layers)
    inputs = json.dumps([image.id, packing.settings, *blobs])
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


@contextmanager
def previous_index(plan: ImportPlan, options: ImportOptions) -> Iterator[LayerIndex | None]:
    """The index of the squashfs in the same folder that shares most bytes with the image; None without one.

    Its squashfs stays open, so that it may be replaced or removed meanwhile.
    """
    best: tuple[int, LayerIndex] | None = None
    wanted = {layer.diff_id for layer in plan.image.layers if layer.diff_id}
    for path in () if options.again else _candidates(plan):
        index = open_index(index_path(path), path)
        if index is None:
            continue
        fits = index.settings == plan.packing.run_settings
        shared = sum(record.length for key, record in index.records.items() if key in wanted) if fits else 0
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
    """The files to look at: the one that the symlink names, then the youngest of the folder."""
    found = [plan.link.resolve()] if plan.link.exists() else []
    try:
        others = sorted(plan.target.parent.glob("*.layers"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        others = []
    found += [path.with_suffix(".sqsh") for path in others[:_LOOKED_AT]]
    return list(dict.fromkeys(found))


def _epoch(environ: Mapping[str, str]) -> int | None:
    """SOURCE_DATE_EPOCH. Raises RunnerError where it is no number of seconds."""
    text = environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 32:
        raise RunnerError(
            f"SOURCE_DATE_EPOCH={text!r} is no time", "it is a number of seconds since 1970", "unset SOURCE_DATE_EPOCH"
        )
    return int(text)


class Target:
    """The file that is made of the image; known only after the image has been opened, and before a layer is."""

    path: Path | None = None


@contextmanager
def opened(
    source: Source,
    architecture: str,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: ImportOptions,
    target: Target,
) -> Iterator[LayeredImage]:
    """The image of a source, open for reading its layers. Raises RunnerError where there is none."""
    reading = SourceOptions(allow_http=options.allow_http, connections=options.connections)
    if source.scheme not in ("", "podman", "dockerd"):
        with open_image(source, architecture=architecture, environ=environ, options=reading) as image:
            yield image
        return
    engine = choose_engine({"podman": "podman", "dockerd": "docker"}.get(source.scheme, options.engine), environ)
    report.say(f"engine: {engine.name} ({engine.why})")
    for note in engine.notes:
        report.detail(note)
    store = open_store(engine)
    asked = source.reference
    stored = find(store, asked, engine.name) if source.scheme else _bare(source, engine, store, project, report)

    def name_container() -> tuple[str, Mapping[str, str]]:
        assert target.path is not None, "the target is known before a layer is read"
        clear_containers(target.path, store, report)
        return container_of(target.path)

    reading = SourceOptions(engine_env=engine.env, name_container=name_container)
    known = stored.architecture
    with open_found(stored, store, architecture=known, reference=stored.reference, options=reading) as image:
        for note in image.notes:
            report.say(note)
        yield image


def _bare(source: Source, engine: Engine, store: Store, project: Project, report: Report) -> Image:
    """A recipe's image, the one that was built last; else any image of that name."""
    name = source.reference
    if name in recipe_names(project):
        recipe = load_recipe(name, project)
        latest = store.find(f"{recipe.repository}:latest")
        if latest is None:
            raise RunnerError(
                f"the image of recipe {name!r} is not built yet",
                f"{engine.name}'s storage has no {recipe.repository}",
                f"runner build {name} && runner import {name}   (or `runner build {name} --import`)",
            )
        if latest.labels.get("runner.recipe.files") != files_hash(recipe):
            report.warn(f"recipe {name!r} has changed since its image was built: `runner build {name}` builds anew")
        return latest
    image = store.find(name) or store.find(f"localhost/runner/{name}")
    if image is None:
        raise unknown("recipe or image", name, recipe_names(project), "docker://REGISTRY#IMAGE:TAG fetches one")
    return image
