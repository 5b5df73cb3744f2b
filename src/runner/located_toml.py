"""TOML files with the line number of every key, so that error messages and listed values can name their line.

`tomllib` parses the file and checks its syntax; `Locator` then finds the line of each key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from runner.errors import RunnerError, nearest

T = TypeVar("T")
Keys = tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A file and, where it is known, a line in it."""

    path: Path
    line: int | None = None

    def __str__(self) -> str:
        """`edf/x.toml:12`, relative to the current folder if the file is below it."""
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return str(path) if self.line is None else f"{path}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A TOML file's data, and the line of each key path. Elements of arrays have their index as key ("mounts", "0")."""

    path: Path
    data: Mapping[str, Any]
    text: str = ""

    @cached_property
    def lines(self) -> Mapping[Keys, int]:
        """The line of each key path. Computed on first use, because it takes longer than parsing the data."""
        return Locator(self.text).lines

    def place(self, *keys: str) -> Place:
        """The line of a key, or of the innermost table that contains it if the key itself is not in the file."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.lines:
                return Place(self.path, self.lines[keys[:length]])
        return Place(self.path)

    def get(self, *keys: str) -> Any:
        """The value at a key path, or None."""
        value: Any = self.data
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value


def read_toml(path: Path) -> Document:
    """The file's data and lines. Raises RunnerError for a missing or unreadable file and for TOML errors."""
    try:
        text = path.read_bytes().decode(
            "utf-8-sig"
        )  # editors on Windows put a byte order mark in front
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RunnerError(
            f"cannot read {Place(path, line)}",
            "the file is not UTF-8",
            f"`file {path}` may show its encoding; for Latin-1: iconv -f LATIN1 -t UTF-8 {path} > NEW && mv NEW {path}",
        ) from error
    except OSError as error:
        raise RunnerError(
            f"cannot read {path}",
            error.strerror or str(error),
            "check the path and the file's mode",
        ) from error
    return parse_toml(text, path)


