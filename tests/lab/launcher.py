#!/usr/bin/python3 -IS
"""What the SPANK plugins call: `launcher.py check`, `launcher.py hold FOLDER ALIVE READY`; as a task: enter."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # -I: the user's PYTHON* variables must not reach this
sys.dont_write_bytecode = True

from tests.lab.container.variables import PREFIX  # noqa: E402


def main() -> int:
    if PREFIX + "PROGRAM" in os.environ:
        from tests.lab.container.enter import enter

        enter(sys.argv[1:])
    from tests.lab.container.request import Refusal
    from tests.lab.container.resolve import resolve

    here = os.environ.get(PREFIX + "HERE") or os.environ.get("SLURM_SUBMIT_DIR") or str(Path.cwd())
    if sys.argv[1] == "save":
        from tests.lab.container.enter import save

        return save(sys.argv[2], sys.argv[3])
    if sys.argv[1] == "check":
        try:
            resolve(os.environ, here, lenient=True)
        except Refusal as refusal:
            print(f"error: {refusal}", file=sys.stderr)
            return 1
        return 0
    from tests.lab.container.hold import hold

    folder, alive, ready = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    try:
        request = resolve(os.environ, here)
        if request.image or request.name:
            hold(request, here, folder, alive, ready)
        else:
            os.write(ready, b"0")
    except (Refusal, OSError) as problem:
        os.write(ready, str(problem).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
