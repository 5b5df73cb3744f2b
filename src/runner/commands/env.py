"""env show, env emit; `check` is in env_check.py, `adopt` in env_adopt.py."""

from __future__ import annotations

import argparse
import os

from runner.commands.options import add_wide

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.commands.console import Console
    from runner.commands.options import Verbs
    from runner.environments.environment import Environment
    from runner.site import Site


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    from runner.commands import env_adopt, env_check

    parser = subparsers.add_parser("env", parents=[common])
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="runner env")
    show = actions.add_parser(
        "show", parents=[common], help="print the merged environment, and the source of each value"
    )
    emit = actions.add_parser("emit", parents=[common], help="print an EDF or script that works without runner")
    env_check.add(actions, common)
    for action in (show, emit):
        action.add_argument("environment", nargs="?", metavar="ENV", help="a name, or the path of an EDF")
    show.add_argument("--json", action="store_true", help="print JSON")
    engines = "ce sarus pyxis enroot podman docker apptainer host"
    emit.add_argument("--as", dest="engine", metavar="ENGINE", help=f"one of: {engines} (default: the site's engine)")
    emit.add_argument("-o", "--output", metavar="FILE", help="write FILE, and print its path")
    add_wide(show)
    show.set_defaults(run=show_environment)
    emit.set_defaults(run=emit_environment)
    env_adopt.add(actions, common)


def _load(args: argparse.Namespace, console: Console) -> tuple[Environment, Site, str]:
    """The environment, site and engine that the options select; prints which, and why."""
    from runner.detection import find_site
    from runner.environments.engines import choose
    from runner.environments.environment import default_environment, load_environment
    from runner.project import find_project

    project = find_project()
    site, why = find_site(args.site, os.environ)
    name, reason = default_environment(project, site)
    if args.environment is not None:
        name, reason = args.environment, ""
    environment = load_environment(name, project, os.environ)
    console.say(f"environment {environment.name} ({environment.path}{'; ' + reason if reason else ''})")
    console.say(f"site {site.name} ({why})")
    named = getattr(args, "engine", None)
    engine, chosen = (named, "as requested") if named else choose(site)
    console.detail(f"engine {engine} ({chosen})")
    return environment, site, engine


def show_environment(args: argparse.Namespace, console: Console) -> int:
    """`runner env show`: every value of the merged environment with its origin."""
    from runner.environments.engines import with_site

    environment, site, engine = _load(args, console)
    full = with_site(environment, site)
    if not args.json:
        console.table(("FIELD", "VALUE", "FROM"), list(_rows(full, site)))
        return 0
    console.answer_json(
        {
            "name": full.name,
            "path": str(full.path),
            "site": site.name,
            "engine": engine,
            "image": full.image,
            "workdir": full.workdir,
            "entrypoint": full.entrypoint,
            "writable": full.writable,
            "mounts": [{"source": m.source, "target": m.target, "flags": list(m.flags)} for m in full.mounts],
            "env": dict(full.env),
            "annotations": dict(full.annotations),
            "devices": list(full.devices),
            "origins": {field: from_ for field, _, from_ in _rows(full, site)},
            "replaced": {field: [str(origin) for origin in origins] for field, origins in full.replaced.items()},
        }
    )
    return 0


def _rows(environment: Environment, site: Site) -> Iterator[tuple[str, str, str]]:
    """(field, value, origin) of every value of an environment."""
    import json

    def origin(field: str) -> str:
        found = environment.origins.get(field)
        if found:
            before = ", ".join(str(origin) for origin in environment.replaced.get(field, ()))
            return f"{found}, in place of {before}" if before else str(found)
        given = site.origins.get(field.partition(".")[0])
        return f"site {site.name}: {given}" if given else f"site {site.name}"

    yield "image", environment.image or "(none: no container)", origin("image")
    yield "workdir", environment.workdir or "(the image's own)", origin("workdir")
    yield "entrypoint", str(environment.entrypoint).lower(), origin("entrypoint")
    yield "writable", str(environment.writable).lower(), origin("writable")
    for index, mount in enumerate(environment.mounts):
        yield f"mounts.{index}", mount.text(), origin(f"mounts.{index}")
    for index, device in enumerate(environment.devices):
        yield f"devices.{index}", device, origin(f"devices.{index}")
    for name, value in environment.env.items():
        shown = (value if value.isprintable() else json.dumps(value)) or "(unset)"
        yield f"env.{name}", shown, origin(f"env.{name}")
    for name, value in environment.annotations.items():
        yield f"annotations.{name}", value, origin(f"annotations.{name}")


def emit_environment(args: argparse.Namespace, console: Console) -> int:
    """`runner env emit`: an EDF, or a bash script for the engine; with -o the file's path."""
    from runner.environments.emit import emitted

    environment, site, engine = _load(args, console)
    text, notes = emitted(environment, site, engine, os.environ)
    for note in notes:
        console.warn(note)
    if args.output:
        from pathlib import Path

        from runner.machine import files, secrets

        secrets.refuse(text.encode(), args.output)
        files.write(Path(args.output), text, mode=0o666 if engine in {"ce", "sarus"} else 0o777)
        console.answer(args.output)
    else:
        console.answer(text)
    return 0
