"""images: the squashfs files of the image folder, and the runs that use them. gc: remove unused files, and old runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import chosen_site, runs_folder
from runner.commands.status import age
from runner.environments.engines import choose, engine_of
from runner.errors import RunnerError
from runner.images import sarus_store
from runner.images.sarus_store import Row, Stored
from runner.images.squashfs_file import Squashfs, list_squashfs
from runner.machine import folders
from runner.project import find_project
from runner.runs.gc import (
    ImageUse,
    chosen_images,
    empty_sweeps,
    leftovers,
    remove,
    remove_image,
    select,
    size_bytes,
    unused_images,
    uses_of,
)
from runner.runs.history import parse_since
from runner.runs.run import list_runs
from runner.site import Site

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from typing import TypeVar

    Item = TypeVar("Item")


def list_images(args: argparse.Namespace, console: Console) -> int:
    """`runner images`: the squashfs files of the site's image folder, or the images in Sarus Suite's store."""
    site = chosen_site(args, console)
    folder, uses = image_uses(site, console)
    if _uses_store(site):
        return _list_store(uses, args, console)
    if args.json:
        console.answer_json(
            [
                {**use.image.record(), "links": use.links, "runs": [run.name for run in use.runs]}
                for use in uses
            ]
        )
        return 0
    console.say(f"folder: {folder}")
    if not uses:
        console.say(
            "runner has not made any squashfs files yet; next: runner build && runner import"
        )
        return 0
    rows = [
        (
            use.name,
            f"{_size_bytes(use.image, ()) / 1e6:,.0f} MB",
            age(use.image.created),
            ", ".join(use.links) or "-",
            use.shown_runs or "-",
            use.image.source,
        )
        for use in uses
    ]
    console.table(("FILE", "SIZE", "AGE", "LINKS", "RUNS", "SOURCE"), rows)
    return 0


def _uses_store(site: Site) -> bool:
    """Whether the site's images are in Sarus Suite's store."""
    return engine_of(choose(site)[0]).has_store


def image_uses(site: Site, console: Console) -> tuple[Path, tuple[ImageUse, ...]]:
    """The image folder of the site, and which runs use each image that `runner import` made."""
    folder = site.images(os.environ)
    runs_folder = site.runs(os.environ, find_project())
    console.detail(f"runs: {runs_folder}")
    found: list[tuple[Squashfs | Stored, tuple[str, ...]]] = [*list_squashfs(folder)]
    if _uses_store(site):
        records = sarus_store.list_records(folder)
        newest = {stored.name: stored for stored in reversed(records)}
        found = [
            (stored, (stored.name,) if newest[stored.name] == stored else ()) for stored in records
        ]
    return folder, uses_of(found, list_runs(runs_folder))


def _list_store(uses: Sequence[ImageUse], args: argparse.Namespace, console: Console) -> int:
    """The images in the store: what sarusctl says, the true size, and what runner knows."""
    store = sarus_store.store_folder(os.environ)
    by_reference = {use.name: use for use in uses}
    rows = []
    for row in sarus_store.list_images():
        if row.read_only and not sarus_store.is_half(row, store):
            file = sarus_store.squash_file(store, row)
            rows.append(
                (row, file.stat().st_size if file else None, by_reference.get(row.reference))
            )
    if args.json:
        console.answer_json(
            [
                {
                    **asdict(row),
                    "reference": row.reference,
                    "size_bytes": size,
                    "links": use.links if use else (),
                    "runs": [run.name for run in use.runs] if use else [],
                    "imported": use.image.record() if use else None,
                }
                for row, size, use in rows
            ]
        )
        return 0
    console.say(f"store: {store or 'its folder cannot be read here, so the sizes are unknown'}")
    if not rows:
        console.say("Sarus Suite's store has no images yet; next: runner build --import")
        return 0
    table = [
        (
            row.reference,
            row.id,
            f"{size / 1e6:,.0f} MB" if size is not None else "-",
            row.created,
            ", ".join(use.links) if use and use.links else "-",
            (use.shown_runs if use else "") or "-",
            use.image.source if use else "not by runner",
        )
        for row, size, use in rows
    ]
    console.table(("IMAGE", "ID", "SIZE", "AGE", "NAME", "RUNS", "SOURCE"), table)
    return 0


def collect_garbage(args: argparse.Namespace, console: Console) -> int:
    """`runner gc`: prints the paths that were removed."""
    if args.runs or args.code:
        return collect_runs(args, console)
    if args.older or args.tagged:
        raise RunnerError(
            f"{'--older' if args.older else '--tagged'} is given without --runs or --code",
            "it chooses runs, but `runner gc` alone removes images",
            "runner gc --runs --older 30d --dry-run",
            exit_code=2,
        )
    from runner.images.importer.leftovers import clear_leftovers

    site = chosen_site(args, console)
    folder, uses = image_uses(site, console)
    console.say(f"folder: {folder}")
    going: Sequence[ImageUse] = (
        chosen_images(args.files, uses, folder)
        if args.files
        else unused_images(uses, ended=args.ended)
    )
    rows = sarus_store.list_images() if _uses_store(site) else ()
    sizes = {use.name: _size_bytes(use.image, rows) for use in going}
    failures: list[RunnerError] = []
    if not args.dry_run:
        clear_leftovers(folder, console)
        going, failures = _remove_each(going, lambda use: remove_image(use, folder))
    freed = sum(sizes[use.name] for use in going)
    what = f"{len(going)} of {len(uses)} {'images' if _uses_store(site) else 'files'}"
    names = [use.image.path if isinstance(use.image, Squashfs) else use.name for use in going]
    return _print_removed(names, what, freed, args, console, failures)


def _remove_each(
    items: Sequence[Item], remove: Callable[[Item], None]
) -> tuple[list[Item], list[RunnerError]]:
    """What was removed, and the errors about the rest: one that cannot be removed keeps no others."""
    removed, failures = [], []
    for item in items:
        try:
            remove(item)
        except RunnerError as error:
            failures.append(error)
        else:
            removed.append(item)
    return removed, failures


def _size_bytes(image: Squashfs | Stored, rows: Sequence[Row]) -> int:
    """The size on disk; 0 if the store cannot be read here."""
    if isinstance(image, Squashfs):
        return image.size_bytes
    row = sarus_store.find(image.reference, rows)
    file = sarus_store.squash_file(sarus_store.store_folder(os.environ), row) if row else None
    return file.stat().st_size if file and file.exists() else 0


def _print_removed(
    paths: Sequence[Path | str],
    what: str,
    freed_bytes: int,
    args: argparse.Namespace,
    console: Console,
    failures: Sequence[RunnerError],
    **more: object,
) -> int:
    """Print the paths, and how much space they took; with --json also `more`. Then raises the last of the failures."""
    if args.json:
        removed = {
            "removed": [str(path) for path in paths],
            "bytes": freed_bytes,
            "dry_run": args.dry_run,
        }
        console.answer_json({**removed, **more})
    else:
        for path in paths:
            console.answer(str(path))
        done = ", would be removed" if args.dry_run else " removed"
        console.say(f"{what}, {freed_bytes / 1e6:,.0f} MB{done}")
    for failure in failures[:-1]:
        console.warn(f"{failure.what}: {failure.why}")
    if failures:
        raise failures[-1]
    return 0


def collect_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner gc --runs`, `--code`: prints the folders that were removed."""
    from runner.runs import snapshot

    if not args.older or args.files or args.ended:
        raise RunnerError(
            "cannot tell which runs to remove",
            "--runs and --code require --older, and cannot be combined with IMAGE or --ended",
            "runner gc --runs --older 30d --dry-run",
            exit_code=2,
        )
    folder = runs_folder(args.site)
    console.say(f"folder: {folder}")
    now = datetime.now().astimezone()
    going, kept = select(
        list_runs(folder), parse_since(args.older, now, "--older"), tagged=args.tagged
    )
    for run, why in kept:
        console.say(f"kept: {run.name}: {why}")
    paths = [run.code if args.code else run.folder for run in going]
    paths = [path for path in paths if path.is_dir() and any(path.iterdir())]
    sizes = {path: size_bytes(path) for path in paths}
    failures: list[RunnerError] = []
    if not args.dry_run:

        def remove_path(path: Path) -> None:
            remove(path)
            if args.code:
                folders.make(path)  # containers mount this folder, so it must exist

        paths, failures = _remove_each(paths, remove_path)
        for path in (*empty_sweeps(folder), *snapshot.unused_stores(folder)):
            remove(path)
        for path in leftovers(folder):
            folders.remove(path)
    what = f"{len(paths)} {'snapshots' if args.code else 'runs'}"
    freed, reasons = sum(sizes[path] for path in paths), {run.name: why for run, why in kept}
    return _print_removed(paths, what, freed, args, console, failures, kept=reasons)
