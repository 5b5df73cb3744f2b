"""site list, site show."""

from __future__ import annotations

import argparse
import os

from runner.commands.console import Console
from runner.commands.options import Verbs, add_wide

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.site import Site


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    site = subparsers.add_parser("site", parents=[common])
    actions = site.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", parents=[common], help="list the known sites")
    show = actions.add_parser(
        "show", parents=[common], help="print the values of a site, and the source of each value"
    )
    show.add_argument("name", nargs="?", metavar="NAME", help="a site (default: the site in use)")
    for action, function in ((listing, list_sites), (show, show_site)):
        action.add_argument("--json", action="store_true", help="print JSON")
        add_wide(action)
        action.set_defaults(run=function)


def list_sites(args: argparse.Namespace, console: Console) -> int:
    """`runner site list`."""
    from runner.detection import find_site
    from runner.site_files import load_site, site_names

    used, why = find_site(args.site, os.environ)
    sites = [load_site(name, os.environ) for name in site_names(os.environ)]
    if args.json:
        keys = ("name", "summary", "scheduler", "engine")
        console.answer_json(
            [{key: getattr(site, key) for key in keys} | {"used": site == used} for site in sites]
        )
        return 0
    rows = [
        (
            "*" if site.name == used.name else "",
            site.name,
            site.scheduler,
            site.engine,
            site.summary,
        )
        for site in sites
    ]
    console.table(("", "SITE", "SCHEDULER", "ENGINE", "WHAT"), rows)
    console.say(f"* marks the site in use ({why})")
    return 0


def show_site(args: argparse.Namespace, console: Console) -> int:
    """`runner site show`: every value with its source and date."""
    from runner.detection import find_site
    from runner.project import shipped_folder
    from runner.site import VALUES

    site, why = find_site(args.name or args.site, os.environ)
    console.say(f"site {site.name} ({'as requested' if args.name else why}): {site.summary}")
    if args.json:
        values = {
            key: {"value": getattr(site, key), "from": str(site.origins[key])} | _items(site, key)
            for key in VALUES
            if key in site.origins
        }
        console.answer_json(
            {"name": site.name, "summary": site.summary, "why": why, "values": values}
        )
        return 0
    shipped = f"{shipped_folder()}/"
    rows = [
        (name, value, source.replace(shipped, "shipped:"))
        for key in VALUES
        if key in site.origins
        for name, value, source in _rows(site, key)
    ]
    console.table(("KEY", "VALUE", "FROM"), rows, wrap=True)
    unknown = [
        key
        for key in (
            "account",
            "partition",
            "gpus_per_node",
            "cpus_per_node",
            "memory",
            "architecture",
        )
        if getattr(site, key) is None and not (key == "memory" and site.memory_per_gpu)
    ]
    if unknown and not site.is_local:
        console.say(
            f"not set: {', '.join(unknown)}; set them in the site file"
            f" (if you have none: runner init --site {site.name})"
        )
    return 0


def _items(site: Site, key: str) -> dict[str, object]:
    """The origin of each item of a table or list, by name or index."""
    items = {
        name.removeprefix(f"{key}."): str(origin)
        for name, origin in site.origins.items()
        if name.startswith(f"{key}.")
    }
    return {"items": items} if items else {}


def _rows(site: Site, key: str) -> list[tuple[str, str, str]]:
    """One row for a value, or for each item of a table or list; equal sources are shown once."""
    value = getattr(site, key)
    if not isinstance(value, dict | tuple):
        return [(key, str(value), str(site.origins[key]))]
    shown = (
        value.items()
        if isinstance(value, dict)
        else ((str(index), text) for index, text in enumerate(value))
    )
    rows: list[tuple[str, str, str]] = []
    before = ""
    for name, text in shown:
        origin = str(site.origins.get(f"{key}.{name}", site.origins[key]))
        cell = f"{name}: {text}" if isinstance(value, dict) else text
        rows.append(("" if rows else key, cell, "" if origin == before else origin))
        before = origin
    return rows
