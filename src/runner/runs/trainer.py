"""How to read a trainer's log and to know its checkpoints: one TOML file per trainer.

The patterns are POSIX extended regular expressions, because a compute node has only grep and awk. What a compute node
needs of the trainers is in the file `trainers` of the run folder: their checkpoints and save signals, and how the log
shows them. A launch does not read runner's TOML files for that, but payload/trainers.txt, which is made from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from runner.errors import RunnerError, unknown
from runner.located_toml import Document, read_toml, refuse_unknown_keys, strings, typed, wrong_type
from runner.machine import process
from runner.project import Project
from runner.runs.checks import SAVE_SIGNALS
from runner.runs.hub import argument_values
from runner.runs.patterns import BARS, GENERIC, compiled

FILE = "trainers"
"""the file of the run folder"""
SHIPPED = "trainers.txt"
"""the file of payload/ from which each launch takes what it needs of runner's own trainers"""
NONE = "none"
"""the value of `trainer` for a job whose log must not be read"""
OWN = "own yes"
"""the line of a trainer of the user, which has all of its patterns, because its file may change after the launch"""
_LIMIT_BYTES = 1 << 18
_SHIPPED = Path(__file__).with_name("trainers")
_KEYS = (
    "summary",
    "like",
    "detect",
    "first_epoch",
    "without_loss",
    "save_signal",
    "script",
    "lines",
    "checkpoints",
)
_SCRIPT = ("match", "saves", "launchers", "add")
_WRITTEN = ("attempt", "time", "total_steps")
_CHECKPOINTS = ("name", "needs", "tracker", "arguments", "resume")


def render(
    chosen: str | None, project: Project, words: Sequence[str] = (), place: object = None
) -> str:
    """The text of the file `trainers`: all trainers, the user's first, or only the chosen one.

    Each line is a key and its value. `words` are the job's words, which may name the folder of the checkpoints.
    `place`: the line that chose the trainer.
    Raises RunnerError for an unknown trainer, and for an error in one of the user's files.
    """
    if chosen == NONE:
        return ""
    own, shipped = _own_files(project), _shipped()
    if chosen is not None and chosen not in {*own, *shipped}:
        fix = "describe your own trainer in jobs/trainers/NAME.toml"
        raise unknown("trainer", chosen, [*shipped, *own, NONE], fix, place)
    names = [chosen] if chosen else [*own, *(name for name in shipped if name not in own)]
    if chosen == GENERIC:
        names = [GENERIC, BARS]
    values = _values(words)
    lines = [f"chosen {chosen}"] if chosen else []
    for name in names:
        found = [OWN, *_lines_of(own[name], own)] if name in own else shipped[name]
        lines += (f"trainer {name}", *_for_run(found, values))
    return "\n".join(lines) + "\n"


@cache
def readable(text: str) -> str:
    """The file `trainers` of a run, with all patterns of each trainer: for what reads the steps of a log.

    Runs of earlier versions have them all in the file.
    """
    lines: list[str] = []
    shipped = _shipped()
    for name, found in _sections(text).items():
        if name is not None:
            lines.append(f"trainer {name}")
        is_ours = name in shipped and OWN not in found
        lines += _lines_of(_SHIPPED / f"{name}.toml", {}) if is_ours else found
    return "\n".join(lines) + "\n"


def shipped_text() -> str:
    """The text of payload/trainers.txt: what launches and compute nodes need of runner's own trainers."""
    names = sorted(path.stem for path in _SHIPPED.glob("*.toml"))
    lines: list[str] = []
    for name in (*(name for name in names if name not in (GENERIC, BARS)), GENERIC, BARS):
        lines += (f"trainer {name}", *_needed(_lines_of(_SHIPPED / f"{name}.toml", {})))
    return "\n".join(lines) + "\n"


def _needed(lines: Sequence[str]) -> Iterator[str]:
    """Of a trainer's lines, those that a launch and a compute node need.

    Lines of steps are among them only if the line of a printed checkpoint does not name its step: it is the last one.
    """
    keys = ("recognize ", "save_signal ", "script_", "checkpoint_")
    yield from (line for line in lines if line.startswith(keys))
    tables: list[list[str]] = []
    for line in lines:
        if line.startswith("line "):
            tables.append([line])
        elif line.startswith(("find step ", "find saved ")):
            tables[-1].append(line)
    saving = [table for table in tables if any(line.startswith("find saved ") for line in table)]
    if any(len(table) == 2 for table in saving):
        saving = [table for table in tables if len(table) > 1]
    yield from (line for table in saving for line in table)


def _sections(text: str) -> dict[str | None, list[str]]:
    """Name -> lines of each trainer. Lines before the first one have the name None."""
    found: dict[str | None, list[str]] = {}
    name = None
    for line in text.splitlines():
        if line.startswith("trainer "):
            name = line.removeprefix("trainer ")
            found[name] = []
        else:
            found.setdefault(name, []).append(line)
    return found


