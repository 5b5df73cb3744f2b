"""`python -m runner` and the `runner` command."""

from __future__ import annotations

import gc
import sys


def main(*verb: str) -> int:
    """Run the command line of this process, and return its exit code."""
    # Without the calls of gc, a short command spends a tenth of its time in the garbage collector: while it reads
    # modules, and at its end, when Python looks once more through all that is about to go anyway.
    gc.set_threshold(400_000)
    try:
        from runner.cli import run

        return run([*verb, *sys.argv[1:]])
    except KeyboardInterrupt:  # while modules are still being read
        return 130
    finally:
        # If Ctrl-C came while Python was creating a class, which it does from text, it kills itself with SIGINT at its
        # end, although we have handled it. It forgets this when it runs the next text.
        eval("0")
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
