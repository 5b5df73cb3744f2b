"""The line on which each key, array element and table of TOML text begins.

The text must be valid TOML, which `tomllib` has checked. This module makes one pass over the text. It understands
strings, comments, brackets and dotted keys, but not values.
"""

from __future__ import annotations

import re
import tomllib

Keys = tuple[str, ...]


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
    """One pass over valid TOML text.

    `lines` maps each key path to its line; elements of arrays have their index as key: ("mounts", "0"). `headers` has
    (line, keys) of each `[table]` and `[[table]]` heading, in the order of the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.counted = (0, 1)  # a position, and its line
        self.lines: dict[Keys, int] = {}
        self.headers: list[tuple[int, Keys]] = []
        self.arrays: dict[Keys, int] = {}  # arrays of tables, by their full path: index of the newest table
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
