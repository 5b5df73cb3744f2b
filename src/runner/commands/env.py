"""env show, env emit, env adopt; `check` is in env_check.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs, add_verb
from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.environments.environment import Environment
    from runner.runs.adopt.adopted import Adopted
    from runner.runs.adopt.job import Draft, Program
    from runner.site import Site


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("env", parents=[common])
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, prog="runner env"
    )
    what = "print the merged environment, and the source of each value"
    add_verb(actions, common, "show", "env:show_environment", help=what)
    what = "print an EDF or script that works without runner"
    add_verb(actions, common, "emit", "env:emit_environment", help=what)
    what = "find mistakes before a job is submitted"
    add_verb(actions, common, "check", "env_check:check_environments", help=what)
    what = "make an EDF from a batch script, or from a command line after --: srun …, docker run …, podman run …"
    add_verb(actions, common, "adopt", "env:adopt_environment", help=what)


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
    console.say(
        f"environment {environment.name} ({environment.path}{'; ' + reason if reason else ''})"
    )
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
    plain = ("name", "image", "workdir", "entrypoint", "writable", "env", "annotations", "devices")
    answer = {
        "path": str(full.path),
        "site": site.name,
        "engine": engine,
        "mounts": [vars(m) for m in full.mounts],
        "origins": {field: from_ for field, _, from_ in _rows(full, site)},
        "replaced": {field: [*map(str, origins)] for field, origins in full.replaced.items()},
    }
    console.answer_json({name: getattr(full, name) for name in plain} | answer)
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

    without = {"image": "(none: no container)", "workdir": "(the image's own)"}
    for field, text in environment.values().items():
        shown = text if text.isprintable() else json.dumps(text)
        yield (
            field,
            shown or without.get(field, "(unset)" if field.startswith("env.") else ""),
            origin(field),
        )


def emit_environment(args: argparse.Namespace, console: Console) -> int:
    """`runner env emit`: an EDF, or a bash script for the engine; with -o the file's path."""
    from runner.environments.emit import emitted

    environment, site, engine = _load(args, console)
    text, notes = emitted(environment, site, engine, os.environ)
    for note in notes:
        console.warn(note)
    if args.output:
        from runner.machine import files, secrets

        secrets.refuse(text.encode(), args.output)
        files.write(Path(args.output), text, mode=0o666 if engine in {"ce", "sarus"} else 0o777)
        console.answer(args.output)
    else:
        console.answer(text)
    return 0


def adopt_environment(args: argparse.Namespace, console: Console) -> int:
    """`runner env adopt`: print the EDF, or the paths of the files written; notes go to stderr."""
    from runner.runs.adopt.adopted import Adopted
    from runner.runs.adopt.job import Draft
    from runner.runs.adopt.script import read_command_line

    _check_words(args)
    adopted, draft = Adopted(), Draft()
    name = Path(args.script).name if args.script else "a command line"
    program = read_command_line(args.rest or ("sbatch", args.script), adopted, draft, Path.cwd())
    if not args.into:
        adopted.set_defaults()
    for note in adopted.notes:
        console.say(note)
    if refused := (adopted.no_edf or (adopted.no_job if args.job else [])):
        raise RunnerError(
            f"no {'EDF' if adopted.no_edf else 'job file'} can do the same as {name}",
            "\n".join(refused),
            "to run a batch script unchanged: runner launch PATH",
        )
    for note in adopted.no_job:
        console.say(f"no job file can do the same as {name}: {note}")
    written: list[tuple[Path, str]] = []
    edf = Path(args.into or args.output) if args.into or args.output else None
    text = _edf_text(args.into, adopted, name, console)
    if edf is not None:
        written.append((edf, text))
    if args.job:
        job = Path(args.job)
        written.append((job, _job_text(draft, program, edf, name, job)))
    elif program.command and not adopted.no_job:
        console.say("to also write a job file: -o edf/NAME.toml --job jobs/NAME.toml")
    _answer(args, console, written, text)
    return 0


def _check_words(args: argparse.Namespace) -> None:
    if bool(args.script) == bool(args.rest):
        raise RunnerError(
            "no script or command line is given"
            if not args.script
            else "both a script and a command line are given",
            "runner converts one script or one command line at a time",
            "runner env adopt job.sbatch\nor, for a command line: runner env adopt -- docker run …",
            exit_code=2,
        )
    if args.job and not (args.output or args.into):
        raise RunnerError(
            "--job is given without -o or --into",
            "the job file names the EDF, so the EDF must be in a file too",
            "add -o edf/NAME.toml, or --into FILE",
            exit_code=2,
        )
    for path in (args.output, args.job):
        if path and Path(path).exists() and not args.dry_run:
            raise RunnerError(
                f"{path} already exists",
                "runner does not overwrite existing files",
                f"choose another name{f', or change the existing EDF: --into {path}' if path == args.output else ''}",
            )


def _edf_text(into: str | None, adopted: Adopted, name: str, console: Console) -> str:
    """The text of the EDF. Raises RunnerError if the input has no container, or if the EDF would be invalid."""
    from runner.environments.edf import layer_of
    from runner.environments.rewriting import APPEND, Set, rewrite
    from runner.located_toml import Document, parse_toml, read_toml

    path = Path(into) if into else Path("the EDF")
    document = read_toml(path) if into else Document(path, {})
    changes = adopted.changes(document.data)
    if not (adopted.image or adopted.base or into):
        raise RunnerError(
            f"{name} does not use a container",
            "\n".join(adopted.no_job)
            or "it has no --container-… options, no --environment, no docker run or podman run",
            "to run it in an existing environment: runner launch --env NAME -- COMMAND",
        )
    for change in changes:
        if isinstance(change, Set) and change.keys[-1] != APPEND:
            before = document.get(*change.keys)
            if before not in (None, change.value):
                console.say(f"{'.'.join(change.keys)}: {before!r} becomes {change.value!r}")
    start = (
        path.read_bytes().decode("utf-8-sig")
        if into
        else f"# Made from {name} by `runner env adopt`.\n"
    )
    text = rewrite(start, changes, path)
    layer_of(parse_toml(text, path))
    return text


def _job_text(draft: Draft, program: Program, edf: Path | None, name: str, job: Path) -> str:
    from runner.environments.rewriting import rewrite
    from runner.located_toml import parse_toml
    from runner.project import find_project
    from runner.runs.job import layer_of

    if not program.command:
        raise RunnerError(
            f"{name} does not start a program", "a job file needs a program", "leave out --job"
        )
    assert edf is not None  # checked by _check_words
    named = edf.parent.resolve() == (find_project().root or Path.cwd()).resolve() / "edf"
    environment = edf.stem if named else str(edf.absolute())
    changes = draft.changes(program, environment, f"made from {name} by `runner env adopt`")
    text = rewrite("", changes, job)
    layer_of(parse_toml(text, job))
    return text


def _answer(
    args: argparse.Namespace, console: Console, written: list[tuple[Path, str]], text: str
) -> None:
    from runner.runs.secrets import write_record

    if args.dry_run and len(written) > 1:
        for path, content in written:
            console.answer(f"# ---- {path}\n{content}")
    elif args.dry_run or not written:
        console.answer(text)
    else:
        for path, content in written:
            write_record(path, content)
            console.answer(str(path))