def _shipped() -> dict[str, list[str]]:
    """Name -> lines of each of runner's own trainers."""
    text = (Path(__file__).with_name("payload") / SHIPPED).read_text(encoding="utf-8")
    return {name: lines for name, lines in _sections(text).items() if name is not None}


def _for_run(lines: Sequence[str], values: Mapping[str, str]) -> Iterator[str]:
    """The lines for a run whose job has these options: they name the folders of its checkpoints."""
    for line in lines:
        key, _, value = line.partition(" ")
        if key == "checkpoint_argument":
            if value in values:
                yield f"checkpoint_folder {values[value]}"
        elif not key.startswith("script_"):
            yield line


def _own_files(project: Project) -> dict[str, Path]:
    """Name -> file of the user's trainers. Such a file replaces runner's trainer of the same name."""
    folder = project.root / "jobs/trainers" if project.root else None
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


class Saving(NamedTuple):
    """How a trainer saves before the time limit."""

    trainer: str
    signals: tuple[str, ...]
    """the signals on which it saves and exits"""
    saves: str
    """a pattern: without such text in its command or script, it does not handle the signals; empty: it always does"""
    launchers: tuple[str, ...]
    """the launchers under which it handles the signals; empty: all"""
    add: str
    """what to add so that it handles the signals"""


def saving(chosen: str | None, project: Project, text: str) -> Saving | None:
    """How the program saves: as the chosen trainer does, or else the one whose `script.match` is in `text`, which is
    the command and the text of the script. None if no trainer is known.

    Raises RunnerError for an error in one of the user's files.
    """
    if chosen == NONE:
        return None
    own, shipped = _own_files(project), _shipped()
    names = [*own, *(name for name in shipped if name not in own)]
    for name in [chosen] if chosen in names else names:
        lines = _saving_lines(_documents(own[name], own)) if name in own else shipped[name]
        values = dict(line.split(" ", 1) for line in lines)
        match = values.get("script_match")
        if name != chosen and (match is None or not re.search(match, text)):
            continue
        signals, launchers = (
            tuple(values.get(key, "").split()) for key in ("save_signal", "script_launchers")
        )
        return Saving(
            name, signals, values.get("script_saves", ""), launchers, values.get("script_add", "")
        )
    return None


def _documents(path: Path, own: Mapping[str, Path]) -> tuple[Document, ...]:
    """The trainer's file, and that of the trainer that it is like."""
    document = _read(path)
    like = typed(document, ("like",), str)
    if like is None:
        return (document,)
    beside = own.get(like) or _SHIPPED / f"{like}.toml"
    if like not in own and not beside.is_file():
        raise unknown("trainer", like, {*_shipped(), *own}, place=document.place("like"))
    return document, _read(beside)


def _lines_of(path: Path, own: Mapping[str, Path]) -> list[str]:
    """All lines of one trainer: a key and its value each. Its own are before those of the trainer that it is like."""
    documents = _documents(path, own)
    lines = [line for document in documents for line in _lines(document)]
    saves = [*_saving_lines(documents)]
    return [*saves, *(_recognizing(lines) if saves else ()), *lines]


def _recognizing(lines: Sequence[str]) -> Iterator[str]:
    """The pattern of a line that only this trainer prints: `detect`, or else that of its first line with a loss.

    By it, the batch script recognizes a trainer with a save signal in the log.
    """
    match = None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == "line":
            match = value
        if key == "detect" or (match and line.startswith("find loss ")):
            yield f"recognize {value if key == 'detect' else match}"
            return


