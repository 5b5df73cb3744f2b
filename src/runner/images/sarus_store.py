"""Sarus Suite's read-only store of images, and the records of what runner has put into it.

Only Sarus Suite's own tools may change the store, so every change is a call of `sarusctl`. A record beside the squashfs
files says which image the store got, because the store gives it another id and knows nothing of tags that move.
Source: CSCS documentation, container-engine/sarus-suite/user-guide.md (2026-08-20); sarus-suite/parallax@17b46be,
cmd/migration.go, cmd/rmi.go; sarus-suite/raster@20f75bd, src/config.rs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

from runner.errors import RunnerError
from runner.images.reference import file_name, parse_reference
from runner.images.squashfs_file import is_whole
from runner.machine import files, folders, process
from runner.machine.process import Completed
from runner.machine.report import Report

CONFIGURATION = Path("/etc/sarus-suite")
_SUFFIX = ".stored.json"
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_KEPT_LINES = 12


@dataclass(frozen=True)
class Row:
    """A row of `sarusctl images`."""

    name: str
    """the repository, without the tag"""
    tag: str
    id: str
    """12 hex digits; the store's id differs from podman's for the same image"""
    created: str
    """such as `2 weeks ago`"""
    size: str
    """podman's figure; for images of the store far too small"""
    read_only: bool
    """in the store; otherwise in podman's own storage"""

    @property
    def reference(self) -> str:
        """NAME:TAG."""
        return f"{self.name}:{self.tag}"


@dataclass(frozen=True)
class Stored:
    """An image that runner has put into the store, as its record describes it."""

    name: str
    """what `${RUNNER_IMAGES}/NAME.sqsh` calls it"""
    reference: str
    """the name that an EDF for Sarus Suite needs"""
    source: str
    """the image as the user named it"""
    id: str
    """the store's id, 12 hex digits"""
    image_digest: str
    """sha256 of the image's configuration in podman's storage, hex; empty if the store had the image before"""
    digest: str = ""
    """the digest of the image's manifest, `sha256:…`; empty if unknown"""
    architecture: str = ""
    """as OCI names it"""
    created: float = 0.0
    """seconds since 1970"""
    version: str = ""
    """the version of runner that wrote the record"""
    labels: Mapping[str, str] = field(default_factory=dict)
    """the image's labels that describe its build"""

    def record(self) -> dict[str, object]:
        """What --json prints."""
        return {
            **asdict(self),
            "created": datetime.fromtimestamp(self.created).astimezone().isoformat("T", "seconds"),
        }


def sarusctl(*words: str) -> str:
    """What `sarusctl WORDS` prints on stdout. Raises RunnerError if it is missing or fails."""
    need_sarusctl()
    done = process.run(("sarusctl", *words), check=False)
    if done.exit_code != 0:
        raise _failed(done)
    return done.stdout


def follow(words: Sequence[str], report: Report, env: Mapping[str, str] | None = None) -> None:
    """Run `sarusctl --verbose WORDS` and show its output while it runs. Raises RunnerError if it fails."""
    need_sarusctl()
    argv, last = ("sarusctl", "--verbose", *words), deque[str](maxlen=_KEPT_LINES)

    def line(text: str) -> None:
        last.append(text)
        report.passing(text)

    code = process.follow(argv, line, env=env)
    report.passing("")
    if code != 0:
        raise _failed(Completed(argv, code, "", "\n".join(last)))


def need_sarusctl() -> None:
    """Raise RunnerError if `sarusctl` is not on PATH."""
    if process.which("sarusctl") is None:
        raise RunnerError(
            "sarusctl is not on PATH",
            "the engine sarus runs images from Sarus Suite's store, which only sarusctl can list and change",
            "run the command on a login node of a cluster with Sarus Suite, or choose another --site",
        )


def _failed(done: Completed) -> RunnerError:
    error = process.failed(done)
    if not _FULL.search(error.why):
        return error
    fix = "if the store is full: runner gc, or runner gc IMAGE… (runner images lists them)"
    fix += "\nif podman's storage is full: podman image prune"
    return RunnerError("there is no space left for the image", error.why, fix)


def parse_images(text: str) -> tuple[Row, ...]:
    """The rows of `sarusctl images`. Without an image in the store, podman prints no column R/O.

    Raises RunnerError for any other table.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ()
    titles = re.split(r"\s{2,}", lines[0].strip())
    if titles not in (_TITLES, _TITLES[:-1]):
        raise _unreadable(lines[0])
    rows = []
    for line in lines[1:]:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) != len(titles):
            raise _unreadable(line)
        name, tag, image_id, created, size = cells[:5]
        rows.append(Row(name, tag, image_id, created, size, read_only=cells[5:] == ["true"]))
    return tuple(rows)


_TITLES = ["REPOSITORY", "TAG", "IMAGE ID", "CREATED", "SIZE", "R/O"]


def _unreadable(line: str) -> RunnerError:
    return RunnerError(
        "cannot read the output of `sarusctl images`",
        f"runner expects the columns {', '.join(_TITLES)}, but the output has the line {line!r}",
        "report this line; it may come from a newer version: sarusctl --version",
    )


def list_images() -> tuple[Row, ...]:
    """The images in the store and in podman's storage, newest first. Raises RunnerError if sarusctl cannot tell."""
    return parse_images(sarusctl("images"))


