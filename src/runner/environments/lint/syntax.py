"""TOML text in which all faults are looked for: after each one the line is blanked, and the rest is read again."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.environments.lint.finding import Finding, finding
from runner.located_toml import Document, Place
from runner.toml_lines import key_lines

REPAIRED = "__table_opened_twice_"
"""begins the names of tables that stand for those opened a second time"""
_MOST_FAULTS = 100
_HEADING = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")


def read_all(path: Path) -> tuple[Document | None, list[Finding]]:
    """What can be read of a file, and every fault of its syntax. None where nothing can be read."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        return None, [
            finding("file-unreadable", "file", Place(path, line), "it is not UTF-8 text", f"iconv -t UTF-8 {path}")
        ]
    except OSError as error:
        return None, [finding("file-unreadable", "file", Place(path), error.strerror or str(error))]
    return parse_all(text, path)


def parse_all(text: str, path: Path) -> tuple[Document | None, list[Finding]]:
    """The same for text that came from `path`."""
    lines, found, reached = text.split("\n"), list[Finding](), 0
    for number in range(_MOST_FAULTS):
        text = "\n".join(lines)
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message, line = _position(str(error))
            found.append(_fault(message, line, lines, path))
            if line is None or line < reached or not lines[line - 1].strip():
                return None, found  # it would not get better
            reached = line
            twice = found[-1].code == "table-twice" and _HEADING.match(lines[line - 1])
            lines[line - 1] = f"[{REPAIRED}{number}]" if twice else ""
            continue
        return Document(path, data, key_lines(text)), found
    return None, found


def _position(message: str) -> tuple[str, int | None]:
    """The message without its position, and the line of it; None at the end of the text."""
    match = re.search(r" \(at line (\d+), column \d+\)", message)
    return (message.replace(match[0], ""), int(match[1])) if match else (message, None)


def _fault(message: str, line: int | None, lines: list[str], path: Path) -> Finding:
    if line is None:
        place = Place(path, _last_opened(lines))
        reason = f"a string, array or table stays open: {message.partition(' (at')[0]}"
        return finding("toml-syntax", "file", place, reason, "close it")
    wrong, place = lines[line - 1].strip(), Place(path, line)
    if re.search(r"twice|namespace", message):
        return _table_twice(wrong, line, lines, place)
    if re.search(r"overwrite|[Dd]uplicate", message):
        return finding("key-twice", "file", place, f"a key is set a second time: {wrong}")
    if "Invalid value" in message:
        advice = 'text stands in quotes: key = "value"'
    elif "Unclosed array" in message:
        advice = "elements of an array are parted by commas; is one missing above?"
    elif "Illegal character '\\n'" in message:
        advice = "close the quotes on the line that opens them"
    else:
        advice = "mend that line"
    return finding("toml-syntax", "file", place, f"{message}: {wrong}", advice)


def _table_twice(wrong: str, line: int, lines: list[str], place: Place) -> Finding:
    heading = _HEADING.match(wrong)
    name = heading[1] if heading else wrong.partition("=")[0].strip()
    first = next((number for number, where in _tables(lines[: line - 1]) if where == name), None)
    before = f"it was opened in line {first}" if first else "dotted keys above have opened it"
    what = f"the table [{name}]" if heading else f"the table of {name}"
    return finding("table-twice", "file", place, f"{what} is opened a second time: {before}")


def _tables(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each [heading]."""
    for number, line in enumerate(lines, 1):
        if match := _HEADING.match(line):
            yield number, match[1]


def _last_opened(lines: list[str]) -> int | None:
    """The line of the last key: what is open at the end of the text was opened there, most likely."""
    return next((n for n in range(len(lines), 0, -1) if re.match(r"\s*[A-Za-z0-9_.\"'-]+\s*=", lines[n - 1])), None)


def repaired(key: str, value: Any) -> bool:
    """Whether a key of the file's top is a table opened twice, which is said already."""
    return key.startswith(REPAIRED) and isinstance(value, dict)
