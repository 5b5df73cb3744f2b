"""The command line: parses argv, runs the command, and turns a RunnerError into an exit code.

Exit codes: 0 success, 1 an error that the user can fix, 2 wrong usage, 3 a bug in runner (a log is kept), 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys

from runner import __version__
from runner.commands.console import Console
from runner.errors import RunnerError, nearest

TYPE_CHECKING = False  # type checkers read it as true; `typing` itself is slow to import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from runner.commands.options import Parser

# verb -> (MODULE:FUNCTION in runner.commands, one line of help); the groups are those of the printed overview. A module
# without a function adds its own arguments; the others are imported after the command line is parsed, so that --help,
# completion and errors are fast. argparse is imported only if there is something to parse.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "images": {
        "build": ("build:build_image", "Containerfile -> OCI image; prints NAME:TAG"),
        "import": ("import_:import_squashfs", "OCI image -> squashfs; prints the path"),
        "images": ("images:list_images", "list the squashfs files: source, size, age, runs"),
        "gc": ("images:collect_garbage", "remove unused squashfs files, or old runs"),
        "importer": ("importer", "get | release | sync images for pyxis (runner-importer)"),
    },
    "environments": {"env": ("env", "show | emit | check | adopt an environment (an EDF)")},
    "runs": {
        "launch": ("launch:launch_run", "start a script or command in an environment; prints RUN"),
        "shell": ("shell:open_shell", "open a shell or run a command in an environment or a run"),
        "open": (
            "open",
            "JupyterLab, TensorBoard, VS Code or ssh in an environment or a run; prints a URL",
        ),
        "status": ("status:show_status", "list runs: state, progress, time left"),
        "watch": ("status:watch_status", "show the status until all runs have ended"),
        "top": ("top:show_top", "show the GPU, CPU and memory use of a run's nodes"),
        "logs": ("logs:show_logs", "print the output of a run; -f follows it"),
        "cancel": ("cancel:cancel_runs", "cancel runs"),
        "history": ("history", "list past launches by job, environment, script, state"),
        "rerun": ("rerun:run_again", "repeat a launch exactly, from a run's lock file"),
        "diff": ("diff:show_difference", "compare two launches"),
        "plot": ("plot:plot_runs", "plot metrics of runs: loss, tokens/s and others"),
        "report": (
            "report:write_report",
            "write an HTML page about runs: curves, attempts, account, causes",
        ),
        "account": (
            "account:show_account",
            "show where the GPU time of runs went, and what reduces the losses",
        ),
        "why": (
            "why:show_why",
            "explain why a run failed, is waiting or is slow: cause, evidence, fix",
        ),
    },
    "models": {
        "prefetch": ("prefetch:prefetch_job", "download the models and datasets that a job needs"),
        "memory": ("memory", "estimate the memory per GPU by ZeRO stage and micro batch"),
    },
    "machine": {
        "init": ("init", "start a project here, or write a site file"),
        "site": ("site", "list | show sites (clusters), and the source of each value"),
        "doctor": (
            "doctor:examine_machine",
            "check what this machine can do, and how to fix what is missing",
        ),
        "connect": ("connect:connect_host", "open the connection to HOST that --on HOST uses"),
        "cluster": (
            "cluster",
            "render | create | list | status | ssh | destroy | adopt a cluster in a cloud",
        ),
        "completion": ("completion", "print the completion script of a shell"),
        "skill": ("skill:print_skill", "print what a coding agent must know to use runner"),
    },
}
VERBS = {verb: entry for group in GROUPS.values() for verb, entry in group.items()}


def split_rest(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before the first bare `--`, and the words after it untouched."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], tuple(words[at + 1 :])


def split_on(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each HOST of `--on HOST`, and the other words."""
    before, hosts, words, at = split_rest(argv)[0], list[str](), list[str](), 0
    while at < len(before):
        name, equals, host = before[at].partition("=")
        if name == "--on":
            at += 0 if equals else 1
            if not (host := host if equals else "".join(before[at : at + 1])):
                raise RunnerError(
                    "--on has no host", "the name of a host must follow", "--on HOST", exit_code=2
                )
            hosts.append(host)
        else:
            words.append(before[at])
        at += 1
    return hosts, [*words, *argv[len(before) :]]


def make_parser(verbs: Sequence[str]) -> Parser:
    """The parser with the given verbs."""
    import importlib

    from runner.commands.options import Parser, add_verb, common_options

    parser = Parser(
        prog="runner", description="From a Containerfile to a running, restartable Slurm job."
    )
    parser.add_argument("--version", action="version", version=f"runner {__version__}")
    subparsers = parser.add_subparsers(
        dest="verb", metavar="VERB", parser_class=Parser, prog="runner"
    )
    common = common_options()
    for verb in verbs:
        name = VERBS[verb][0]
        if ":" in name:
            add_verb(subparsers, common, verb, name)
        else:
            importlib.import_module(f"runner.commands.{name}").add(subparsers, common)
    return parser


