"""The parser: its errors and help, and options that several verbs share."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from runner.commands.console import Console, columns
from runner.errors import RunnerError, nearest

if TYPE_CHECKING:
    from runner.runs.job import Layer
    from runner.runs.run import Run
    from runner.site import Site

Verbs: TypeAlias = "argparse._SubParsersAction[Any]"

# argparse looks up translations of its messages. runner has none, and the lookup slows down short commands
argparse._ = str  # type: ignore[attr-defined]


class Formatter(argparse.HelpFormatter):
    """argparse's formatter, without its import of shutil for the terminal width, which is slow."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns() - 2)


class Parser(argparse.ArgumentParser):
    """argparse with errors in our form (what, why, fix) and without abbreviated options."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", Formatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise the usage error; exit code 2."""
        raise RunnerError(
            ": ".join(part for part in (self._verb, message) if part),
            "the command line does not match the usage",
            f"{self.format_usage().strip()}\n{self.prog} --help",
            exit_code=2,
        )

    @property
    def _verb(self) -> str:
        return self.prog.removeprefix("runner").strip()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Like argparse, except that each verb reports unknown arguments itself, to show its own usage."""
        words = list(args or ())
        found, extras = super().parse_known_args(words, namespace)
        if extras and self._subparsers is None:
            self._refuse(extras[0], words)
        return found, extras

    def _refuse(self, word: str, words: list[str]) -> NoReturn:
        from runner.machine import files

        if not word.startswith("-"):
            self._refuse_argument(word, words)
        after = words[words.index(word) + 1 :][:1] if word in words and "=" not in word else []
        whole = " ".join([word, *(value for value in after if not value.startswith("-"))])
        known = self._option_string_actions
        close = nearest(word.partition("=")[0], known, 0.75)
        why = f"`{self.prog}` has no option {word.partition('=')[0]}"
        advice = f"did you mean {close}?" if close else ""
        program = next((each for each in ("sbatch", "srun") if f"--{each}" in known), None)
        if program:
            own = any(not each.endswith(".toml") and files.is_file(each) for each in words)
            advice = _instead(whole, program, known, advice, own=own)
        if self._verb == "build" and not close:
            advice = _to_build_with(word) or advice
        fix = [advice] if advice else []
        fix += [self.format_usage().strip(), f"{self.prog} --help"]
        raise RunnerError(
            f"{self._verb}: unknown option {whole!r}", why, "\n".join(fix), exit_code=2
        )

    def _refuse_argument(self, word: str, words: list[str]) -> NoReturn:
        """Refuse a word that the verb does not take: of a program, it belongs after `--`."""
        from runner.machine import process

        if not self.get_default("takes_words"):
            self.error(f"unexpected argument {word!r}")
        is_program = words[1:2] == [word] and process.which(words[0]) is not None
        example = f"-- {words[0]} {word}" if is_program else f"… -- {word}"
        raise RunnerError(
            f"{self._verb}: unexpected argument {word!r}",
            "a program and its arguments follow `--`",
            f"{self.prog} {example}\n{self.format_usage().strip()}",
            exit_code=2,
        )


# options of sbatch, pyxis, docker and podman that people try -> what comes nearest here
_OWN = {
    **dict.fromkeys(("gpus", "gres", "gpus-per-task"), "--gpus-per-node"),
    "ntasks": "--tasks-per-node",
    "job-name": "--name",
    "dependency": "--after RUN",
}
_OF_EDF = {
    **dict.fromkeys(("image", "container-image"), "image"),
    **dict.fromkeys(("mount", "mounts", "volume", "bind", "container-mounts"), "mounts"),
    **dict.fromkeys(("workdir", "container-workdir"), "workdir"),
    **dict.fromkeys(("writable", "container-writable"), "writable"),
}


# options of `podman build` and `docker build` that sbatch does not have
_OF_ENGINE = frozenset(
    {
        "add-host",
        "cache-from",
        "cap-add",
        "cpuset-cpus",
        "dns",
        "format",
        "isolation",
        "label",
        "layers",
        "network",
        "no-cache",
        "progress",
        "pull",
        "rm",
        "secret",
        "security-opt",
        "shm-size",
        "squash",
        "squash-all",
        "ssh",
        "target",
        "ulimit",
        "volume",
    }
)


def _to_build_with(word: str) -> str:
    """What to write instead of an option of `podman build` or `docker build`; empty for any other option."""
    if word.startswith("-t"):
        return "did you mean --tag?"
    if word.startswith(("-f", "--file")):
        return "runner build ./PATH/OF/Containerfile"
    known = word[2:].partition("=")[0] in _OF_ENGINE
    return f"for a flag of podman or docker: runner build … -- {word}" if known else ""


def _instead(given: str, program: str, known: Container[str], near: str, *, own: bool) -> str:
    """What to write instead of an option that the verb does not have, for a verb that passes options on to `program`.

    `near`: the advice for a misspelt option. `own`: the job is the user's own batch script, which takes all of them.
    """
    from runner.option_grammar import SHORT
    from runner.runs.job import KEYS
    from runner.runs.schedulers.directives import FLAGS
    from runner.runs.schedulers.flags import REFUSED

    word, _, value = given.replace("=", " ", 1).partition(" ")
    name = word[2:] if word.startswith("--") else SHORT[program].get(word[1:2], "")
    if not word.startswith("--"):
        value = word[2:] or value
    if name in _OF_EDF:
        key = _OF_EDF[name]
        edf = f"write `{key}` in the EDF of an environment, edf/NAME.toml, and"
        return f"{edf} give --env NAME" if "--env" in known else f"{edf} name the environment"
    same = {option: KEYS[setting].flag for setting, option in FLAGS.items()}
    same |= {"time": "--time", **_OWN}
    if (ours := same.get(name)) and ours.split()[0] in known:
        return f"did you mean {ours}?"
    if near or not name:
        return near
    if name in REFUSED[program] and not own:
        why, fix = REFUSED[program][name]
        # the advice for srun names options of launch, which is the verb that passes on to sbatch
        return f"{fix}: {why}" if program == "sbatch" else ""
    return f"for an option of {program}: --{program}=--{name}{f'={value}' if value else ''}"


def add_verb(
    subparsers: Verbs, common: argparse.ArgumentParser, name: str, function: str, **settings: Any
) -> argparse.ArgumentParser:
    """Add a verb, or an action of a verb, with its arguments of options.toml.

    `function` is MODULE:FUNCTION of runner.commands. The module is imported when the verb runs.
    """
    import tomllib

    def run(args: argparse.Namespace, console: Console) -> int:
        module, _, called = function.partition(":")
        code: int = getattr(importlib.import_module(f"runner.commands.{module}"), called)(
            args, console
        )
        return code

    verb: argparse.ArgumentParser = subparsers.add_parser(name, parents=[common], **settings)
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    # only the table of the verb is parsed: the whole file takes milliseconds
    rows = text.partition(f"\n[{'.'.join(verb.prog.split()[1:])}]\n")[2].partition("\n[")[0]
    table = tomllib.loads(rows)
    verb.usage = table.pop("usage", None)
    verb.set_defaults(takes_words=table.pop("words", False))
    for name in table.pop("include", ()):
        SHARED[name](verb)
    groups: dict[str, argparse._MutuallyExclusiveGroup] = {}
    for names, given in table.items():
        how = {"action": "store_true", "help": given} if isinstance(given, str) else given
        how |= {"type": int} if "type" in how else {}
        group, old = how.pop("one_of", None), how.pop("old", None)
        if group and group not in groups:
            groups[group] = verb.add_mutually_exclusive_group()
        action = (groups[group] if group else verb).add_argument(*names.split(), **how)
        if old:  # an earlier spelling, which the help does not show
            hidden = {"dest": action.dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            verb.add_argument(old, **how | hidden)
    verb.set_defaults(run=run)
    return verb


def add_job(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that select the job."""
    verb.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a job file (a name in jobs/, or a path), or for launch a batch script",
    )
    verb.add_argument(
        "--env", metavar="ENV", help="the environment: a name in edf/, or a path to an EDF"
    )
    verb.add_argument(
        "--script", metavar="SCRIPT", help="a name in jobs/, or a path to a .py or .sh file"
    )


