"""images: the squashfs files of the image folder, and the runs that use them."""

from __future__ import annotations

import argparse
import os

from runner.commands.options import add_wide, chosen_site

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from pathlib import Path

    from runner.commands.console import Console
    from runner.commands.options import Verbs
    from runner.runs.gc import ImageUse


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    images = subparsers.add_parser("images", parents=[common])
    images.add_argument("--json", action="store_true", help="print JSON")
    add_wide(images)
    images.set_defaults(run=list_images)


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
