"""init, site list, site show, doctor, completion."""

from __future__ import annotations

import argparse

from runner.commands.options import add_wide

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from pathlib import Path

    from runner.commands.console import Console
    from runner.commands.site_file import Seen
    from runner.site import Site

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verbs."""
    init = subparsers.add_parser(
        "init",
        parents=[common],
        help="copy recipes, environments and jobs here, to edit them; with --site NAME write a site file instead",
    )
    init.add_argument("--account", metavar="NAME", help="with --site: the account that pays")
    init.add_argument("--partition", metavar="NAME", help="with --site: the partition to use")
    init.add_argument("--dry-run", action="store_true", help="say what would be written")
    init.set_defaults(run=init_project)

    site = subparsers.add_parser("site", parents=[common], help="list | show the sites (clusters)")
    actions = site.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", parents=[common], help="the known sites")
    show = actions.add_parser("show", parents=[common], help="a site's values, and where each comes from")
    show.add_argument("name", nargs="?", metavar="NAME", help="default: the one that is used here")
    for action, function in ((listing, list_sites), (show, show_site)):
        action.add_argument("--json", action="store_true", help="print JSON")
        add_wide(action)
        action.set_defaults(run=function)

    doctor = subparsers.add_parser("doctor", parents=[common], help="what this machine can do")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    add_wide(doctor)
    doctor.set_defaults(run=examine_machine)

    completion = subparsers.add_parser("completion", parents=[common], help="print the completion script of a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=print_completion)


def init_project(args: argparse.Namespace, console: Console) -> int:
    """`runner init`: prints the path of each file that was written."""
    from pathlib import Path

    from runner.machine import files
    from runner.project import find_project

    if args.site:
        return _init_site(args, console)
    shipped, here = find_project().shipped, Path.cwd()
    texts = {path.relative_to(shipped): path.read_bytes() for path in _copied(shipped)}
    texts[Path("runner.toml")] = (
        b"# This folder is a runner project: its containers/, edf/ and jobs/ win over the ones that come with runner.\n"
        b'# environment = "ngc-ds"    # the environment where none is named\n'
    )
    for path, content in texts.items():
        if (here / path).exists():
            same = (here / path).read_bytes() == content
            console.detail(f"kept: {path}") if same else console.warn(f"kept: {path} is there already, and differs")
            continue
        if not args.dry_run:
            files.write(here / path, content, mode=0o777 if content.startswith(b"#!") else 0o666)
        console.answer(str(path))
    console.say("edit what you need, remove the rest: a file that is not here is looked up in runner itself")
    return 0


def _copied(shipped: Path) -> list[Path]:
    """The files that belong into a project of the user's own."""
    found = [*shipped.glob("Containerfile.*")]
    for kind in ("containers", "edf", "jobs"):
        found += [path for path in (shipped / kind).rglob("*") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _init_site(args: argparse.Namespace, console: Console) -> int:
    """Write the user's own file of a site: an overlay of one that is known, else a new one."""
    import os

    from runner.commands.site_file import base_of, look, site_file
    from runner.errors import RunnerError
    from runner.machine import files
    from runner.site_files import user_folder

    path = user_folder(os.environ) / f"{args.site}.toml"
    if path.exists():
        raise RunnerError(
            f"the site file {path} is there already", "a file of yours is never overwritten", f"edit it: {path}"
        )
    seen = look(os.environ)
    if not args.dry_run:
        _ask(args, seen, base_of(args.site, seen, os.environ))
    text, questions = site_file(args.site, args.account, args.partition, os.environ, seen)
    for question in questions:
        console.warn(question)
    if args.dry_run:
        console.answer(text)
        return 0
    files.write(path, text)
    console.answer(str(path))
    console.say(f"use it: --site {args.site}, or export RUNNER_SITE={args.site}")
    return 0


def _ask(args: argparse.Namespace, seen: Seen, base: Site) -> None:
    """At a terminal, ask for what nobody can guess: the account, and the partition where there are several."""
    from runner.machine import probe

    if not probe.has_terminal():
        return
    if args.account is None and base.account is None and (base.account_required or len(seen.accounts) > 1):
        args.account = _answer("account that pays", seen.accounts, None)
    if args.partition is None and base.partition is None and len(seen.partitions) > 1:
        likely = seen.partition(None)
        names = tuple(partition.name for partition in seen.partitions)
        args.partition = _answer("partition", names, likely.name if likely else None)


def _answer(what: str, known: tuple[str, ...], default: str | None) -> str | None:
    import sys

    choices = f" ({', '.join(known)})" if known else ""
    print(f"{what}{choices}{f' [{default}]' if default else ''}: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def list_sites(args: argparse.Namespace, console: Console) -> int:
    """`runner site list`."""
    import os

    from runner.detection import find_site
    from runner.site_files import load_site, site_names

    used, why = find_site(args.site, os.environ)
    sites = [load_site(name, os.environ) for name in site_names(os.environ)]
    if args.json:
        keys = ("name", "summary", "scheduler", "engine")
        console.answer_json([{key: getattr(site, key) for key in keys} | {"used": site == used} for site in sites])
        return 0
    rows = [
        ("*" if site.name == used.name else "", site.name, site.scheduler, site.engine, site.summary) for site in sites
    ]
    console.table(("", "SITE", "SCHEDULER", "ENGINE", "WHAT"), rows)
    console.say(f"* is used here ({why})")
    return 0


def show_site(args: argparse.Namespace, console: Console) -> int:
    """`runner site show`: every value with its source and date."""
    import os

    from runner.detection import find_site
    from runner.site import VALUES

    site, why = find_site(args.name or args.site, os.environ)
    console.say(f"site {site.name} ({'as asked' if args.name else why}): {site.summary}")
    if args.json:
        values = {key: {"value": getattr(site, key), "from": str(site.origins[key])}
                  | _items(site, key) for key in VALUES if key in site.origins}  # fmt: skip
        console.answer_json({"name": site.name, "summary": site.summary, "why": why, "values": values})
        return 0
    rows = [row for key in VALUES if key in site.origins for row in _rows(site, key)]
    console.table(("KEY", "VALUE", "FROM"), rows)
    unknown = [key for key in ("account", "partition", "gpus_per_node", "cpus_per_node", "memory", "architecture")
               if getattr(site, key) is None and not (key == "memory" and site.memory_per_gpu)]  # fmt: skip
    if unknown and site.scheduler == "slurm":
        console.say(
            f"not known: {', '.join(unknown)}. Say it in a job file, in flags, or once: runner init --site {site.name}"
        )
    return 0


def _items(site: Site, key: str) -> dict[str, object]:
    """Where each item of a table or list came from, under its name or number."""
    items = {name.removeprefix(f"{key}."): str(origin) for name, origin in site.origins.items()
             if name.startswith(f"{key}.")}  # fmt: skip
    return {"items": items} if items else {}


def _rows(site: Site, key: str) -> list[tuple[str, str, str]]:
    """One line for a value, one for each item of a table or list; where it came from once for all that are alike."""
    value = getattr(site, key)
    if not isinstance(value, dict | tuple):
        return [(key, str(value), str(site.origins[key]))]
    shown = value.items() if isinstance(value, dict) else ((str(index), text) for index, text in enumerate(value))
    rows: list[tuple[str, str, str]] = []
    before = ""
    for name, text in shown:
        origin = str(site.origins.get(f"{key}.{name}", site.origins[key]))
        cell = f"{name}: {text}" if isinstance(value, dict) else text
        rows.append(("" if rows else key, cell, "" if origin == before else origin))
        before = origin
    return rows


def examine_machine(args: argparse.Namespace, console: Console) -> int:
    """`runner doctor`: one line each; exit code 1 when something is wrong."""
    import os

    from runner.detection import find_site
    from runner.doctor.diagnosis import Diagnosis
    from runner.doctor.examination import examine
    from runner.environments.engines import choose

    site, why = find_site(args.site, os.environ)
    engine, chosen = choose(site, os.environ)
    none = engine == "host" and site.engine != "host"
    found = [
        Diagnosis("site", "ok", f"{site.name} ({why})"),
        Diagnosis("engine", "wrong" if none else "ok", f"{engine}: {chosen}",
                  "apt-get install bubblewrap squashfuse squashfs-tools" if none else ""),
        *examine(site, os.environ),
    ]  # fmt: skip
    wrong = sum(item.verdict == "wrong" for item in found)
    if args.json:
        console.answer_json([vars(item) for item in found])
        return 1 if wrong else 0
    console.table(
        ("", "WHAT", "VERSION", "HOW IT STANDS"),
        [
            (item.verdict, item.name, item.version, f"{item.text} -> {item.fix}" if item.fix else item.text)
            for item in found
        ],
    )
    for item in found:
        if item.fix and item.verdict == "wrong":
            console.say(f"{item.name}: {item.fix}")
    console.say(f"{wrong} things to mend" if wrong else "nothing to mend")
    return 1 if wrong else 0


def print_completion(args: argparse.Namespace, console: Console) -> int:
    """`runner completion SHELL`: the script."""
    import shtab

    console.answer(shtab.complete(args.full_parser(), shell=args.shell))
    return 0
