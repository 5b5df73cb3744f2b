"""open: a program with a web page, in an environment or a run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs, add_settings, settings

_WARNINGS = (2, 10)  # minutes before the time limit
_FAREWELL_SECONDS = 5  # in which open pages can show that the tunnel has ended


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    from runner.runs.open import APPS

    parser = subparsers.add_parser("open", parents=[common], usage="runner open jupyter|code|tensorboard [ENV|RUN]")
    parser.add_argument("app", choices=tuple(APPS), metavar="APP", help=f"one of: {', '.join(APPS)}")
    parser.add_argument("where", nargs="?", metavar="ENV|RUN", help="where (default: the project's environment)")
    parser.add_argument("--browser", action="store_true", help="open the page in a browser on this machine")
    add_settings(parser, shell=True)
    parser.set_defaults(run=open_page)


def open_page(args: argparse.Namespace, console: Console) -> int:
    """`runner open`: print the URL, and keep the tunnel until it ends (exit code 1) or Ctrl-C."""
    from runner.machine import files
    from runner.project import find_project
    from runner.runs import open as pages
    from runner.runs.shell import ShellRequest

    request = ShellRequest(args.where, site=args.site, engine=args.engine, given=settings(args))
    run, pid = pages.started(args.app, request, find_project(), os.environ, console)
    tunnel = pages.connected(args.app, run, *pages.wait(args.app, run, pid, console), os.environ, console)
    try:
        state = run.folder / "open" / args.app
        url = f"http://127.0.0.1:{tunnel.port}{pages.APPS[args.app]}{files.text_of(state / 'token')}"
        console.answer(url)
        sys.stdout.flush()
        console.say(f"{run.name}: Ctrl-C closes the tunnel; the server runs until: runner cancel {run.name}")
        if args.browser:
            open_browser(url, state / "page.html")
        left, warned = pages.minutes_left(run), 11
        while left != -1 and not tunnel.wait(10):
            left = pages.minutes_left(run)
            if mark := next((mark for mark in _WARNINGS if left and 0 < left <= mark < warned), 0):
                console.warn(f"{run.name} reaches its time limit in {left} minutes: save your work")
                warned = mark
        ended = pages.minutes_left(run) == -1
        again = "has ended too" if ended else "still runs: the same command connects again"
        console.warn(f"the tunnel has ended; {run.name} {again}")
        time.sleep(_FAREWELL_SECONDS)
        return 1
    finally:
        tunnel.close()


def open_browser(url: str, page: Path) -> None:
    """Open a page whose URL has a token. Other users can read the arguments of a browser, so they name a file."""
    import webbrowser

    from runner.machine import files

    files.write(page, f'<meta http-equiv="refresh" content="0; url={url}">\n', mode=0o600)
    webbrowser.open(page.as_uri())
