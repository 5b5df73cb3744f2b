"""`python -m runner` and the `runner` command."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit code of the command line that this process was started with."""
    try:
        from runner.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are still being read
        return 130


if __name__ == "__main__":
    sys.exit(main())
