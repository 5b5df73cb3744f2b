"""Import an image as one squashfs file: its names, its lock and its sidecar. The file appears only when complete."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.images.importer import enroot_files
from runner.images.importer.layer_index import is_index
from runner.images.importer.leftovers import LAYERS, SIDECAR, SQUASHFS, SUFFIX, clear_leftovers
from runner.images.importer.pack import Packed, index_of, pack_image
from runner.images.importer.plan import (
    ImportOptions,
    ImportPlan,
    ImportRequest,
    plan_import,
    previous_index,
    stripe,
)
from runner.images.reference import parse_source, registry_of
from runner.images.sources.open import open_image
from runner.images.squashfs_file import (
    Squashfs,
    as_json,
    index_path,
    is_sidecar,
    is_whole,
    link_is_ours,
    read_squashfs,
    recorded_labels,
    sha256_of,
    sidecar,
)
from runner.machine import files, folders
from runner.machine.report import Report

# bytes: sha256 takes 0.6 to 2.5 s a gigabyte, and the rest of an incremental import 1 to 2 s a gigabyte
_QUICK_TO_HASH = 1 << 30
# mode bits of what is never changed: the umask's, and no other user writes (else no later import trusts its layers)
_MASK = 0o755


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    squashfs: Squashfs
    made: bool
    """false if a file with the same content already existed"""
    packed: Packed = field(default_factory=Packed)


def import_image(request: ImportRequest, report: Report) -> Imported:
    """The squashfs file of an image. It is written unless a file with the same content exists.

    Raises RunnerError for an unknown or foreign image, an unsuitable folder or a full disk. No partial file is left
    behind.
    """
    options = request.options
    with _planned(request, report) as plan:
        # without a lock, because the folder may be read-only for this user
        if plan.reuse and is_whole(plan.target):
            return _found(plan.reuse, plan, report)
        with files.explained(f"write {plan.target}"), files.locked(plan.target) as locked:
            if not locked:
                report.warn(
                    f"{plan.target.parent} does not support file locks: simultaneous imports repeat the work"
                )
            return _import_locked(plan, report, options, held=plan.target if locked else None)


def explain_import(request: ImportRequest, report: Report) -> tuple[str, ...]:
    """What an import would read, reuse and write. Reads no layers, and writes nothing."""
    with _planned(request, report) as plan, previous_index(plan, request.options) as previous:
        image, target = plan.image, plan.target
        known = previous.records if previous else {}
        count, size = _layers(len(image.layers)), image.size_bytes
        about = f"image:  {image.reference} ({count}, {size / 1e6:,.0f} MB, {image.architecture})"
        if plan.reuse:
            return (about, f"reuses: {target} (the same content)", "writes: nothing")
        same = len([layer for layer in image.layers if layer.diff_id in known])
        reuses = "nothing"
        if previous and same:
            reuses = f"{_layers(same)} of {Path(previous.squashfs.name).name}"
        link = "" if plan.link == target else f" and {plan.link} -> {target.name}"
        return (
            about,
            f"reads:  {_layers(len(image.layers) - same)}",
            f"reuses: {reuses}",
            f"writes: {target}, {sidecar(target).name}{link}",
        )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


@contextmanager
def _planned(request: ImportRequest, report: Report) -> Iterator[ImportPlan]:
    """The plan of the import, with the image open."""
    source = parse_source(request.source, request.project.start)
    with open_image(source, request.access, report) as image:
        plan = plan_import(source.name, image, request)
        _refuse_foreign(plan, request.options)
        yield plan


def _refuse_foreign(plan: ImportPlan, options: ImportOptions) -> None:
    """Raise RunnerError if the import would replace a file or link that belongs to another image or program."""
    target = plan.target
    if options.output and not plan.reuse:
        if not options.importer:  # in its folder, nothing belongs to another program
            _refuse_output(target)
        for path, ours in (
            (sidecar(target), is_sidecar(sidecar(target), target)),
            (index_path(target), is_index(index_path(target))),
        ):
            if os.path.lexists(path) and not ours:
                raise RunnerError(
                    f"{path} already exists, and `runner import` did not write it for {target.name}",
                    f"`import -o {target.name}` also writes {sidecar(target).name} and {index_path(target).name}",
                    f"choose another name for -o, or move {path.name} away",
                )
    if plan.link == target or not os.path.lexists(plan.link):
        return
    files.refuse_to_replace(plan.link)
    if not link_is_ours(plan.link):
        raise RunnerError(
            f"{plan.link} is a symlink that `runner import` did not create",
            f"it points to {plan.link.readlink()}",
            f"import with -o FILE, or move the link out of the way: mv {plan.link} {plan.link}.old",
        )
    other = read_squashfs(plan.link.resolve())
    if other is None:
        return
    whose = _other_image(other, plan)
    if whose:
        raise RunnerError(
            f"{plan.link.name} belongs to another image",
            f"it points to {other.path.name}, which was {whose} ({other.source})",
            f"import with -o FILE, or free the name for this image: rm {plan.link}",
        )


def _refuse_output(target: Path) -> None:
    """Raise RunnerError for a folder and for a symlink, which even --force does not replace."""
    if target.is_dir():
        raise RunnerError(
            f"{target} is a folder", "-o names the squashfs file to write", f"-o {target}/NAME.sqsh"
        )
    if target.is_symlink():
        raise RunnerError(
            f"{target} is a symlink to {target.readlink()}",
            "`import -o FILE` writes a file, and never replaces a symlink",
            f"choose another name for -o, or remove the link: rm {target}",
        )


def _other_image(linked: Squashfs, plan: ImportPlan) -> str:
    """How the linked file was made, if its recipe or registry is not that of the new file; else empty."""
    before = str(linked.labels.get("runner.recipe") or "")
    after = str((plan.image.config.get("Labels") or {}).get("runner.recipe") or "")
    if before != after:
        return f"built from the recipe {before!r}" if before else "not built from a recipe"
    if before:
        return ""
    registry = registry_of(linked.source)
    differs = registry and registry_of(plan.source) not in ("", registry)
    return f"pulled from {registry}" if differs else ""


def _found(found: Squashfs, plan: ImportPlan, report: Report) -> Imported:
    """The result if the same image has already been imported."""
    owner = files.owner(plan.target)
    report.say(f"{plan.target}: already imported{f' by {owner}' if owner else ''}; nothing to do")
    return Imported(_with_link(found, plan, report), made=False)


def _import_locked(
    plan: ImportPlan, report: Report, options: ImportOptions, held: Path | None
) -> Imported:
    """The import itself, with the lock of its target held. `held` is None if the file system has no locks."""
    clear_leftovers(plan.target.parent, report, held)
    # another import may have written it while this one waited for the lock
    found = read_squashfs(plan.target)
    if found and found.content == plan.content and not options.again:
        if is_whole(plan.target):
            return _found(found, plan, report)
        report.warn(
            f"{plan.target} is damaged (its superblock does not match its size); importing the image again"
        )
    elif plan.target.exists() and found is None and not options.force and options.output:
        raise RunnerError(
            f"{plan.target} already exists",
            f"no {sidecar(plan.target).name} describes it, so `runner import` may not have created it",
            "replace it: --force",
        )
    squashfs, packed = _make(plan, report, options)
    return Imported(_with_link(squashfs, plan, report), made=True, packed=packed)


def _make(plan: ImportPlan, report: Report, options: ImportOptions) -> tuple[Squashfs, Packed]:
    image = plan.image
    room = os.statvfs(plan.target.parent)
    if options.check_room and room.f_bavail * room.f_frsize < image.size_bytes:
        raise OSError(
            errno.ENOSPC,
            f"No space left on device for an image of {image.size_bytes / 1e6:,.0f} MB",
        )
    omitted = enroot_files.multiline_variables(image.config)
    if omitted:
        report.warn(
            f"variables with line breaks cannot be written to the image's /etc/environment: {', '.join(omitted)}"
        )
    with ExitStack() as stack:
        previous = stack.enter_context(previous_index(plan, options))
        if previous:
            report.detail(f"layers that have not changed are copied from {previous.squashfs.name}")
        hidden = stack.enter_context(folders.beside(plan.target, SUFFIX))
        unfinished, index, described = hidden / SQUASHFS, hidden / LAYERS, hidden / SIDECAR
        for line in stripe(unfinished, options.striping):
            report.say(line)
        total = image.size_bytes or None
        with (
            unfinished.open("w+b") as file,
            report.bar(f"packing {image.reference}", total) as advance,
        ):
            own = enroot_files.metadata_files(image.config)
            packed = pack_image(image, file, own, plan.packing, previous, advance)
            with index.open("wb") as target:
                index_of(packed, file, plan.packing, target)
        with packed.phase("disk"):
            files.sync(unfinished)
        squashfs = _described(plan, unfinished, packed, options)
        # before the file itself: a sidecar alone is harmless, but a file alone would count as a foreign file
        described.write_text(as_json(squashfs))
        files.publish(described, sidecar(plan.target), mask=_MASK)
        files.publish(index, index_path(plan.target), mask=_MASK)
        files.publish(unfinished, plan.target, mask=_MASK)
        if previous and packed.layers_damaged:
            report.warn(
                f"{previous.squashfs.name} is damaged: {packed.layers_damaged} of its layers were read again from the "
                "image; remove the file, or import its image with --no-cache"
            )
    if trace := plan.packing.trace:
        report.say(
            f"{packed.traced:,} of the {len(trace):,} files of the trace are stored together"
        )
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in packed.seconds.items())
    report.detail(
        f"{packed.layers} layers ({packed.layers_reused} copied), {packed.entries} entries: {phases}"
    )
    return squashfs, packed


def _described(plan: ImportPlan, made: Path, packed: Packed, options: ImportOptions) -> Squashfs:
    size = made.stat().st_size
    sha256 = ""
    if size < _QUICK_TO_HASH and not options.importer:  # no launch asks for it there
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
        importer=options.importer,
    )


def _with_link(squashfs: Squashfs, plan: ImportPlan, report: Report) -> Squashfs:
    """Point the stable symlink to the file, unless another user owns the link, which then stays."""
    name = plan.target.name
    if plan.link != plan.target and not (
        plan.link.is_symlink() and str(plan.link.readlink()) == name
    ):
        try:
            files.link(plan.link, name)
        except OSError as error:
            report.warn(f"cannot make {plan.link} point to {name}: {error.strerror}")
            return replace(squashfs, link=plan.target)
    return replace(squashfs, link=plan.link)
