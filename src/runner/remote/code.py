"""What `--on` sends before a verb runs on HOST: the project, with the files that a launch copies, and other files that
the command line names.

On HOST, the project has its path below the folder of this machine's copies, and the other files have theirs below
`.outside/KEY`. Each state of a copy has a token, which is made from names and checksums. This machine keeps the list of
files for the token that HOST has, so only new content travels.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from runner.errors import RunnerError
from runner.machine import files, folders, secrets
from runner.machine.report import Report
from runner.project import Project, is_shared_place
from runner.remote.ssh import Connection
from runner.runs import sent, snapshot
from runner.runs.git import work_tree
from runner.runs.snapshot import DIFF, Snapshot
from runner.site_files import site_documents, user_folder

VERBS = ("build", "diff", "env", "import", "launch", "memory", "open", "prefetch", "rerun", "shell")
"""the verbs that read files of the project"""
# arguments that may name a file
_NAMED = (
    "job",
    "env",
    "script",
    "where",
    "environment",
    "environments",
    "lock",
)
_CHUNK_BYTES = 32 << 20
"""what travels at once; after a lost connection, the same command continues behind the last chunk"""
# a file that changed this recently may change again without another time stamp
_RACY_NS = 2 * 10**9

Manifest = dict[str, str]
"""name -> size, times of modification and change in ns, inode, type and checksum, as words"""
Lists = tuple[Manifest, list[str], list[str]]
"""all files after a step; names of the files to write; names of the files to remove"""


class Parcel(NamedTuple):
    """What is on this machine, and should be on HOST. Names are relative to the folder of the copies."""

    key: str
    sources: dict[str, str | bytes]
    """name -> path, or content"""
    words: dict[str, str]
    """word of the command line -> name of the file"""
    sites: list[str]


def top_of(project: Project) -> Path | None:
    """The project, or the git work tree around the current folder."""
    tree = work_tree(project.start)
    return project.root or (tree if tree and not is_shared_place(tree) else None)


def named_files(args: argparse.Namespace, project: Project) -> dict[str, Path]:
    """The words of the command line that name files, and the files."""
    found = {}
    for name in _NAMED:
        value = getattr(args, name, None)
        for word in value if isinstance(value, list) else [value or ""]:
            path = project.start / Path(word).expanduser()
            if ("/" in word or "." in word or name == "job") and path.is_file():
                found[word] = path.parent.resolve() / path.name
    return found


def pack(
    main: Path | None, named: Mapping[str, Path], site: str, environ: Mapping[str, str]
) -> Parcel:
    """What to send: `main`, the folder with the code, and the files that words of the command line name."""
    key = hashlib.sha256(os.fsencode(str(main or sorted(map(str, named.values()))))).hexdigest()[
        :16
    ]
    parcel = Parcel(key, {}, {}, [])
    if main is not None:
        taken = snapshot.plan(main)
        parcel.sources.update(
            (f"{main}/{name}"[1:], f"{main}/{name}") for name in taken.sources[0].files
        )
        parcel.sources.update(
            (f"{main}/{name}"[1:], data) for name, data in _record(main, taken).items()
        )
    for word, path in named.items():
        inside = main is not None and path.is_relative_to(main)
        name = str(path)[1:] if inside else f".outside/{key}{path}"
        parcel.sources[name] = str(path)
        if not inside or Path(word).expanduser().is_absolute():
            parcel.words[word] = name
    with suppress(RunnerError):  # a site that only HOST knows
        own = [document.path for document in (site_documents(site, environ) if site else ())]
        parcel.sites.extend(
            f".outside/{key}{path}" for path in own if path.parent == user_folder(environ)
        )
        parcel.sources.update((name, name.removeprefix(f".outside/{key}")) for name in parcel.sites)
    return parcel


def _record(main: Path, taken: Snapshot) -> dict[str, bytes]:
    """The files of the record `runs/sent.py`. Raises RunnerError if git's diff contains a secret."""
    state = asdict(taken.git) if taken.git else {}
    state |= {"left_out": taken.left_out, "notes": taken.notes}
    found = {
        sent.FILES: os.fsencode("\0".join(taken.sources[0].files)),
        sent.STATE: json.dumps(state).encode(),
    }
    if (main / ".git").exists():
        found[".git/runner"] = b""  # marks the top of the project, and is not a repository
    if taken.git and taken.git.modified:
        with folders.temporary("runner-diff-") as folder:
            snapshot.write_diff(taken, folder)
            snapshot.check_diff(folder)
            found[f"{sent.SENT}/{DIFF}"] = (folder / DIFF).read_bytes()
    return found