def add_settings(verb: argparse.ArgumentParser, *, shell: bool = False) -> None:
    """Add the options that set values of a job, from the table KEYS; with `shell`, only those that `shell` accepts."""
    from runner.runs.job import KEYS, Restart

    verb.add_argument("--engine", help="the container engine (default: the site's engine)")
    for name, key in KEYS.items():
        if not key.flag or (shell and not key.shell):
            continue
        how: dict[str, Any] = {"dest": name, "help": key.help}
        if key.kind is bool:
            how |= {"action": "store_const", "const": False}
        elif key.kind in (tuple, Restart):
            how |= {"action": "append", "metavar": key.metavar}
        else:
            how |= {
                "type": key.kind,
                "metavar": key.metavar or key.flag[2:].upper().replace("-", "_"),
            }
        verb.add_argument(key.flag, **how)


def settings(args: argparse.Namespace) -> Layer:
    """The layer of settings from the options of `add_settings`."""
    from runner.runs.job import KEYS, command_line

    return command_line({name: getattr(args, name, None) for name, key in KEYS.items() if key.flag})


def add_wide(verb: argparse.ArgumentParser) -> None:
    """Add --wide, for verbs that print a table. The console reads it from the command line itself."""
    verb.add_argument(
        "--wide", action="store_true", help="do not cut columns to the terminal's width"
    )


SHARED: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "job": add_job,
    "settings": add_settings,
    "shell": partial(add_settings, shell=True),
    "wide": add_wide,
}
"""options of several verbs, by the names that `include` has in options.toml"""


def common_options() -> argparse.ArgumentParser:
    """The options that every verb takes."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False, formatter_class=Formatter)
    common.add_argument(
        "--site", metavar="NAME", help="the cluster (default: RUNNER_SITE, then detection)"
    )
    common.add_argument("-v", "--verbose", action="store_true", help="print more on stderr")
    return common


def chosen_site(args: argparse.Namespace, console: Console) -> Site:
    """The site that the command line selects. Prints its name and why it was selected."""
    from runner.detection import find_site

    site, why = find_site(args.site, os.environ)
    console.say(f"site {site.name} ({why})")
    return site


def runs_folder(site: str | None) -> Path:
    """The folder of runs of a site, which is named or detected."""
    from runner.detection import find_site
    from runner.project import find_project

    return find_site(site, os.environ)[0].runs(os.environ, find_project())


def selected_runs(args: argparse.Namespace) -> list[Run]:
    """The runs that RUN… or --since selects; by default the newest run."""
    from datetime import datetime

    from runner.runs.history import Filters, parse_since
    from runner.runs.run import find_runs, list_runs

    folder = runs_folder(args.site)
    if args.since and args.runs:
        what = f"{args.verb}: RUN and --since cannot be combined"
        raise RunnerError(what, "each of them selects runs", "leave out one", exit_code=2)
    if args.since:
        filters = Filters(since=parse_since(args.since, datetime.now().astimezone()))
        return [run for run in list_runs(folder) if filters.passes_record(run)]
    named = [run for word in args.runs or ["last"] for run in find_runs(word, folder)]
    return list({run.folder: run for run in named}.values())