def parse_toml(text: str, path: Path) -> Document:
    """The data and lines of TOML text that came from `path`."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(text, path, str(error)) from error
    return Document(path, data, text)


def _syntax_error(text: str, path: Path, message: str) -> RunnerError:
    found = re.search(r" \(at line (\d+), column (\d+)\)", message)
    if not found:  # "(at end of document)"
        return RunnerError(
            f"{Place(path)} is not valid TOML",
            message,
            _syntax_advice(message)
            if re.search("twice|overwrite|namespace|mutate", message)
            else "complete the last entry: a value, a quote or a bracket is missing at the end of the file",
        )
    line, column = int(found[1]), int(found[2])
    wrong = text.split("\n")[line - 1]
    why = f"{message.replace(found[0], '')}, line {line}, column {column}: {wrong.strip()}"
    return RunnerError(f"{Place(path, line)} is not valid TOML", why, _syntax_advice(message))


def _syntax_advice(message: str) -> str:
    if re.search("overwrite|[Dd]uplicate", message):
        return "a key is set twice: keep one of the two values"
    if re.search("twice|namespace|mutate", message):
        return "a table can be opened only once: put all its keys under a single [table] heading"
    if "Invalid value" in message:
        return 'write text in quotes (key = "value"), and true and false in lower case; close arrays with ]'
    return "fix that line"


def refuse_unknown_keys(document: Document, table: Keys, known: Iterable[str], kind: str) -> None:
    """Raise RunnerError for the first key of a table that is not in `known`, with its line and a similar name."""
    names = sorted(known)
    content = document.get(*table) if table else document.data
    for key in content or ():
        if key not in names:
            close = nearest(key, names, 0.6)
            where = f"[{'.'.join(table)}]" if table else ""
            raise RunnerError(
                f"{document.place(*table, key)}: unknown key {key!r}{f' in {where}' if table else ''}",
                f"the keys of {where or f'this {kind}'}: {', '.join(names)}",
                f"did you mean {close!r}?" if close else "remove the key, or correct its name",
            )


_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "an array",
}


def wrong_type(document: Document, keys: Keys, expected: str) -> RunnerError:
    """The error for a value of another type than `expected`."""
    value = document.get(*keys)
    hint = _as_text(value) if expected == "text" else ""
    return RunnerError(
        f"{document.place(*keys)}: {'.'.join(keys)} must be {expected}",
        f"its value is {_NAMES.get(type(value), type(value).__name__)}: {value!r}",
        hint or f"set the key to {expected}",
    )


def _as_text(value: object) -> str:
    """The advice to write a value in quotes; empty for arrays and tables."""
    if isinstance(value, bool):
        return f'write "{str(value).lower()}"'
    return f'write "{value}"' if isinstance(value, int | float) else ""


@overload
def typed(document: Document, keys: Keys, kind: type[T], default: T) -> T: ...
@overload
def typed(document: Document, keys: Keys, kind: type[T], default: None = None) -> T | None: ...
def typed(document: Document, keys: Keys, kind: type[T], default: T | None = None) -> T | None:
    """The value at a key path, or the default if the key is absent. Raises RunnerError for a wrong type."""
    value = document.get(*keys)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return cast("T", float(value))
    if type(value) is not kind:  # not isinstance: true is not a number
        raise wrong_type(document, keys, _NAMES.get(kind, kind.__name__))
    return value


def strings(document: Document, keys: Keys) -> tuple[str, ...]:
    """An array of strings as a tuple. Raises RunnerError, with the line, for an element of another type."""
    values: list[Any] = typed(document, keys, list, [])
    for index, value in enumerate(values):
        if not isinstance(value, str):
            place = document.place(*keys, str(index))
            raise RunnerError(
                f"{place}: every element of {'.'.join(keys)} must be text",
                f"this element is {_NAMES.get(type(value), type(value).__name__)}: {value!r}",
                _as_text(value) or "write text in quotes",
            )
    return tuple(values)


def string_table(document: Document, keys: Keys) -> dict[str, str]:
    """A table of strings. Raises RunnerError, with the line, for a value of another type."""
    table = typed(document, keys, dict, {})
    for name, value in table.items():
        if not isinstance(value, str):
            raise wrong_type(document, (*keys, name), "text")
    return dict(table)


_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRINGS = (  # multi-line forms first: they begin like the others
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}', re.S),
    re.compile(r"'''.*?'{3,5}", re.S),
    re.compile(r'"(?:\\.|[^"\\])*"'),
    re.compile(r"'[^']*'"),
)
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE = re.compile(r"[^,\]}\n#]+")


class Locator:
    """The line on which each key, array element and table of TOML text begins, found in one pass over the text.

    The text must be valid TOML, which `tomllib` has checked: strings, comments, brackets and dotted keys are
    understood, but not values.
    `lines` maps each key path to its line; elements of arrays have their index as key: ("mounts", "0"). `headers` has
    (line, keys) of each `[table]` and `[[table]]` heading, in the order of the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.counted = (0, 1)  # a position, and its line
        self.lines: dict[Keys, int] = {}
        self.headers: list[tuple[int, Keys]] = []
        self.arrays: dict[
            Keys, int
        ] = {}  # arrays of tables, by their full path: index of the newest table
        self._document()

    def _line(self) -> int:
        position, line = self.counted
        self.counted = (self.position, line + self.text.count("\n", position, self.position))
        return self.counted[1]

    def _skip(self) -> None:
        match = _BLANK.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty text too
        self.position = match.end()

    def _at(self, token: str) -> bool:
        return self.text.startswith(token, self.position)

    def _string(self) -> str | None:
        for pattern in _STRINGS:
            if match := pattern.match(self.text, self.position):
                self.position = match.end()
                return match[0]
        return None

    def _keys(self) -> Keys:
        """Read a dotted key; the position is then after the key."""
        keys: list[str] = []
        while True:
            self._skip()
            quoted = self._string()
            if quoted is not None:
                keys.append(next(iter(tomllib.loads(f"{quoted} = 0"))))
            else:
                match = _KEY.match(self.text, self.position)
                assert match is not None  # tomllib has accepted the key
                keys.append(match[0])
                self.position = match.end()
            self._skip()
            if not self._at("."):
                return tuple(keys)
            self.position += 1

    def _note(self, keys: Keys, line: int) -> None:
        for length in range(1, len(keys) + 1):
            self.lines.setdefault(keys[:length], line)

    def _document(self) -> None:
        table: Keys = ()
        self._skip()
        while self.position < len(self.text):
            if self._at("["):
                table = self._header()
            else:
                self._assignment(table)
            self._skip()

    def _header(self) -> Keys:
        line, double = self._line(), self._at("[[")
        self.position += 2 if double else 1
        keys = self._keys()
        self.position += 2 if double else 1
        self.headers.append((line, keys))
        path: Keys = ()
        for depth, key in enumerate(keys):
            path = (*path, key)
            if double and depth == len(keys) - 1:
                self.arrays[path] = self.arrays.get(path, -1) + 1
            if path in self.arrays:
                self._note(path, line)
                path = (*path, str(self.arrays[path]))
        self._note(path, line)
        return path

    def _assignment(self, table: Keys) -> None:
        line = self._line()
        keys = (*table, *self._keys())
        self._note(keys, line)
        self.position += 1  # the equals sign
        self._value(keys)

    def _value(self, keys: Keys) -> None:
        self._skip()
        if self._at("["):
            self._elements(keys)
        elif self._at("{"):
            self._inline(keys)
        elif self._string() is None:
            match = _BARE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()

    def _elements(self, keys: Keys) -> None:
        index = 0
        self.position += 1
        self._skip()
        while not self._at("]"):
            element = (*keys, str(index))
            self._note(element, self._line())
            self._value(element)
            index += 1
            self._separator()
        self.position += 1

    def _inline(self, keys: Keys) -> None:
        self.position += 1
        self._skip()
        while not self._at("}"):
            self._assignment(keys)
            self._separator()
        self.position += 1

    def _separator(self) -> None:
        self._skip()
        if self._at(","):
            self.position += 1
            self._skip()