def overview() -> str:
    """The text of `runner --help`."""
    lines = [
        "usage: runner VERB [options] [-- ARGS…]",
        "",
        "From a Containerfile to a running, restartable Slurm job.",
    ]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {verb:<12}{summary}" for verb, (_, summary) in verbs.items()]
    lines += [
        "",
        "options:",
        "  --on HOST    run the verb on another machine, with ssh",
        "  --site NAME  the cluster (default: RUNNER_SITE, then detection)",
        "  -v           print more on stderr",
        "  --version    print the version",
        "",
        "`runner VERB --help` shows the options of a verb. In short:",
        "  runner build && runner import && runner launch --env ngc-ds --script sft",
    ]
    return "\n".join(lines)


# what other programs call it -> what it is called here
_OTHER_NAMES = {
    **dict.fromkeys(("run", "start", "submit", "sbatch", "srun", "train"), "launch"),
    **dict.fromkeys(
        ("ps", "ls", "list", "queue", "squeue", "sacct", "jobs", "info", "show"), "status"
    ),
    **dict.fromkeys(("kill", "stop", "scancel", "abort"), "cancel"),
    **dict.fromkeys(("log", "tail", "cat", "output"), "logs"),
    **dict.fromkeys(("exec", "attach", "enter", "bash"), "shell"),
    **dict.fromkeys(("restart", "retry", "resubmit"), "rerun"),
    **dict.fromkeys(("clean", "prune", "rm", "remove", "delete"), "gc"),
    **dict.fromkeys(("notebook", "jupyter", "tensorboard"), "open"),
    **dict.fromkeys(("explain", "debug"), "why"),
    **dict.fromkeys(("edf", "environment", "environments"), "env"),
    **dict.fromkeys(("validate", "lint"), "env check"),
    **dict.fromkeys(("monitor", "follow"), "watch"),
    **dict.fromkeys(("pull", "convert"), "import"),
    "sites": "site",
    "version": "--version",
    "help": "--help",
}


def find_verb(words: Sequence[str]) -> int | None:
    """The index of the first word that is not an option (nor the value of --site), or None."""
    skip = False
    for index, word in enumerate(words):
        if skip:
            skip = False
        elif word == "--site":
            skip = True
        elif not word.startswith("-"):
            return index
    return None


def parse(argv: Sequence[str]) -> argparse.Namespace | None:
    """The parsed command, or None if only help or the version was requested (and printed)."""
    words, rest = split_rest(argv)
    at = find_verb(words)
    if at is None:
        if "--version" in words:
            print(f"runner {__version__}")
            return None
        print(overview())
        if "-h" in words or "--help" in words or not words:
            return None
        options = ("--help", "--version", "--on", "--site", "--verbose")
        close = nearest(words[0], options, 0.75)
        fix = f"did you mean runner {close}?" if close else "runner --help"
        if words[0] in options:
            fix = f"add one: runner launch {' '.join(words)}"
        raise RunnerError(
            f"there is no verb in {' '.join(words)!r}",
            "runner needs a verb, such as `launch`",
            fix,
            exit_code=2,
        )
    verb = words[at]
    if verb not in VERBS:
        close = _OTHER_NAMES.get(verb) or nearest(verb, VERBS, 0.6)
        fix = f"did you mean `runner {close}`?" if close else "runner --help"
        raise RunnerError(
            f"there is no verb {verb!r}", f"the verbs are {', '.join(VERBS)}", fix, exit_code=2
        )
    # common options may also come before the verb; moved to the end, they reach the innermost parser (`env show`)
    args = make_parser((verb,)).parse_args([*words[at:], *words[:at]])
    if rest and not getattr(args, "takes_words", False):
        whole = " ".join(filter(None, (verb, getattr(args, "action", None))))
        raise RunnerError(
            f"{whole}: unexpected argument {rest[0]!r} after `--`",
            f"`runner {whole}` does not pass arguments on to another program",
            f"leave out `--`, or see: runner {whole} --help",
            exit_code=2,
        )
    args.rest, args.typed, args.parse, args.make_parser, args.verbs = (
        rest,
        (*argv,),
        parse,
        make_parser,
        tuple(VERBS),
    )
    return args


# any path that the user names may be in a folder of another user; Path.exists raises these errors too
_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def _stopped(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error: Python wraps one that arrives while a class is created, and cleaning up after
    Ctrl-C may fail."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def run(argv: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code."""
    own = split_rest(argv)[0]
    console = Console(verbose="-v" in own or "--verbose" in own, wide="--wide" in own)
    try:
        try:
            hosts, argv = split_on(argv)
            args = parse(argv)
            code: int
            if args is not None and hosts:
                from runner.commands.on import run_on

                code = run_on(hosts, argv, args, console)
            else:
                code = 0 if args is None else args.run(args, console)
        except SystemExit as leave:  # argparse's, after --help
            code = leave.code if isinstance(leave.code, int) else 0
        sys.stdout.flush()
        return code
    except RunnerError as error:
        console.error(error)
        return 130 if _stopped(error) else error.exit_code
    except KeyboardInterrupt:
        console.say("runner: stopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        # the program that reads our stdout (head, grep -q) has ended: exit silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if _stopped(error):
            console.say("runner: stopped by Ctrl-C")
            return 130
        if isinstance(error, OSError) and error.filename and error.errno in _REFUSED:
            from runner.machine import files

            console.error(files.explain(error, f"use {error.filename}"))
            return 1
        return console.bug(error, argv)
