"""The list of public batch scripts, and their texts, which stay outside of this repository.

`corpus.tsv` names repository, commit, path and SHA-256 of each script. The text comes from a git directory
`MIRRORS/OWNER+NAME` (or `MIRRORS/OWNER+NAME/repo`), for example from
`git clone --bare https://github.com/OWNER/NAME MIRRORS/OWNER+NAME`.
"""

from __future__ import annotations

import csv
import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath

LIST = Path(__file__).with_name("corpus.tsv")
BESIDE_FILES, BESIDE_BYTES = 200, 4 << 20
"""limits for the files of a script's folder that are extracted with it"""


@dataclass(frozen=True)
class Script:
    """A batch script of a public repository, and what the checks found. An empty verdict: not checked."""

    repository: str
    commit: str
    path: str
    sha256: str
    test_only: str = ""
    """what plain `sbatch --test-only` says: accepted, or the error"""
    submitted: str = ""
    """same: `runner launch` submits the same job as plain sbatch; refused; or the fields that differ"""
    calls: str = ""
    """same: under `runner`, the script makes the same calls; or what differs"""
    reason: str = ""
    """why the calls were not compared, or what explains a difference"""

    @property
    def name(self) -> str:
        return f"{self.repository}: {self.path}"


def read_list(path: Path = LIST) -> list[Script]:
    with path.open(newline="") as file:
        return [Script(**row) for row in csv.DictReader(file, delimiter="\t")]


def write_list(scripts: Iterable[Script], path: Path = LIST) -> None:
    names = [field.name for field in fields(Script)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(script, name) for name in names] for script in scripts)


def git_directory(mirrors: Path, repository: str) -> Path:
    folder = mirrors / repository.replace("/", "+")
    return folder / "repo" if (folder / "repo").is_dir() else folder


def git(folder: Path, *words: str) -> bytes:
    return subprocess.run(("git", "-C", str(folder), *words), capture_output=True, check=True).stdout


def text(script: Script, mirrors: Path) -> bytes:
    """The script's bytes, checked against its SHA-256."""
    data = git(git_directory(mirrors, script.repository), "show", f"{script.commit}:{script.path}")
    if hashlib.sha256(data).hexdigest() != script.sha256:
        raise SystemExit(f"{script.name}: its SHA-256 is not that of the list")
    return data


def extract(script: Script, mirrors: Path, target: Path, beside: bool = False) -> Path:
    """Write the script below `target`, with `beside` also the small files of its folder; returns its path."""
    files = _beside(script, git_directory(mirrors, script.repository)) if beside else {}
    for path, data in {**files, script.path: text(script, mirrors)}.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(data)
        (target / path).chmod(0o755)
    return target / script.path


def _beside(script: Script, source: Path) -> dict[str, bytes]:
    """path -> content of the files in the script's folder and below."""
    parent = str(PurePosixPath(script.path).parent)
    listed = git(source, "ls-tree", "-r", script.commit, "--", *([] if parent == "." else [f"{parent}/"]))
    entries = [line.partition("\t") for line in listed.decode("utf-8", "surrogateescape").splitlines()]
    wanted = [(path, head.split()[2]) for head, _, path in entries if head.startswith("100") and path[:1] != '"']
    wanted = sorted(wanted, key=lambda each: each[0].count("/"))[:BESIDE_FILES]
    asked = "".join(f"{blob}\n" for _, blob in wanted).encode()
    answer = subprocess.run(("git", "-C", str(source), "cat-file", "--batch"), input=asked, capture_output=True).stdout
    found, position, total = {}, 0, 0
    for path, _ in wanted:
        head, _, _ = answer[position:].partition(b"\n")
        words = head.split()
        position += len(head) + 1
        if words[-1:] == [b"missing"] or len(words) != 3:  # a mirror can lack large files
            continue
        size = int(words[2])
        total += size
        if total <= BESIDE_BYTES:
            found[path] = answer[position : position + size]
        position += size + 1
    return found


def with_verdicts(scripts: Iterable[Script], verdicts: dict[str, dict[str, str]]) -> list[Script]:
    """`verdicts`: SHA-256 -> the fields that a check has found."""
    return [replace(script, **verdicts.get(script.sha256, {})) for script in scripts]