def send(
    connection: Connection, parcel: Parcel, environ: Mapping[str, str], report: Report
) -> None:
    """Bring the copy on HOST up to date. Raises RunnerError if a file contains a known secret."""
    cache = folders.cache_folder(environ) / "on" / f"{parcel.key}-{connection.host.target}"
    token, *unchanged = connection.ask("state.sh", key=parcel.key).split("\0")
    token = token.strip()
    before: Manifest = json.loads(files.text_of(cache / f"{token}.json") or "{}")
    there = {name: before[name] for name in unchanged if name in before} if unchanged else before
    count = size = 0
    with files.explained("read the files of the project"):
        wanted = _manifest(parcel.sources, before)
        for put, manifest in _steps(there, wanted):
            lines = [(name, _sum(manifest[name])) for name in sorted(manifest)]
            old, token = token, hashlib.sha256(json.dumps(lines).encode()).hexdigest()
            if put or manifest != before:  # before it is sent: the answer may get lost
                files.write(cache / f"{token}.json", json.dumps(manifest), mode=0o600)
            if put or old != token:
                gone = [name for name in there if name not in manifest]
                size += _send(connection, parcel, (manifest, put, gone), (old, token), report)
            there, count = manifest, count + len(put)
    for path in cache.glob("*.json"):
        if path.stem != token:
            folders.discard(path)
    if count:
        report.say(
            f"sent {count:,} files to {connection.host.name}: {size / 1e6:,.1f} MB, compressed"
        )


def _content(source: str | bytes) -> tuple[str, bytes]:
    return ("file", source) if isinstance(source, bytes) else snapshot.content_of(Path(source))


def _sum(line: str) -> str:
    return line.split(" ", 4)[4]


def _manifest(sources: Mapping[str, str | bytes], before: Manifest) -> Manifest:
    """The manifest of the files. Those that have not changed since `before` are not read again."""
    found: Manifest = {}
    begun = time.time_ns() - _RACY_NS
    known = [value.encode(errors="surrogateescape") for value in secrets.known()]
    for name, source in sources.items():
        stamp = "0 0 0 0"
        if isinstance(source, str):
            status = os.lstat(source)
            stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
            old = before.get(name, "")
            if old.startswith(f"{stamp} "):
                found[name] = old
                continue
            if status.st_ctime_ns > begun:
                stamp = f"{status.st_size} 0 0 0"
        kind, data = _content(source)
        if any(value in data for value in known):
            secrets.refuse(
                data,
                f"the copy on the other machine ({source if isinstance(source, str) else name})",
            )
        found[name] = f"{stamp} {kind} {hashlib.sha256(data).hexdigest()}"
    return found


def _steps(there: Manifest, wanted: Manifest) -> Iterator[tuple[list[str], Manifest]]:
    """(names to send, the state after that). Each step but the last has the size of a chunk."""
    differing = [name for name, line in wanted.items() if there.get(name) != line]
    differing = [
        name for name in differing if name not in there or _sum(there[name]) != _sum(wanted[name])
    ]
    state, put, size = {name: there[name] for name in there if name in wanted}, [], 0
    for name in differing:
        put.append(name)
        size += int(wanted[name].split(" ", 1)[0])
        if size > _CHUNK_BYTES:
            state |= {each: wanted[each] for each in put}
            yield put, state
            put, size = [], 0
    yield put, wanted


def _send(
    connection: Connection, parcel: Parcel, lists: Lists, tokens: tuple[str, str], report: Report
) -> int:
    """Send one step, and return the number of bytes."""
    import tarfile  # slow, and most verbs send nothing

    def add(name: str, data: bytes, kind: str = "file") -> None:
        info = tarfile.TarInfo(name)
        info.mode = 0o777 if kind == "program" else 0o666
        if kind == "link":
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(data)
        info.size = 0 if kind == "link" else len(data)
        archive.addfile(info, io.BytesIO(data))

    with folders.temporary("runner-on-") as folder:
        path = folder / "files.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.GNU_FORMAT) as archive:
            for name, each in zip(("files", "put", "gone"), lists, strict=True):
                add(
                    f".state/{parcel.key}/{name}",
                    b"".join(os.fsencode(one) + b"\0" for one in each),
                )
            for name in lists[1]:
                kind, data = _content(parcel.sources[name])
                if f"{kind} {hashlib.sha256(data).hexdigest()}" != _sum(lists[0][name]):
                    raise RunnerError(
                        f"/{name} changed while runner sent it",
                        "its checksum differs",
                        "run the same command again",
                    )
                add(name, data, kind)
        data = path.read_bytes()
        values = {
            "key": parcel.key,
            "sum": hashlib.sha256(data).hexdigest(),
            "old": tokens[0],
            "new": tokens[1],
        }
        moved = connection.ask("receive.sh", parcel.sites, stdin=path, **values)
    for name in filter(None, moved.split("\0")):
        report.warn(
            f"/{name} was changed in the copy on {connection.host.name}: that version is now beside it, "
            f"as {PurePosixPath(name).name}.orig"
        )
    return len(data)


def quoted(words: Sequence[str], new: Mapping[str, str]) -> str:
    """The words of a command line for sh, with the paths on HOST (also `--flag=PATH`, `-fPATH`), but not after `--`."""
    at = words.index("--") if "--" in words else len(words)

    def one(word: str) -> str:
        flag, equals, value = "", "", word
        if word.startswith("--") and "=" in word:
            flag, equals, value = word.partition("=")
        elif re.match("-[a-z]", word) and word[2:] in new:
            flag, value = word[:2], word[2:]
        path = f'"$c"/{shlex.quote(new[value])}' if value in new else shlex.quote(value)
        return shlex.quote(flag + equals) + path if flag else path

    return " ".join([*map(one, words[:at]), *map(shlex.quote, words[at:])])
