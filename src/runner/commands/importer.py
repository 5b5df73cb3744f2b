"""importer: the program that pyxis calls for an image (`importer=` in plugstack.conf)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs
from runner.errors import RunnerError


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("importer", parents=[common], prog="runner-importer")
    parser.add_argument(
        "words", nargs="+", metavar="ACTION", help="get IMAGE, release, or sync LIST"
    )
    parser.set_defaults(run=run_importer)


def run_importer(args: argparse.Namespace, console: Console) -> int:
    """`runner-importer`: `get` and `sync` print the paths of squashfs files."""
    from runner.images.importer.get import Getter, read_settings
    from runner.machine import sessions

    # scancel: the claim of an import goes at once, so that the next node does not wait for it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.umask(
        0o022
    )  # a folder that a group may write to is not used, and all users read what `sync` writes
    getter = Getter(read_settings(os.environ), os.environ, console, sessions.began(os.getpid()))
    match args.words:
        case ["get", image]:
            console.answer(str(getter.get(image)))
        case ["release"]:
            getter.release()
        case ["sync", listing]:
            for path in getter.sync(Path(listing)):
                console.answer(str(path))
        case words:
            usage = "runner-importer get IMAGE | release | sync LIST"
            raise RunnerError(
                f"runner-importer: cannot use the arguments {' '.join(words)!r}",
                "it accepts `get` with one image, `release` alone, or `sync` with one list",
                usage,
                exit_code=2,
            )
    return 0
