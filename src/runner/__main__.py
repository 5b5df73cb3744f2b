"""`python -m runner` and the `runner` command."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """The exit code of the command line that this process was started with."""
    # A tenth of a short command's time went into looking for garbage among modules, while they are read and at the
    # end, when Python looks once more through all that is about to go anyway.
    gc.set_threshold(400_000)
    try:
        from runner.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are still being read
        return 130
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
