"""How to read a trainer's log and to know its checkpoints: one TOML file per trainer.

The patterns are POSIX extended regular expressions, because a compute node has only grep and awk. They are
rendered into the file `trainers` of the run folder, which payload/trainer.awk and payload/checkpoints.sh read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
NONE = "none"
"""the value of `trainer` for a job whose log must not be read"""
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

    `words` are the job's words, which may name the folder of the checkpoints. `place`: the line that chose it.
    Raises RunnerError for an unknown trainer, and for an error in one of the user's files.
    """
    if chosen == NONE:
        return ""
    found = _files(project)
    if chosen is not None and chosen not in found:
        fix = "describe your own trainer in jobs/trainers/NAME.toml"
        raise unknown("trainer", chosen, [*found, NONE], fix, place)
    last = (GENERIC, BARS)
    names = sorted(
        found,
        key=lambda name: (name in last and last.index(name) + 1, found[name].parent == _SHIPPED),
    )
    if chosen:
        names = [*last] if chosen == GENERIC else [chosen]
    lines = [f"chosen {chosen}"] if chosen else []
    values = _values(words)
    documents = {name: _read(found[name]) for name in names}
    for name, document in documents.items():
        lines += (f"trainer {name}", *_lines(document, values))
        if like := typed(document, ("like",), str):
            if like not in found:
                raise unknown("trainer", like, found, place=document.place("like"))
            lines += _lines(documents.get(like) or _read(found[like]), values)
    return "\n".join(lines) + "\n"


def _files(project: Project) -> dict[str, Path]:
    """Name -> file; a user's file replaces runner's file of the same name."""
    folders = (_SHIPPED, *([project.root / "jobs/trainers"] if project.root else []))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


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
    files = _files(project)
    names = (
        [chosen]
        if chosen in files
        else sorted(files, key=lambda name: files[name].parent == _SHIPPED)
    )
    for name in (name for name in names if name is not None and chosen != NONE):
        document = _read(files[name])
        match = typed(document, ("script", "match"), str)
        if name != chosen and (match is None or not re.search(match, text)):
            continue
        like = typed(document, ("like",), str)
        documents = (document, *([_read(files[like])] if like in files else []))
        signals = next(filter(None, map(_save_signals, documents)), ())
        table = next(filter(None, (typed(each, ("script",), dict, {}) for each in documents)), {})
        launchers = tuple(table.get("launchers", ()))
        return Saving(name, signals, table.get("saves", ""), launchers, table.get("add", ""))
    return None


def _save_signals(document: Document) -> tuple[str, ...]:
    found = document.get("save_signal")
    if found is None:
        return ()
    signals = (found,) if isinstance(found, str) else strings(document, ("save_signal",))
    for name in signals:
        if name not in SAVE_SIGNALS:
            raise unknown("save_signal", name, SAVE_SIGNALS, place=document.place("save_signal"))
    return signals


def _save_lines(document: Document) -> Iterator[str]:
    refuse_unknown_keys(document, ("script",), _SCRIPT, "trainer")
    if signals := _save_signals(document):
        yield f"save_signal {' '.join(signals)}"


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


def _lines(document: Document, values: Mapping[str, str]) -> Iterator[str]:
    """The lines of one trainer: a key and its value each. `values` are the options of the job."""
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
    yield from _save_lines(document)
    tables = typed(document, ("lines",), list, [])
    for index, table in enumerate(tables):
        place = ("lines", str(index))
        if not isinstance(table, dict) or "match" not in table:
            raise RunnerError(
                f"{document.place(*place)}: there is no `match` in [[lines]]",
                "the patterns apply only to lines that contain `match`",
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
            f"{document.path}:1: the trainer has no patterns", why, "add them, or remove the file"
        )
    for key in (key for key in _CHECKPOINTS if key in checkpoints):
        value = checkpoints[key]
        words = value if isinstance(value, list) else [value]
        if not all(isinstance(word, str) and word and "\n" not in word for word in words):
            raise wrong_type(document, ("checkpoints", key), "text, or an array of texts")
        if key == "arguments":
            names = [word.lstrip("-").replace("-", "_") for word in words]
            yield from (f"checkpoint_folder {values[name]}" for name in names if name in values)
        elif key != "resume":
            yield from (f"checkpoint_{key} {word}" for word in words)


_FOREIGN = re.compile(r"\\[A-Za-z0-9<>]|\{[0-9,]+\}|\(\?")
"""what other dialects have, and some awk does not"""


def _pattern(document: Document, value: Any, keys: tuple[str, ...], *, check: bool) -> str:
    """The pattern. Raises RunnerError, with file, line and key, for one that grep or an awk does not understand."""
    place = f"{document.place(*keys)}: {keys[-1]}"
    if not isinstance(value, str) or not value or "\n" in value:
        raise RunnerError(
            f"{place} must be a pattern", f"its value is {value!r}", f"{keys[-1]} = 'step +'"
        )
    if found := _FOREIGN.search(value):
        why = f"{found[0]!r} is not in POSIX extended regular expressions, which every awk understands"
        raise RunnerError(
            f"{place} uses {found[0]!r}",
            why,
            "write [0-9] for \\d, [ \\t] for \\s, and xxx* for x{2,}",
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
