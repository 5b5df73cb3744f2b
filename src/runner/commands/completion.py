"""completion: the completion scripts for shells, and the words that they offer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs, runs_folder
from runner.errors import RunnerError

# their scripts completion.SHELL ask `runner completion words -- WORDS…` for the possible words; without any, they offer
# files
_SHELLS = ("bash", "zsh", "fish")


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    completion = subparsers.add_parser("completion", parents=[common])
    shells = f"one of: {', '.join(_SHELLS)}"
    completion.add_argument("shell", metavar="SHELL", help=shells)
    completion.set_defaults(run=print_completion, takes_words=True)


def print_completion(args: argparse.Namespace, console: Console) -> int:
    """`runner completion SHELL`: print the script. `runner completion words -- WORDS…`: complete the last word."""
    if args.shell == "words":
        for word in complete(args.rest, args.verbs, lambda verb: args.make_parser((verb,))):
            console.answer(word)
        return 0
    if args.shell not in _SHELLS:
        raise RunnerError(
            f"there is no completion for {args.shell!r}",
            f"runner knows {', '.join(_SHELLS)}",
            "runner completion bash",
            exit_code=2,
        )
    console.answer(Path(__file__).with_name(f"completion.{args.shell}").read_text(encoding="utf-8"))
    return 0


def complete(
    words: Sequence[str], verbs: Sequence[str], parser_of: Callable[[str], argparse.ArgumentParser]
) -> list[str]:
    """The possible completions of the last word, sorted; empty if only file names, or nothing, can follow."""
    *before, current = words or ("",)
    if "--" in before:
        return []
    if before and before[-1] in ("--on", "--site"):
        return _starting(current, _hosts() if before[-1] == "--on" else _sites())
    if current.startswith("--on="):
        return [f"--on={each}" for each in _starting(current[5:], _hosts())]
    # the parsers of the verbs do not know --on
    before = [
        word
        for n, word in enumerate(before)
        if "--on" not in (word, *before[n - 1 : n]) and not word.startswith("--on=")
    ]
    at = next(
        (n for n, word in enumerate(before) if word in verbs and before[n - 1 : n] != ["--site"]),
        None,
    )
    if at is None:
        return _starting(
            current,
            ("--help", "--on", "--site", "--verbose", "--version") if current[:1] == "-" else verbs,
        )
    return _in_verb(_subparsers(parser_of(before[at]))[before[at]], before[at + 1 :], current)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = parser._subparsers._group_actions if parser._subparsers else ()
    return dict(actions[0].choices or {}) if actions else {}


def _in_verb(parser: argparse.ArgumentParser, before: Sequence[str], current: str) -> list[str]:
    """The completions from the parser of a verb or of its action (`env show`)."""
    options = parser._option_string_actions
    places = 0
    for n, word in enumerate(before):
        if word in _subparsers(parser):
            return _in_verb(_subparsers(parser)[word], before[n + 1 :], current)
        takes_value = n and before[n - 1] in options and options[before[n - 1]].nargs is None
        places += not word.startswith("-") and not takes_value
    last = before[-1] if before else ""
    if last in options and options[last].nargs in (None, "?"):
        return _starting(current, _values(options[last]))
    if current.startswith("-") and "=" in current:
        name, _, value = current.partition("=")
        return (
            [f"{name}={each}" for each in _starting(value, _values(options[name]))]
            if name in options
            else []
        )
    if current.startswith("-"):
        shown = [name for name, each in options.items() if each.help != argparse.SUPPRESS]
        shown.append("--on")
        return _starting(current, (name for name in shown if name.startswith("--")))
    positionals = [action for action in parser._actions if not action.option_strings]
    if places < len(positionals):
        return _starting(current, _values(positionals[places]))
    return (
        _starting(current, _values(positionals[-1]))
        if positionals and positionals[-1].nargs in ("*", "+")
        else []
    )


def _starting(text: str, words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(text)})


def _values(action: argparse.Action) -> list[str]:
    """The possible values of an option or argument, by its placeholder in the help."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest == "site" or (action.dest, action.metavar) == ("name", "NAME"):
        return _sites()
    if action.dest == "engine":
        from runner.environments.engines import ENGINES  # slow to import, and few words need it

        return list(ENGINES)
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return [word for kind in metavar.split("|") for word in _words(kind)]


def _sites() -> list[str]:
    from runner.site_files import site_names

    return list(site_names(os.environ))


def _hosts() -> list[str]:
    from runner.remote.host import host_names

    return host_names(os.environ)


def _words(kind: str) -> Iterable[str]:
    """The words for one placeholder; empty if it is not one of these."""
    from runner.project import find_project

    match kind:
        case "ENV" | "JOB" | "CLUSTER":
            return find_project().names({"ENV": "edf", "JOB": "jobs", "CLUSTER": "clusters"}[kind])
        case "SCRIPT":
            from runner.runs.program import script_names

            return script_names(find_project())
        case "RECIPE" | "IMAGE":
            from runner.images.recipe import recipe_names

            return recipe_names(find_project())
        case "CAUSE":
            from runner.runs.why.cause import all_causes

            return (cause.code for cause in all_causes())
        case "CODE":
            from runner.environments.lint.codes import CODES

            return CODES
        case "HOST":
            return _hosts()
        case "RUN":
            return _runs()
        case "SHELL":
            return _SHELLS
    return ()


def _runs() -> list[str]:
    """The names of the runs, and `last`. The records are not read, because there may be thousands of runs."""
    from runner.runs.run import RECORD

    try:
        return ["last", *(path.parent.name for path in runs_folder(None).glob(f"[!.]*/{RECORD}"))]
    except RunnerError:  # the site's folder of runs is not known on this machine
        return ["last"]
