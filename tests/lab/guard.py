"""End a lab when the process that started it has gone, whatever ended that: `guard.py FOLDER`, with a pipe as input."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lab import processes


def main() -> None:
    folder = Path(sys.argv[1])
    sys.stdin.read()  # ends when the last holder of the pipe's other end has gone
    processes.end_all(folder)
    processes.remove(folder)


if __name__ == "__main__":
    main()
