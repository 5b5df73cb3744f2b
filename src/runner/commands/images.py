"""images: the squashfs files of the image folder, and the runs that use them. gc: remove unused files, and old runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import chosen_site, runs_folder
from runner.commands.status import age
from runner.errors import RunnerError
from runner.images.squashfs_file import list_squashfs
from runner.machine import folders
from runner.project import find_project
from runner.runs.gc import (
    ImageUse,
    chosen_images,
    empty_sweeps,
    remove,
    remove_image,
    select,
    size_bytes,
    unused_images,
    uses_of,
)
from runner.runs.history import parse_since
from runner.runs.run import list_runs


def list_images(args: argparse.Namespace, console: Console) -> int:
    """`runner images`: the squashfs files of the site's image folder."""
    folder, uses = image_uses(args, console)
    if args.json:
        console.answer_json(
            [{**use.squashfs.record(), "links": use.links, "runs": [run.name for run in use.runs]} for use in uses]
        )
        return 0
    console.say(f"folder: {folder}")
    if not uses:
        console.say("runner has not made any squashfs files yet; next: runner build && runner import")
        return 0
    rows = [
        (
            use.squashfs.path.name,
            f"{use.squashfs.size_bytes / 1e6:,.0f} MB",
            age(use.squashfs.created),
            ", ".join(use.links) or "-",
            use.shown_runs or "-",
            use.squashfs.source,
        )
        for use in uses
    ]
    console.table(("FILE", "SIZE", "AGE", "LINKS", "RUNS", "SOURCE"), rows)
    return 0


def image_uses(args: argparse.Namespace, console: Console) -> tuple[Path, tuple[ImageUse, ...]]:
    """The image folder of the site, and which runs use each of its files."""
    site = chosen_site(args, console)
    folder = site.images(os.environ)
    runs_folder = site.runs(os.environ, find_project())
    console.detail(f"runs: {runs_folder}")
    return folder, uses_of(list_squashfs(folder), list_runs(runs_folder))


def collect_garbage(args: argparse.Namespace, console: Console) -> int:
    """`runner gc`: prints the paths that were removed."""
    if args.runs or args.code:
        return collect_runs(args, console)
    from runner.images.importer.leftovers import clear_leftovers

    folder, uses = image_uses(args, console)
    console.say(f"folder: {folder}")
    going = chosen_images(args.files, uses, folder) if args.files else unused_images(uses, ended=args.ended)
    if not args.dry_run:
        clear_leftovers(folder, console)
        for use in going:
            remove_image(use)
    freed = sum(use.squashfs.size_bytes for use in going)
    what = f"{len(going)} of {len(uses)} files"
    return _print_removed([use.squashfs.path for use in going], what, freed, args, console)


def _print_removed(
    paths: Sequence[Path], what: str, freed_bytes: int, args: argparse.Namespace, console: Console, **more: object
) -> int:
    """Print the paths, and how much space they took; with --json also `more`."""
    if args.json:
        removed = {"removed": [str(path) for path in paths], "bytes": freed_bytes, "dry_run": args.dry_run}
        console.answer_json({**removed, **more})
        return 0
    for path in paths:
        console.answer(str(path))
    done = ", would be removed" if args.dry_run else " removed"
    console.say(f"{what}, {freed_bytes / 1e6:,.0f} MB{done}")
    return 0


def collect_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner gc --runs`, `--code`: prints the folders that were removed."""
    from runner.runs import snapshot

    if not args.older or args.files or args.ended:
        raise RunnerError(
            "cannot tell which runs to remove",
            "--runs and --code require --older, and cannot be combined with FILE or --ended",
            "runner gc --runs --older 30d --dry-run", exit_code=2,
        )  # fmt: skip
    folder = runs_folder(args.site)
    console.say(f"folder: {folder}")
    now = datetime.now().astimezone()
    going, kept = select(list_runs(folder), parse_since(args.older, now, "--older"), tagged=args.tagged)
    for run, why in kept:
        console.say(f"kept: {run.name}: {why}")
    paths = [run.code if args.code else run.folder for run in going]
    paths = [path for path in paths if path.is_dir() and any(path.iterdir())]
    freed = sum(size_bytes(path) for path in paths)
    if not args.dry_run:
        for path in paths:
            remove(path)
            if args.code:
                folders.make(path)  # containers mount this folder, so it must exist
        for path in (*empty_sweeps(folder), *snapshot.unused_stores(folder)):
            remove(path)
    what = f"{len(paths)} {'snapshots' if args.code else 'runs'}"
    return _print_removed(paths, what, freed, args, console, kept={run.name: why for run, why in kept})
