"""Select the runs and code snapshots to remove: ended, old enough, and not used by an active job."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images import sarus_store
from runner.images.sarus_store import Stored
from runner.images.squashfs_file import Squashfs, index_path, link_is_ours, sidecar
from runner.machine import files, folders
from runner.runs.run import PREPARING, RECORD, Run, members
from runner.runs.schedulers.scheduler import by_scheduler
from runner.runs.status import ask

_QUIET_SECONDS = 86_400
"""an attempt without an exit code counts as running until its folder has not changed for this long"""
_LAUNCH_SECONDS = 3600
"""for this long, a launch that is not submitted yet counts as in progress"""
_GOING = ".going-"
"""the beginning of the name of a folder while it is being removed"""


def select(
    runs: Sequence[Run], before: datetime, *, tagged: bool
) -> tuple[list[Run], list[tuple[Run, str]]]:
    """(the runs to remove, the runs to keep with the reason) of the runs launched before a moment."""
    # a run whose record has no valid time is kept
    old = [run for run in runs if run.launched is not None and run.launched < before.timestamp()]
    live = _live(runs)
    needed = {name for run in runs if run.name in live for name in run.after}
    going: list[Run] = []
    kept: list[tuple[Run, str]] = []
    for run in old:
        why = live.get(run.name, "")
        why = why or (
            "a queued or running run was launched after it (--after)" if run.name in needed else ""
        )
        why = why or (f"tagged {', '.join(run.tags)}" if run.tags and not tagged else "")
        if why:
            kept.append((run, why))
        else:
            going.append(run)
    return going, kept


def _live(runs: Sequence[Run]) -> dict[str, str]:
    """Name -> reason, for the runs that count as active."""
    found: dict[str, str] = {}
    asked = {run.scheduler: scheduler.work_folders() for scheduler, (run, *_) in by_scheduler(runs)}
    work = {folder for folders, _ in asked.values() for folder in folders}
    for status in ask(runs):
        run = status.run
        if status.may_be_active:
            found[run.name] = f"it is {status.state}"
        elif trouble := asked[run.scheduler][1]:
            found[run.name] = trouble
        elif run.folder.resolve() in work:
            found[run.name] = "a queued or running job works in its folder"
        elif (
            run.state == PREPARING and time.time() - (run.launched or time.time()) < _LAUNCH_SECONDS
        ):
            found[run.name] = "its launch began less than an hour ago"
        elif _goes_on(run):
            found[run.name] = (
                "its newest attempt has no exit code, and wrote to its folder within the last day"
            )
    return found


def _goes_on(run: Run) -> bool:
    newest = run.newest
    if newest is None or newest.time("exit_code") is not None:
        return False
    return time.time() - max(newest.newest_change, files.modified(run.log) or 0.0) < _QUIET_SECONDS


def size_bytes(folder: Path) -> int:
    """The size of a folder on disk, without following symlinks."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(f"{path}/{name}").st_size
            except OSError:
                continue
    return total


def remove(path: Path) -> None:
    """Remove a run folder. Rename it first, so that an incomplete removal never looks like a run."""
    hidden = path.parent / f"{_GOING}{path.name}"
    folders.remove(hidden)  # what an interrupted removal has left
    folders.move(path, hidden)
    folders.remove(hidden)


def leftovers(runs_folder: Path) -> tuple[Path, ...]:
    """What interrupted removals have left, in the folder of runs and in those of the runs."""
    return (*runs_folder.glob(f"{_GOING}*"), *runs_folder.glob(f"*/{_GOING}*"))


def empty_sweeps(runs_folder: Path) -> tuple[Path, ...]:
    """The folders of sweeps and arrays that have no runs left."""
    found = {
        path.parent
        for name in ("array.sbatch", "submit.sh")
        for path in runs_folder.glob(f"*/{name}")
    }
    return tuple(
        folder for folder in sorted(found) if not (folder / RECORD).exists() and not members(folder)
    )


_SHOWN = 3


@dataclass(frozen=True)
class ImageUse:
    """An imported image, the names that stand for its newest version, and the runs that use it."""

    image: Squashfs | Stored
    links: tuple[str, ...]
    """the symlinks to a squashfs file; NAME for the newest image of that name in Sarus Suite's store"""
    runs: tuple[Run, ...]
    active: tuple[str, ...]
    """the names of the runs that wait or run, or whose state the scheduler does not know"""

    @property
    def name(self) -> str:
        """The file's name, or the reference in the store."""
        return self.image.path.name if isinstance(self.image, Squashfs) else self.image.reference

    @property
    def shown_runs(self) -> str:
        """The newest runs, formatted for a table cell."""
        names = [run.name for run in reversed(self.runs)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more


def uses_of(
    found: Sequence[tuple[Squashfs | Stored, tuple[str, ...]]], runs: Sequence[Run]
) -> tuple[ImageUse, ...]:
    """The runs that use each image. Asks the scheduler once, about the runs that use any of the images."""
    by_image: dict[str, list[Run]] = {_key(image): [] for image, _ in found}
    for run in runs:
        key = str(Path(run.image).resolve()) if run.image.startswith("/") else run.image
        if key in by_image:
            by_image[key].append(run)
    asked = ask([run for some in by_image.values() for run in some])
    active = {status.run.name for status in asked if status.may_be_active}
    uses = []
    for image, links in found:
        mine = by_image[_key(image)]
        uses.append(
            ImageUse(
                image, links, tuple(mine), tuple(run.name for run in mine if run.name in active)
            )
        )
    return tuple(uses)


def _key(image: Squashfs | Stored) -> str:
    """What `image` of a run says, without symlinks."""
    return str(image.path.resolve()) if isinstance(image, Squashfs) else image.reference


def unused_images(uses: Sequence[ImageUse], *, ended: bool) -> tuple[ImageUse, ...]:
    """The images without symlinks and runs; with `ended`, also those that are used only by runs that have ended."""
    return tuple(
        use for use in uses if not use.links and not use.active and (ended or not use.runs)
    )


def chosen_images(
    words: Sequence[str], uses: Sequence[ImageUse], folder: Path
) -> tuple[ImageUse, ...]:
    """The images that the user named. Raises RunnerError for an unknown image, and for one that an active run uses."""
    found: list[ImageUse] = []
    for word in words:
        path = Path(word).expanduser()
        path = path if path.is_absolute() or path.exists() else folder / word
        match = next((use for use in uses if _key(use.image) in (str(path.resolve()), word)), None)
        if match is None:
            names = [use.name for use in uses]
            raise unknown(
                "image", word, names, "`runner images` lists those that `runner import` made"
            )
        if match.active:
            raise RunnerError(
                f"{match.name} is in use",
                f"these runs use it and, as far as runner knows, have not ended: {', '.join(match.active)}",
                f"wait until they have ended, or end them: runner cancel {' '.join(match.active)}",
            )
        if match not in found:
            found.append(match)
    return tuple(found)


def remove_image(use: ImageUse, folder: Path) -> None:
    """Remove an imported image under its lock, with everything that `import` wrote for it in the image folder."""
    image = use.image
    if not isinstance(image, Squashfs):
        with files.locked(sarus_store.record_path(folder, image.reference), timeout_seconds=5):
            if sarus_store.find(image.reference, sarus_store.list_images()):
                sarus_store.remove(image.reference)
            sarus_store.forget(folder, image.reference)
        return
    path = image.path
    with files.explained(f"remove {path}"), files.locked(path, timeout_seconds=5):
        for link in (path.parent / name for name in use.links):
            if link_is_ours(link):
                folders.discard(link)
        for part in (path, index_path(path), sidecar(path)):
            folders.discard(part)
