"""images: the squashfs files of the image folder, and the runs that use them. gc: remove unused files, and old runs."""

from __future__ import annotations

import argparse
import os

from runner.commands.console import Console
from runner.commands.options import Verbs, add_wide, chosen_site, runs_folder
from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runner.runs.gc import ImageUse


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    images = subparsers.add_parser("images", parents=[common])
    images.add_argument("--json", action="store_true", help="print JSON")
    add_wide(images)
    images.set_defaults(run=list_images)
    gc = subparsers.add_parser("gc", parents=[common])
    named = "remove these squashfs files and the symlinks to them (default: all unused files)"
    gc.add_argument("files", nargs="*", metavar="FILE", help=named)
    gc.add_argument("--ended", action="store_true", help="also remove files used only by runs that have ended")
    what = gc.add_mutually_exclusive_group()
    what.add_argument(
        "--runs", action="store_true", help="remove runs that have ended, with their checkpoints, and no squashfs files"
    )
    what.add_argument("--code", action="store_true", help="remove only the code snapshots of runs that have ended")
    gc.add_argument("--older", metavar="AGE", help="with --runs or --code: only runs older than an age (30d) or a date")
    gc.add_argument("--tagged", action="store_true", help="with --runs or --code: also remove runs that have a tag")
    gc.add_argument("--dry-run", action="store_true", help="print what would be removed; remove nothing")
    gc.add_argument("--json", action="store_true", help="print JSON")
    gc.set_defaults(run=collect_garbage)


def list_images(args: argparse.Namespace, console: Console) -> int:
    """`runner images`: the squashfs files of the site's image folder."""
    from runner.commands.status import age

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
    from runner.images.squashfs_file import list_squashfs
    from runner.project import find_project
    from runner.runs.gc import uses_of
    from runner.runs.run import list_runs

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
    from runner.runs.gc import chosen_images, remove_image, unused_images

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
    from datetime import datetime

    from runner.machine import folders
    from runner.runs import snapshot
    from runner.runs.gc import empty_sweeps, remove, select, size_bytes
    from runner.runs.history import parse_since
    from runner.runs.run import list_runs

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
