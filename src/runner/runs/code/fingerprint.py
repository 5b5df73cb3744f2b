"""What the code of a launch is, in one sum: the same files with the same bytes have the same one."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from runner.machine import secrets
from runner.machine.files import explain
from runner.runs.code.snapshot import DIFF, Snapshot


def of_snapshot(snapshot: Snapshot) -> str:
    """The sum of the files that a snapshot will hold. Raises RunnerError where one holds a known secret."""
    roots = {name: source.root for source in reversed(snapshot.sources) for name in source.files}
    return _content(((name, roots[name] / name) for name in sorted(roots)), careful=True)


def of_folder(code: Path, names: Iterable[str]) -> str:
    """The sum of these files of a RUN/code."""
    return _content((name, code / name) for name in sorted(names))


def check_diff(run_folder: Path) -> None:
    """Raise RunnerError where git's diff shows a secret, in a line that was taken out perhaps."""
    path = run_folder / DIFF
    if path.is_file():
        secrets.refuse(path.read_bytes(), f"the record of what is not committed ({DIFF})")


def _content(files: Iterable[tuple[str, Path]], *, careful: bool = False) -> str:
    total = hashlib.sha256()
    try:
        for name, path in files:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                kind, data = "link", os.fsencode(path.readlink())
            else:
                kind, data = "program" if status.st_mode & stat.S_IXUSR else "file", path.read_bytes()
                if careful:
                    secrets.refuse(data, f"the code snapshot ({name})")
            line = f"{kind} {hashlib.sha256(data).hexdigest()} {name}\n"
            total.update(line.encode(errors="surrogateescape"))
    except OSError as error:
        raise explain(error, f"read {error.filename}") from error
    return total.hexdigest()
