"""What the code of a launch is, in one sum: the same files with the same bytes have the same one."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import folders, secrets
from runner.machine.files import explain
from runner.runs.code.snapshot import DIFF, Snapshot


def summed(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the sums of its files; untracked ones that are gone by now are left out.

    Raises RunnerError where one holds a known secret.
    """
    roots = {name: source.root for source in reversed(snapshot.sources) for name in source.files}
    gone = [name for name in (snapshot.git.untracked if snapshot.git else ()) if name in roots]
    gone = [name for name in gone if not os.path.lexists(roots[name] / name)]
    snapshot = snapshot.without(gone, "it was removed during the launch")
    sums = _sums(((name, roots[name] / name) for name in snapshot.files), careful=True)
    return replace(snapshot, sums=sums, content=_total(sums))


def unchanged(snapshot: Snapshot, code: Path) -> Snapshot:
    """The snapshot that a copy of it holds: without untracked files that changed meanwhile, which are removed there.

    Raises RunnerError where another file has changed.
    """
    sums = _sums((name, code / name) for name in snapshot.files)
    changed = [name for name in snapshot.files if sums[name] != snapshot.sums.get(name)]
    untracked = {*snapshot.git.untracked} if snapshot.git else set()
    if not changed:
        return snapshot
    if found := [name for name in changed if name not in untracked]:
        raise RunnerError(f"{found[0]} was changed while the code was copied", "its sum is another one now",
                          "launch again")  # fmt: skip
    for name in changed:
        folders.discard(code / name)
    kept = {name: line for name, line in snapshot.sums.items() if name not in changed}
    return replace(snapshot.without(changed, "it changed during the launch"), sums=kept, content=_total(kept))


def of_folder(code: Path, names: Iterable[str]) -> str:
    """The sum of these files of a RUN/code."""
    return _total(_sums((name, code / name) for name in sorted(names)))


def check_diff(run_folder: Path) -> None:
    """Raise RunnerError where git's diff shows a secret, in a line that was taken out perhaps."""
    path = run_folder / DIFF
    if path.is_file():
        secrets.refuse(path.read_bytes(), f"the record of what is not committed ({DIFF})")


def _total(sums: Mapping[str, str]) -> str:
    lines = (f"{sums[name]} {name}\n" for name in sorted(sums))
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sums(files: Iterable[tuple[str, Path]], *, careful: bool = False) -> dict[str, str]:
    """Name -> kind and sha256 of each file."""
    sums: dict[str, str] = {}
    try:
        for name, path in files:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                kind, data = "link", os.fsencode(path.readlink())
            else:
                kind, data = "program" if status.st_mode & stat.S_IXUSR else "file", path.read_bytes()
                if careful:
                    secrets.refuse(data, f"the code snapshot ({name})")
            sums[name] = f"{kind} {hashlib.sha256(data).hexdigest()}"
    except OSError as error:
        raise explain(error, f"read {error.filename}") from error
    return sums