def find(reference: str, rows: Sequence[Row], *, read_only: bool = True) -> Row | None:
    """The row of an image in the store (or, without `read_only`, in podman's storage); None if it is not there.

    The store lists a short name under its full name too; a name without a registry may be a local image.
    """
    image = parse_reference(reference)
    names = {_full(reference)}
    if not image.separator:
        names.add(f"localhost/{image.repository}:{image.tag or 'latest'}")
    return next(
        (row for row in rows if row.read_only == read_only and _full(row.reference) in names), None
    )


def _full(reference: str) -> str:
    image = parse_reference(reference)
    library = "library/" if image.registry == "docker.io" and "/" not in image.repository else ""
    return f"{image.registry}/{library}{image.repository}:{image.tag or 'latest'}"


def remove(reference: str) -> None:
    """Remove an image from the store. Raises RunnerError if it is still there afterwards."""
    sarusctl("rmi", reference)
    if find(reference, list_images()):
        raise RunnerError(
            f"sarusctl did not remove {reference}",
            "the store still lists the image after `sarusctl rmi`",
            f"to see why: sarusctl --verbose rmi {reference}",
        )


def validate(path: Path) -> tuple[bool, str]:
    """Whether `sarusctl validate` accepts an EDF file, and what it prints. The path must be absolute."""
    done = process.run(("sarusctl", "validate", str(path)), check=False)
    words = "; ".join(
        line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()
    )
    return done.exit_code == 0, words or f"it printed nothing, exit code {done.exit_code}"


# ---- the files of the store


def store_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the store, from Sarus Suite's configuration; None if that cannot be read here."""
    text = ""
    try:
        for path in sorted(CONFIGURATION.glob("*.conf")):
            text = str(tomllib.loads(path.read_text("utf-8")).get("parallax_imagestore") or text)
    except (OSError, ValueError):
        return None
    # `$NAME` and `${NAME}`, as raster expands
    return Path(Template(text).safe_substitute(environ)) if text else None


def squash_file(store: Path | None, row: Row) -> Path | None:
    """The squashfs file of an image in the store; None if the store cannot be read here.

    Source: sarus-suite/parallax@17b46be: images have one layer, whose overlay link names the file in squash/.
    """
    if store is None:
        return None
    try:
        images: list[Mapping[str, Any]] = json.loads(
            (store / "overlay-images/images.json").read_text()
        )
        layer = next(image["layer"] for image in images if str(image["id"]).startswith(row.id))
        link = (store / "overlay" / str(layer) / "link").read_text().strip()
        return store / "squash" / f"{link}.squash"
    except (OSError, ValueError, TypeError, KeyError, StopIteration):
        return None


def is_half(row: Row, store: Path | None) -> bool:
    """Whether the store lists an image without a whole squashfs file, as after an interrupted migration."""
    path = squash_file(store, row)
    return path is not None and not is_whole(path)


# ---- runner's records


def name_in(image: str, images: Path | None) -> str:
    """NAME of `${RUNNER_IMAGES}/NAME.sqsh`, or of that path in the image folder; empty for every other image."""
    path = re.sub(r"^\$\{RUNNER_IMAGES(:-[^{}]*)?\}(?=/)", "", image)
    if path == image:
        path = "" if images is None or Path(image).parent != images else f"/{Path(image).name}"
    found = re.fullmatch(r"/([^/]+)\.(?:sqsh|squashfs)", path)
    return found[1] if found else ""


def reference_of(image: str, images: Path | None) -> str:
    """The reference in the store of `${RUNNER_IMAGES}/NAME.sqsh`; empty for every other image.

    If runner has not put NAME into the store, the result is the name that `runner build NAME` gives its newest image.
    """
    name = name_in(image, images)
    if not name:
        return ""
    stored = newest(images, name) if images else None
    return stored.reference if stored else f"localhost/runner/{name}:latest"


def record_path(images: Path, reference: str) -> Path:
    """The record of a reference in the image folder."""
    return images / f"{file_name(_full(reference))}{_SUFFIX}"


def read_record(images: Path, reference: str) -> Stored | None:
    """The record of a reference; None if runner has not put it into the store."""
    return _read(record_path(images, reference))


def write_record(images: Path, stored: Stored) -> None:
    """Write the record of an image. Raises RunnerError if the folder cannot be written to."""
    folders.make(images)
    files.write(record_path(images, stored.reference), json.dumps(asdict(stored), indent=2) + "\n")


def forget(images: Path, reference: str) -> None:
    """Remove the record of an image that is no longer in the store."""
    folders.discard(record_path(images, reference))


def list_records(images: Path) -> list[Stored]:
    """The records of an image folder, newest first."""
    read = map(_read, sorted(images.glob(f"*{_SUFFIX}")))
    found = [stored for stored in read if stored]
    return sorted(found, key=lambda stored: -stored.created)


def newest(images: Path, name: str) -> Stored | None:
    """The newest image with a NAME; None if there is none."""
    return next((stored for stored in list_records(images) if stored.name == name), None)


def _read(path: Path) -> Stored | None:
    try:
        data: Mapping[str, Any] = json.loads(path.read_text())
        return Stored(**{name: data[name] for name in Stored.__dataclass_fields__ if name in data})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
