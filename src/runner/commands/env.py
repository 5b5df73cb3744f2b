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
    what = "make a job file from a batch script, or an EDF from a command line after --: srun …, docker run …"
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
        from runner.environments.engines import engine_of
        from runner.machine import files, secrets

        secrets.refuse(text.encode(), args.output)
        mode = 0o666 if engine_of(engine).reads_edf else 0o777  # else, it is a script
        files.write(Path(args.output), text, mode=mode)
        console.answer(args.output)
    else:
        console.answer(text)
    return 0


def adopt_environment(args: argparse.Namespace, console: Console) -> int:
    """`runner env adopt`: print what was made, or the paths of the files written; notes go to stderr."""
    from runner.runs.secrets import write_record

    _check_words(args)
    made = (_of_script if args.script else _of_command_line)(args, console)
    written = {
        path: text for path, text in made.items() if path in (args.output, args.into, args.job)
    }
    if written and not args.dry_run:
        for path, text in written.items():
            write_record(Path(path), text)
            console.answer(path)
        return 0
    shown = written or made
    for path, text in shown.items():
        console.answer(f"# ---- {path}\n{text}" if len(shown) > 1 else text)
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
    if args.job and not (args.output or args.into or args.script):
        raise RunnerError(
            "--job is given without -o or --into",
            "the job file names the EDF, so the EDF must be in a file too",
            "add -o edf/NAME.toml, or --into FILE",
            exit_code=2,
        )
    edf = args.output or args.into
    if args.job and edf and Path(args.job).resolve() == Path(edf).resolve():
        raise RunnerError(
            f"--job and {'-o' if args.output else '--into'} name the same file, {args.job}",
            "the job file and the EDF are two files",
            "--job jobs/NAME.toml -o edf/NAME.toml",
            exit_code=2,
        )
    for path in (args.output, args.job):
        if path and Path(path).exists() and not args.dry_run:
            raise RunnerError(
                f"{path} already exists",
                "runner does not overwrite existing files",
                f"choose another name{f', or change the existing EDF: --into {path}' if path == args.output else ''}",
            )


def _of_script(args: argparse.Namespace, console: Console) -> dict[str, str]:
    """path -> text of the job file, and of the EDF if the script's container is literal text."""
    import json

    from runner.project import find_project
    from runner.runs.adopt.script import job_text, read_container
    from runner.runs.own_script import read

    script = Path(args.script)
    name = script.name if script.name.isprintable() else json.dumps(script.name)
    text = read(args.script, script)
    adopted = read_container(text)
    edf, job = args.output or args.into, args.job
    made = {}
    if job or not edf:
        base = Path(job).absolute().parent.parent if job else find_project().root or Path.cwd()
        whole = script.resolve()
        path = whole.relative_to(base.resolve()) if whole.is_relative_to(base.resolve()) else whole
        made[job or f"jobs/{script.stem}.toml"] = job_text(name, str(path), text)
    if not adopted.no_edf:
        for note in adopted.notes:
            console.say(note)
        made[edf or f"edf/{script.stem}.toml"] = _edf_text(args.into, adopted, name, console)
    elif edf and not job:
        raise RunnerError(
            f"cannot make an EDF from {args.script}",
            "\n".join(adopted.no_edf),
            f"for a job file that runs the script unchanged: runner env adopt {args.script} --job jobs/NAME.toml",
        )
    for why in adopted.no_edf:
        console.say(f"no EDF: {why}")
    return made


def _of_command_line(args: argparse.Namespace, console: Console) -> dict[str, str]:
    """path -> text of the EDF, and of the job file if the options ask for it."""
    from runner.environments.rewriting import rewrite
    from runner.located_toml import parse_toml
    from runner.project import find_project
    from runner.runs.adopt.command_line import read_command_line
    from runner.runs.job import layer_of

    adopted, draft = read_command_line(args.rest, Path.cwd(), args.job or "")
    for note in adopted.notes:
        console.say(note)
    no_job = adopted.no_job or (
        [] if draft.command else ["the command line does not start a program"]
    )
    if refused := adopted.no_edf or (no_job if args.job else []):
        raise RunnerError(
            f"no {'EDF' if adopted.no_edf else 'job file'} can do the same as this command line",
            "\n".join(refused),
            "change the parts named above, or put the command into a script: runner launch PATH"
            if adopted.no_edf or draft.command
            else "add the program and its arguments at the end of the command line",
        )
    edf = args.into or args.output or "edf/NAME.toml"
    made = {edf: _edf_text(args.into, adopted, "a command line", console)}
    if not args.job:
        for why in no_job:
            console.say(f"this command line cannot become a job file: {why}")
        if not no_job:
            target = "" if args.into or args.output else "-o edf/NAME.toml "
            console.say(f"to also write a job file: {target}--job jobs/NAME.toml")
        return made
    root = find_project().root or Path.cwd()
    in_project = Path(edf).parent.resolve() == root.resolve() / "edf"
    environment = Path(edf).stem if in_project else str(Path(edf).absolute())
    changes = draft.changes(environment, "made from a command line by `runner env adopt`")
    made[args.job] = rewrite("", changes, Path(args.job))
    layer_of(parse_toml(made[args.job], Path(args.job)))
    return made


def _edf_text(into: str | None, adopted: Adopted, name: str, console: Console) -> str:
    """The text of the EDF. Raises RunnerError if the input has no container, or if the EDF would be invalid."""
    from runner.environments.edf import layer_of
    from runner.environments.rewriting import APPEND, Set, rewrite
    from runner.located_toml import Document, parse_toml, read_toml

    path = Path(into) if into else Path("the EDF")
    document = read_toml(path) if into else Document(path, {})
    changes = adopted.changes(document if into else None)
    if not (adopted.image or adopted.base or into):
        raise RunnerError(
            f"{name} does not use a container",
            "it has no --container-… options, no --environment, and no engine such as docker run",
            "to run it in an existing environment: runner launch --env NAME -- COMMAND",
        )
    if adopted.writable is None and adopted.image and not (into or adopted.base):
        why = "added, because the default differs between engines; if the program must not write there, set false"
        console.say(f"writable = true: {why}")
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
