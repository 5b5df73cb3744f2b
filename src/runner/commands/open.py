"""open: a program with a web page, in an environment or a run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs, add_settings, settings
from runner.errors import RunnerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from runner.runs.run import Run

_WARNINGS = (2, 10)  # minutes before the time limit
_FAREWELL_SECONDS = 5  # in which open pages can show that the tunnel has ended


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    from runner.runs.open import APPS, IDLE_MINUTES, SSH

    usage = "runner open jupyter|code|tensorboard|ssh [ENV|RUN] [options]"
    parser = subparsers.add_parser("open", parents=[common], usage=usage)
    apps = (*APPS, SSH)
    parser.add_argument("app", choices=apps, metavar="APP", help=f"one of: {', '.join(apps)}")
    parser.add_argument(
        "where", nargs="?", metavar="ENV|RUN", help="where (default: the project's environment)"
    )
    parser.add_argument(
        "--browser", action="store_true", help="open the page in a browser on this machine"
    )
    idle = f"end a run of jupyter or ssh after this time without use; 0: never (default: {IDLE_MINUTES})"
    parser.add_argument("--idle", type=int, default=IDLE_MINUTES, metavar="MINUTES", help=idle)
    stdio = "for ssh's ProxyCommand: connect stdin and stdout to the sshd of a run"
    parser.add_argument("--stdio", action="store_true", help=stdio)
    add_settings(parser, shell=True)
    parser.set_defaults(run=open_page)


def open_page(args: argparse.Namespace, console: Console) -> int:
    """`runner open`: print the URL, and keep the tunnel until it ends (exit code 1) or Ctrl-C."""
    from runner.machine import files
    from runner.project import find_project
    from runner.runs import open as pages
    from runner.runs.shell import ShellRequest

    if args.stdio and (args.app != pages.SSH or not args.where):
        what = "--stdio is given without ssh and a run"
        raise RunnerError(
            what, "it is for ssh's ProxyCommand", "runner open ssh RUN --stdio", exit_code=2
        )
    if args.idle < 0:
        what = f"--idle {args.idle} is not a time"
        why = "it must be a number of minutes, or 0 for never"
        raise RunnerError(what, why, "--idle 60", exit_code=2)
    if args.stdio:
        return _open_ssh(
            pages.running(args.where, args.site, find_project(), os.environ), 0, args, console
        )
    request = ShellRequest(args.where, site=args.site, engine=args.engine, given=settings(args))
    run, pid = pages.started(args.app, request, find_project(), os.environ, console, args.idle * 60)
    if args.app == pages.SSH:
        return _open_ssh(run, pid, args, console)
    tunnel = pages.connected(
        args.app, run, *pages.wait(args.app, run, pid, console), os.environ, console
    )
    try:
        state = run.folder / "open" / args.app
        url = (
            f"http://127.0.0.1:{tunnel.port}{pages.APPS[args.app]}{files.text_of(state / 'token')}"
        )
        console.answer(url)
        sys.stdout.flush()
        console.say(
            f"{run.name}: Ctrl-C closes the tunnel; to end the server with its run: runner cancel {run.name}"
        )
        if args.browser:
            open_browser(url, state / "page.html")
        left, warned = pages.minutes_left(run), 11
        while left != -1 and not tunnel.wait(10):
            left = pages.minutes_left(run)
            if mark := next((mark for mark in _WARNINGS if left and 0 < left <= mark < warned), 0):
                console.warn(f"{run.name} reaches its time limit in {left} minutes: save your work")
                warned = mark
        ended = pages.minutes_left(run) == -1
        again = "is not running" if ended else "still runs: the same command connects again"
        console.warn(f"the tunnel has ended; {run.name} {again}")
        time.sleep(_FAREWELL_SECONDS)
        return 1
    finally:
        tunnel.close()


def _open_ssh(run: Run, pid: int, args: argparse.Namespace, console: Console) -> int:
    """Print the configuration with which ssh reaches the container; with --stdio, be its ProxyCommand."""
    from runner.machine import files
    from runner.machine.tunnel import pump
    from runner.runs import open as pages

    node, server = pages.wait(args.app, run, pid, console)
    if args.stdio:
        tunnel = pages.connected(args.app, run, node, server, os.environ, console)
        try:
            pump(tunnel.port)
        finally:
            tunnel.close()
        return 0
    called = Path(sys.argv[0])
    program = (
        (str(called.absolute()),)
        if called.name == "runner"
        else (sys.executable, "-P", "-m", "runner")
    )
    block = pages.ssh_config(run, program)
    path = run.folder / f"open/{pages.SSH}/config"
    files.write(path, block, mode=0o600)
    console.answer(block)
    console.say(f"a shell in the container: ssh -F {path} runner-{run.name}")
    console.say(
        f"for VS Code, scp and rsync, add this line at the top of ~/.ssh/config: Include {path}"
    )
    idle = ""
    if args.idle and run.job == pages.SSH:  # one that this command has launched
        idle = f", or after {args.idle} minutes without a connection"
    console.say(
        f"{run.name} ends with its job{idle}; to end the whole run now: runner cancel {run.name}"
    )
    return 0


def open_browser(url: str, page: Path) -> None:
    """Open a page whose URL has a token. Other users can read the arguments of a browser, so they name a file."""
    import webbrowser
    from html import escape

    from runner.machine import files

    # with --on, the URL is what HOST has printed
    text = f'<meta http-equiv="refresh" content="0; url={escape(url)}">\n'
    files.write(page, text, mode=0o600)
    webbrowser.open(page.as_uri())
