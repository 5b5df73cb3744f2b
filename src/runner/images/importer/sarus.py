"""Put an image into Sarus Suite's store: `sarusctl pull` from a registry, `sarusctl migrate` from podman's storage.

Both do nothing if the store already has an image of that name, even if the tag has moved since. runner's record of the
image tells, so that a job never runs an older image than the one that was just built.
Source: sarus-suite/parallax@17b46be, cmd/migration.go, checkIfMigrated.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from runner import __version__
from runner.errors import RunnerError
from runner.images import sarus_store
from runner.images.engine import podman_environment
from runner.images.importer.plan import ImportRequest
from runner.images.reference import Source, parse_source
from runner.images.sarus_store import Row, Stored
from runner.images.sources.engine_storage import Image, PodmanStore, find
from runner.images.sources.open import find_stored
from runner.images.squashfs_file import recorded_labels
from runner.machine import files
from runner.machine.report import Report


@dataclass(frozen=True)
class _Change:
    """What sarusctl has to do."""

    source: Source
    verb: str
    """`pull` or `migrate`"""
    reference: str
    env: Mapping[str, str]
    """variables for podman, which sarusctl starts"""


def store_image(request: ImportRequest, report: Report) -> Stored:
    """The image in Sarus Suite's store. It is pulled or migrated unless the store already has it.

    Raises RunnerError for an image that sarusctl cannot take, a full store, a tag that has moved, and a failed
    migration, of which nothing stays in the store.
    """
    sarus_store.need_sarusctl()
    change, image = _planned(request, report)
    with files.locked(sarus_store.record_path(request.images, change.reference)):
        row = _free_of_halves(change, request, report)
        if row is None or change.verb == "pull":
            image = _carry_out(change, row, request, report)
        assert image is not None  # a migration has it from the plan
        if row is None:
            return _recorded(change, image, request)
        return _already_there(change, row, image, request, report)


def explain(request: ImportRequest, report: Report) -> tuple[str, ...]:
    """What `store_image` would do. Changes nothing."""
    change, _ = _planned(request, report)
    row = sarus_store.find(change.reference, sarus_store.list_images())
    replaced = row is not None and (request.options.again or _is_half(row, request))
    if row and not replaced and change.verb == "migrate":
        return (
            f"image:  {change.reference}",
            f"reuses: {row.reference} ({row.id}) in the store",
            "writes: nothing",
        )
    verbs = ("rmi", change.verb) if replaced else (change.verb,)
    return (
        f"image:  {change.reference}",
        *(f"runs:   sarusctl {verb} {change.reference}" for verb in verbs),
    )


def _planned(request: ImportRequest, report: Report) -> tuple[_Change, Image | None]:
    """What to do, and podman's image for a migration."""
    source, options = parse_source(request.source, request.project.start), request.options
    if options.output:
        why = "Sarus Suite runs images from its own store, not from files"
        raise RunnerError(
            "-o FILE has no effect with the engine sarus", why, "leave out -o", exit_code=2
        )
    if source.scheme == "docker":
        if source.user:
            why = (
                f"{source} names a user, but sarusctl uses the login that `podman login` has saved"
            )
            raise RunnerError(
                f"sarusctl cannot log in as {source.user}",
                why,
                f"podman login {source.registry}, and leave out {source.user}@",
            )
        return _Change(
            source, "pull", source.reference, podman_environment(request.environ)[0]
        ), None
    if source.scheme not in ("", "podman"):
        raise RunnerError(
            f"sarusctl cannot take {source}",
            "Sarus Suite takes images from a registry or from podman's storage only",
            "put it into podman's storage first: podman pull SOURCE, then runner import podman://NAME",
        )
    engine, image = find_stored(source, replace(request.access, engine="podman"), report)
    content = str(image.labels.get("runner.content") or "")
    # the tag of the content never moves; `latest`, which a bare name means, does
    ours = image.name.startswith("localhost/runner/") and content
    return _Change(
        source, "migrate", f"{image.name}:{content}" if ours else image.reference, engine.env
    ), image


def _free_of_halves(change: _Change, request: ImportRequest, report: Report) -> Row | None:
    """The image's row in the store; None if it is not there. What is half there, or to be replaced, is removed."""
    row = sarus_store.find(change.reference, sarus_store.list_images())
    if row is None:
        return None
    half = _is_half(row, request)
    if not half and not request.options.again:
        return row
    if half:
        report.warn(
            f"{change.reference} is incomplete in the store, probably because an earlier import was interrupted: "
            "removing it"
        )
    sarus_store.remove(change.reference)
    return None


def _is_half(row: Row, request: ImportRequest) -> bool:
    return sarus_store.is_half(row, sarus_store.store_folder(request.environ))


def _carry_out(
    change: _Change, before: Row | None, request: ImportRequest, report: Report
) -> Image:
    """Run sarusctl. If that fails, and the store did not have the image before, nothing of it remains there."""
    with _undone(change, before):
        report.say(f"sarusctl {change.verb} {change.reference}")
        sarus_store.follow((change.verb, change.reference), report, change.env)
        row = sarus_store.find(change.reference, sarus_store.list_images())
        if row is None or _is_half(row, request):
            fault = "lists it without its squashfs file"
            if row is None:
                fault = "does not list the image"
            raise RunnerError(
                f"sarusctl did not put {change.reference} into the store",
                f"`sarusctl {change.verb}` reported success, but the store {fault}",
                f"to see why: sarusctl --verbose {change.verb} {change.reference}",
            )
    return find(PodmanStore({**request.environ, **change.env}), change.reference, "podman")


@contextmanager
def _undone(change: _Change, before: Row | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(RunnerError):
            if before is None and sarus_store.find(change.reference, sarus_store.list_images()):
                sarus_store.remove(change.reference)
        raise


def _already_there(
    change: _Change, row: Row, image: Image, request: ImportRequest, report: Report
) -> Stored:
    """The record of an image that the store had before. Raises RunnerError if its tag has moved since."""
    known = sarus_store.read_record(request.images, change.reference)
    ours = change.reference.startswith("localhost/runner/")
    if ours and image.labels.get("runner.content") == change.reference.rpartition(":")[2]:
        return known if known and known.id == row.id else _recorded(change, image, request)
    if known is None or known.id != row.id:
        report.warn(
            f"{row.reference} was already in the store; if its tag may have moved since then, add --force"
        )
        return _recorded(change, replace(image, id="", digest=""), request)
    if known.image_digest in ("", image.id):
        report.say(f"{change.reference}: already in the store; nothing to do")
        return known
    raise RunnerError(
        f"the tag {change.reference} has moved since its image was put into the store",
        f"the store has the older image {known.image_digest[:12]}, which `sarusctl {change.verb}` does not replace; "
        f"the tag now points to {image.id[:12]}",
        f"runner import --force {change.source}   (queued runs then use the new image too)\n"
        "or give the new image another tag",
    )


def _recorded(change: _Change, image: Image, request: ImportRequest) -> Stored:
    """The image in the store, with its record written."""
    row = sarus_store.find(change.reference, sarus_store.list_images())
    assert row is not None
    stored = Stored(
        name=replace(change.source, reference=change.reference).name,
        reference=change.reference,
        source=request.source,
        id=row.id,
        image_digest=image.id,
        digest=image.digest,
        architecture=image.architecture,
        created=time.time(),
        version=__version__,
        labels=recorded_labels(image.labels),
    )
    sarus_store.write_record(request.images, stored)
    return stored
