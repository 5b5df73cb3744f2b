"""Which runs use which squashfs files, and which files may be removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images.squashfs_file import Squashfs, index_path, sidecar
from runner.machine import files
from runner.runs.run import Run
from runner.runs.state.status import ask

_SHOWN = 3


@dataclass(frozen=True)
class ImageUse:
    """A squashfs file, the symlinks to it, and the runs that name it."""

    squashfs: Squashfs
    links: tuple[str, ...]
    runs: tuple[Run, ...]
    active: tuple[str, ...]
    """the names of those that wait or run, or of which the scheduler does not say"""

    @property
    def shown_runs(self) -> str:
        """The newest runs, in one cell of a table."""
        names = [run.name for run in reversed(self.runs)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more


def uses_of(found: Sequence[tuple[Squashfs, tuple[str, ...]]], runs: Sequence[Run]) -> tuple[ImageUse, ...]:
    """Who uses each file. The scheduler is asked once, about the runs that name one of them."""
    names = {str(squashfs.path.resolve()): squashfs.path for squashfs, _ in found}
    naming = [run for run in runs if run.image and str(Path(run.image).resolve()) in names]
    active = {status.run.name for status in ask(naming) if status.active or status.state == "UNKNOWN"}
    by_path: dict[str, list[Run]] = {}
    for run in naming:
        by_path.setdefault(str(Path(run.image).resolve()), []).append(run)
    uses = []
    for squashfs, links in found:
        mine = tuple(by_path.get(str(squashfs.path.resolve()), ()))
        uses.append(ImageUse(squashfs, links, mine, tuple(run.name for run in mine if run.name in active)))
    return tuple(uses)


def unused(uses: Sequence[ImageUse], *, ended: bool) -> tuple[ImageUse, ...]:
    """Those that no symlink and no run names; with `ended`, also those that only runs name which are over."""
    return tuple(use for use in uses if not use.links and not use.active and (ended or not use.runs))


def chosen(words: Sequence[str], uses: Sequence[ImageUse], folder: Path) -> tuple[ImageUse, ...]:
    """The files that a user named. Raises RunnerError for an unknown one, and for one that a job waits for or uses."""
    found: list[ImageUse] = []
    for word in words:
        path = Path(word).expanduser()
        path = path if path.is_absolute() or path.exists() else folder / word
        match = next((use for use in uses if use.squashfs.path.resolve() == path.resolve()), None)
        if match is None:
            names = [use.squashfs.path.name for use in uses]
            raise unknown("squashfs file", word, names, "`runner images` lists those that `runner import` made")
        if match.active:
            raise RunnerError(
                f"{match.squashfs.path.name} is in use",
                f"queued or running: {', '.join(match.active)}",
                f"wait for it, or end it: runner cancel {match.active[0]}",
            )
        if match not in found:
            found.append(match)
    return tuple(found)


def remove(use: ImageUse) -> None:
    """Remove a file of ours, its symlinks, its index and its sidecar, under its lock."""
    path = use.squashfs.path
    try:
        with files.locked(path, timeout_seconds=5):
            for name in use.links:
                (path.parent / name).unlink(missing_ok=True)
            for part in (path, index_path(path), sidecar(path)):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise files.explain(error, f"remove {path}") from error