def _saving_lines(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        refuse_unknown_keys(document, ("script",), _SCRIPT, "trainer")
    if signals := next(filter(None, map(_save_signals, documents)), ()):
        yield f"save_signal {' '.join(signals)}"
    tables = [typed(each, ("script",), dict, {}) for each in documents]
    if match := typed(documents[0], ("script", "match"), str):
        yield f"script_match {match}"
    table = next(filter(None, tables), {})
    if "launchers" in table:
        yield f"script_launchers {' '.join(table['launchers'])}"
    yield from (f"script_{key} {table[key]}" for key in ("saves", "add") if key in table)


def _save_signals(document: Document) -> tuple[str, ...]:
    found = document.get("save_signal")
    if found is None:
        return ()
    signals = (found,) if isinstance(found, str) else strings(document, ("save_signal",))
    for name in signals:
        if name not in SAVE_SIGNALS:
            raise unknown("save_signal", name, SAVE_SIGNALS, place=document.place("save_signal"))
    return signals


def _read(path: Path) -> Document:
    """The file. Raises RunnerError if it would block or take long to read: another user may share jobs/trainers/."""
    if path.exists() and (not path.is_file() or path.stat().st_size > _LIMIT_BYTES):
        why = f"a trainer is a TOML file of at most {_LIMIT_BYTES >> 10} KiB"
        raise RunnerError(f"cannot read the trainer {path}", why, "move it out of jobs/trainers/")
    return read_toml(path)


def _values(words: Sequence[str]) -> dict[str, str]:
    """option -> value. Values that only the shell of a batch script knows are left out."""
    found = {name: value.strip("\"'") for name, value in argument_values(words).items()}
    return {
        name: value for name, value in found.items() if re.fullmatch(r"[^-$`\s][^$`\n]*", value)
    }


def _lines(document: Document) -> Iterator[str]:
    """The lines of one file: how to read the log, and what a complete checkpoint is."""
    shipped = document.path.parent == _SHIPPED  # the tests have checked its patterns

    def pattern(value: Any, *keys: str) -> str:
        return _pattern(document, value, keys, check=not shipped)

    refuse_unknown_keys(document, (), _KEYS, "trainer")
    if "detect" in document.data:
        yield f"detect {pattern(document.data['detect'], 'detect')}"
    if typed(document, ("without_loss",), bool):
        yield "without_loss yes"
    if epoch := typed(document, ("first_epoch",), int):
        yield f"first_epoch {epoch}"
    tables = typed(document, ("lines",), list, [])
    for index, table in enumerate(tables):
        place = ("lines", str(index))
        if not isinstance(table, dict) or "match" not in table:
            raise RunnerError(
                f"{document.place(*place)}: there is no `match` in [[lines]]",
                "`match` is the pattern that selects lines of the log; the other patterns read only those lines",
                "match = 'step [0-9]+'",
            )
        yield f"line {pattern(table['match'], *place, 'match')}"
        if "unless" in table:
            yield f"unless {pattern(table['unless'], *place, 'unless')}"
        for key in (key for key in table if key not in ("match", "unless")):
            if not re.fullmatch("[a-z][a-z0-9_]*", key) or key in _WRITTEN:
                why = (
                    "the key becomes a name in metrics.jsonl: lowercase letters, digits and _, but not "
                    + ", ".join(_WRITTEN)
                )
                raise RunnerError(
                    f"{document.place(*place, key)}: {key!r} cannot be a key",
                    why,
                    "use another name",
                )
            yield f"find {key} {pattern(table[key], *place, key)}"
    refuse_unknown_keys(document, ("checkpoints",), _CHECKPOINTS, "trainer")
    checkpoints = typed(document, ("checkpoints",), dict, {})
    if "name" not in checkpoints and checkpoints.keys() & {"needs", "tracker"}:
        what = f"{document.place('checkpoints')}: there is no `name` in [checkpoints]"
        raise RunnerError(
            what,
            "`needs` and `tracker` apply only to checkpoints that match `name`",
            'name = "step-*/"',
        )
    if (
        "like" not in document.data
        and not checkpoints
        and not any(len(table) > 1 for table in tables)
    ):
        why = "it needs `like`, [checkpoints], or a pattern such as `step` in [[lines]]"
        raise RunnerError(
            f"{document.path}:1: the trainer has no patterns",
            why,
            "add one of them, or remove the file",
        )
    for key in (key for key in _CHECKPOINTS if key in checkpoints):
        value = checkpoints[key]
        words = value if isinstance(value, list) else [value]
        if not all(isinstance(word, str) and word and "\n" not in word for word in words):
            raise wrong_type(document, ("checkpoints", key), "text, or an array of texts")
        if key == "arguments":
            names = [word.lstrip("-").replace("-", "_") for word in words]
            yield from (f"checkpoint_argument {name}" for name in names)
        elif key != "resume":
            yield from (f"checkpoint_{key} {word}" for word in words)


_FOREIGN = re.compile(r"\\[A-Za-z0-9<>]|\{[0-9,]+\}|\(\?")
"""what other dialects have, and some awk does not"""


def _pattern(document: Document, value: Any, keys: tuple[str, ...], *, check: bool) -> str:
    """The pattern. Raises RunnerError, with file, line and key, for one that grep or an awk does not understand."""
    place = f"{document.place(*keys)}: {keys[-1]}"
    if not isinstance(value, str) or not value or "\n" in value:
        raise RunnerError(
            f"{place} must be a pattern",
            f"its value is {value!r}",
            f"write a regular expression in quotes: {keys[-1]} = '…'",
        )
    if found := _FOREIGN.search(value):
        why = f"not every awk understands {found[0]}"
        raise RunnerError(
            f"{place} uses {found[0]}",
            why,
            "write [0-9] for \\d, [[:space:]] for \\s, [[:alnum:]_] for \\w, ( for (?:, and xxx* for x{2,}",
        )
    if check:
        try:
            compiled(value)
        except re.error as error:
            raise RunnerError(
                f"{place} is not a pattern: {value!r}", str(error), "correct the regular expression"
            ) from None
        for argv in (
            ("grep", "-E", "-e", value),
            ("awk", 'BEGIN { exit !("" ~ ENVIRON["PATTERN"]) }'),
        ):
            done = process.run(argv, text_input="", check=False, env={"PATTERN": value})
            if done.exit_code > 1:
                why = done.stderr.strip().removeprefix(f"{argv[0]}: ")
                raise RunnerError(
                    f"{place} is not a pattern: {value!r}", why, "correct the regular expression"
                )
    return value
