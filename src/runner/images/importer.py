"""From an image to one squashfs file: its names, its lock, its sidecar, and that it appears whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.images.importing import metadata, striping
from runner.images.importing.leftovers import clear_leftovers
from runner.images.importing.locate import Target, opened
from runner.images.importing.pack import Packed, index_of, pack_image
from runner.images.importing.plan import ImportOptions, ImportPlan, plan_import, previous_index
from runner.images.oci.digest import sha256_of
from runner.images.source import parse_source
from runner.images.squashfs_file import (
    Squashfs,
    as_json,
    index_path,
    is_whole,
    read_squashfs,
    recorded_labels,
    sidecar,
)
from runner.machine import files, probe
from runner.machine.report import Report
from runner.project import Project

# bytes: sha256 takes 0.6 to 2.5 s a gigabyte, and the rest of an incremental import 1 to 2 s a gigabyte
_QUICK_TO_HASH = 1 << 30


@dataclass(frozen=True)
class Imported:
    """What an import gave."""

    squashfs: Squashfs
    made: bool
    """false where the same content was there already"""
    packed: Packed = field(default_factory=Packed)


def import_image(
    source: str,
    images: Path,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: ImportOptions,
) -> Imported:
    """The squashfs file of an image in the folder `images`; made where the same content is not there yet.

    Raises RunnerError for an unknown or foreign image, a refused folder, a full disk; nothing half-made is left.
    """
    options.check()
    with _planned(source, images, project, environ, report, options) as plan:
        try:
            with files.locked(plan.target):
                return _import_locked(plan, environ, report, options)
        except OSError as error:
            raise files.explain(error, f"write {plan.target}") from error


def explain_import(
    source: str, images: Path, project: Project, environ: Mapping[str, str], report: Report, options: ImportOptions
) -> tuple[str, ...]:
    """What an import would read, reuse and write; no layer is read, nothing is written."""
    options.check()
    with _planned(source, images, project, environ, report, options) as plan, previous_index(plan, options) as previous:
        image = plan.image
        known = previous.records if previous else {}
        size = image.size_bytes
        reads = f"reads:  {image.reference} ({len(image.layers)} layers, {size / 1e6:,.0f} MB, {image.architecture})"
        if plan.reuse:
            return (reads, f"reuses: {plan.target} (the same content)", "writes: nothing")
        same = sum(layer.diff_id in known for layer in image.layers)
        reuses = f"{same} layers of {Path(previous.squashfs.name).name}" if previous and same else "nothing"
        link = "" if plan.link == plan.target else f" and {plan.link} -> {plan.target.name}"
        return (reads, f"reuses: {reuses}", f"writes: {plan.target}, {sidecar(plan.target).name}{link}")


@contextmanager
def _planned(
    source: str,
    images: Path,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: ImportOptions,
) -> Iterator[ImportPlan]:
    """What to read and write, the image open. Raises RunnerError for an image of another architecture."""
    parsed = parse_source(source, project.start)
    wanted = options.architecture or probe.architecture()
    target = Target()
    with opened(parsed, wanted, project, environ, report, options, target) as image:
        if image.architecture and image.architecture != wanted:
            raise RunnerError(
                f"{source!r} is an image for {image.architecture}",
                f"it would end in `exec format error` on the nodes, which are {wanted}",
                f"build or pull it for linux/{wanted}, or name a site with {image.architecture} nodes (--site)",
            )
        plan = plan_import(parsed.name, source, image, images, options, environ)
        target.path = plan.target
        yield plan


def _import_locked(plan: ImportPlan, environ: Mapping[str, str], report: Report, options: ImportOptions) -> Imported:
    """The import itself, under the lock of its target."""
    clear_leftovers(plan.target.parent, report, held=plan.target)
    found = read_squashfs(plan.target)  # another import may have made it while we waited
    if found and found.content == plan.content and not options.again:
        if is_whole(plan.target):
            report.say(f"{plan.target}: the same image was imported before")
            return Imported(_with_link(found, plan), made=False)
        report.warn(f"{plan.target} is damaged (its superblock does not fit its size): it is made anew")
    elif plan.target.exists() and found is None and not options.again and options.output:
        raise RunnerError(
            f"{plan.target} is there already", "it is not a file that `runner import` made", "--force replaces it"
        )
    squashfs, packed = _make(plan, report, options)
    return Imported(_with_link(squashfs, plan), made=True, packed=packed)


def _make(plan: ImportPlan, report: Report, options: ImportOptions) -> tuple[Squashfs, Packed]:
    image = plan.image
    left_out = metadata.unsayable(image.config)
    if left_out:
        report.warn(f"variables with a line break cannot stand in /etc/environment: {', '.join(left_out)}")
    with ExitStack() as stack:
        previous = stack.enter_context(previous_index(plan, options))
        if previous:
            report.detail(f"layers that have not changed are copied from {previous.squashfs.name}")
        unfinished = stack.enter_context(files.partial(plan.target))
        index = stack.enter_context(files.partial(index_path(plan.target)))
        for line in striping.stripe(unfinished):
            report.say(line)
        total = image.size_bytes or None
        with unfinished.open("w+b") as file, report.bar(f"packing {image.reference}", total) as advance:
            own = metadata.metadata_files(image.config)
            packed = pack_image(image, file, own, plan.packing, previous, advance)
            with index.open("wb") as target:
                index_of(packed, file, plan.packing, target)
        unfinished.chmod(0o644)
        with packed.phase("disk"):
            files.sync(unfinished)
        squashfs = _described(plan, unfinished, packed)
        # before the file itself: a sidecar alone says nothing, a file alone would be taken for somebody else's
        files.write(sidecar(plan.target), as_json(squashfs))
    _say_seconds(packed, report)
    return squashfs, packed


def _described(plan: ImportPlan, made: Path, packed: Packed) -> Squashfs:
    size = made.stat().st_size
    sha256 = ""
    if size < _QUICK_TO_HASH:
        with packed.phase("sha256"):
            sha256 = sha256_of(made)
    return Squashfs(
        path=plan.target,
        link=plan.link,
        image_digest=plan.image.id,
        sha256=sha256,
        size_bytes=size,
        architecture=plan.image.architecture,
        source=plan.source,
        created=time.time(),
        version=__version__,
        compression=str(plan.packing.compression),
        content=plan.content,
        labels=recorded_labels(plan.image.config.get("Labels") or {}),
        settings=plan.packing.settings,
        digest=plan.image.digest,
    )


def _say_seconds(packed: Packed, report: Report) -> None:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in packed.seconds.items())
    report.detail(f"{packed.layers} layers ({packed.layers_reused} copied), {packed.entries} entries: {phases}")


def _with_link(squashfs: Squashfs, plan: ImportPlan) -> Squashfs:
    """The file with its stable symlink pointing to it."""
    if plan.link != plan.target:
        files.link(plan.link, plan.target.name)
    return replace(squashfs, link=plan.link)
