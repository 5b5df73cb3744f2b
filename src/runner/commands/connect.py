"""connect: the connection that `--on HOST` uses."""

import argparse
import os
import sys

from runner.commands.console import Console
from runner.remote.host import find_host
from runner.remote.ssh import Connection


def connect_host(args: argparse.Namespace, console: Console) -> int:
    """`runner connect HOST`: open the connection, or close it. ssh asks what it needs on the terminal."""
    connection = Connection(find_host(args.host, os.environ), os.environ)
    if args.close:
        connection.close()
    else:
        connection.leave()
        connection.open(terminal=sys.stdin.isatty() and sys.stderr.isatty(), kept=True)
    if args.install:
        from runner.remote.install import install

        install(connection, console)
    console.say(
        f"{args.host}: {'closed' if args.close else 'connected; the connection closes 12 hours after the last command'}"
    )
    return 0
