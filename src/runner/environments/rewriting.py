"""Edit the text of an EDF without changing anything else: comments, order, blank lines and quotes are kept.

The text is split at its `[table]` headings. Each section is a separate TOML document, so that tomlkit never has to
merge a table from several places, and a new key is never put after the comment of the next heading. The result is
parsed with tomllib and compared with the expected data before it is returned.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.located_toml import Keys, Locator, parse_toml

APPEND = "-"
"""as the last key: append an element to an array"""
Value = str | bool | int | Sequence[str]


@dataclass(frozen=True)
class Set:
    """Set the value of a key path. An existing value changes in place; a new one is added at the end of its table."""

    keys: Keys
    value: Value


@dataclass(frozen=True)
class Unset:
    """Remove a key path: an assignment, an array's element (its index as text), or a whole table."""

    keys: Keys


@dataclass(frozen=True)
class Rename:
    """Rename the last key of a path. The value stays in place."""

    keys: Keys
    name: str


Change = Set | Unset | Rename


@dataclass
class _Section:
    """A heading with the lines below it. The section at the top of a file has no heading."""

    header: Keys
    text: str
    data: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.data = tomllib.loads(self.text)


def rewrite(text: str, changes: Sequence[Change], path: Path = Path("EDF")) -> str:
    """Apply the changes one after the other. For Unset and Rename, a missing path is not an error.

    Each removal of an array element changes the indexes of the later ones, so remove from the end.
    Raises RunnerError if the text is not valid TOML, or if a change cannot be made.
    """
    windows = "\r\n" in text and text.count("\r\n") == text.count("\n")
    text = text.replace("\r\n", "\n")
    for change in changes:
        data = dict(parse_toml(text, path).data)
        try:
            wanted = _without_empty(_changed(deepcopy(data), change))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # for example a key below a string, or an index out of range
            raise _refusal(change) from error
        new = next((new for new in _candidates(text, data, change) if _reads_as(new, wanted)), None)
        if new is None:
            raise _refusal(change)
        text = new
    return text.replace("\n", "\r\n") if windows else text


def _refusal(change: Change) -> RunnerError:
    return RunnerError(
        f"cannot change {'.'.join(change.keys)} in the file without rewriting the rest",
        "its current value is written in a form that cannot be edited in place",
        "edit the file by hand",
    )


def _reads_as(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return _without_empty(tomllib.loads(text)) == wanted
    except tomllib.TOMLDecodeError:
        return False


def _without_empty(data: dict[str, Any]) -> dict[str, Any]:
    """The data without empty tables, which have no meaning in an EDF."""
    pruned = {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in data.items()
    }
    return {key: value for key, value in pruned.items() if value != {}}


def _changed(data: dict[str, Any], change: Change) -> dict[str, Any]:
    """The expected data after the change."""
    *above, last = change.keys
    inner: Any = data
    for key in above:
        if isinstance(inner, dict) and key not in inner and isinstance(change, Set):
            inner[key] = [] if last == APPEND and key == above[-1] else {}
        inner = _step(inner, key)
    if inner is None:
        return data
    if isinstance(change, Set):
        value = change.value if isinstance(change.value, str | bool | int) else list(change.value)
        if last == APPEND:
            inner.append(value)
        else:
            inner[int(last) if isinstance(inner, list) else last] = value
    elif _step(inner, last) is not None:
        value = inner.pop(int(last) if isinstance(inner, list) else last)
        if isinstance(change, Rename):
            inner[change.name] = value
    return data


def _step(value: Any, key: str) -> Any:
    """The value under a key or an index; None if there is none."""
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None


def _value(data: Any, keys: Sequence[str]) -> Any:
    """The value at a key path; None if there is none."""
    for key in keys:
        data = _step(data, key)
    return data


def _candidates(text: str, data: dict[str, Any], change: Change) -> Iterator[str]:
    """Candidates for the changed text, the best first."""
    sections = tuple(_sections(text))
    there = _value(data, change.keys)
    if there is None and not isinstance(change, Set):
        yield text
    elif isinstance(change, Rename):
        yield _renamed(sections, change)
    elif isinstance(change, Unset):
        yield "".join(
            _edited(each, change)
            for each in sections
            if each.header[: len(change.keys)] != change.keys
        )
    elif there is None and change.keys[-1] != APPEND:
        yield from _added(sections, change)
    elif change.keys[-1] == APPEND and all(
        _value(section.data, change.keys[:-1]) is None for section in sections
    ):
        yield from _added(sections, Set(change.keys[:-1], (str(change.value),)))
    else:
        yield "".join(_edited(section, change) for section in sections)


def _sections(text: str) -> Iterator[_Section]:
    """The text, split before each heading and the comment directly above it."""
    lines = _lines(text)
    begin = 0
    header: Keys = ()
    for line, keys in Locator(text).headers:
        end = line - 1
        while end > begin and lines[end - 1].lstrip().startswith("#"):
            end -= 1
        yield _Section(header, "".join(lines[begin:end]))
        begin, header = end, keys
    yield _Section(header, "".join(lines[begin:]))


def _lines(text: str) -> list[str]:
    """The lines with their line ends. `splitlines` would also split at other characters than newlines."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _edited(section: _Section, change: Set | Unset) -> str:
    """The section with the value replaced, appended to an array, or removed."""
    import tomlkit

    *above, last = change.keys
    if _value(section.data, above if last == APPEND else change.keys) is None:
        return section.text
    document = tomlkit.parse(section.text)
    inner = _value(document, above)
    place = int(last) if isinstance(inner, list) and last != APPEND else last
    if isinstance(change, Unset):
        del inner[place]
    elif last == APPEND:
        inner.append(change.value)
    else:
        inner[place] = _item(change.value)
    return tomlkit.dumps(document)


def _item(value: Value) -> Any:
    """The value for tomlkit. An array with several elements gets one line per element; lines of text stay lines."""
    import tomlkit

    if (
        isinstance(value, str)
        and value.endswith("\n")
        and re.fullmatch(r"(?!.*''')[^\0-\x08\x0b-\x1f\x7f]+", value, re.DOTALL)
    ):
        return tomlkit.string(value, literal=True, multiline=True)
    if isinstance(value, str | bool | int):
        return tomlkit.item(value)
    array = tomlkit.array()
    if len(value) == 1:
        array.append(value[0])
        return array
    for element in value:
        array.add_line(element, indent="  ")
    if value:
        array.add_line(indent="")
    return array


def _added(sections: Sequence[_Section], change: Set) -> Iterator[str]:
    """Candidates with a new assignment: at the end of the nearest suitable table, or else under a new heading."""
    import tomlkit

    fitting = [
        s
        for s in sections
        if s.header == change.keys[: len(s.header)] and len(s.header) < len(change.keys)
    ]
    for home in sorted(fitting, key=lambda section: -len(section.header)):
        if home.header or len(change.keys) == 1:
            # the rest of the path, below the heading, becomes one dotted key
            line = (
                f"{_dotted(change.keys[len(home.header) :])} = {_item(change.value).as_string()}\n"
            )
            yield "".join(_appended(s.text, line) if s is home else s.text for s in sections)
    for depth in range(1, len(change.keys)):
        heading = f"[{_dotted(change.keys[:depth])}]\n{_dotted(change.keys[depth:])}"
        text = "".join(section.text for section in sections)
        gap = "\n" if text.strip() else ""
        yield (
            f"{text.rstrip()}\n{gap}".lstrip() + f"{heading} = {_item(change.value).as_string()}\n"
        )
    if len(change.keys) > 1:
        # below an inline table or a dotted key, only a dotted key is possible
        document = tomlkit.parse("".join(section.text for section in sections))
        inner: Any = document
        for key in change.keys[:-1]:
            inner = inner.setdefault(key, tomlkit.table())
        inner[change.keys[-1]] = _item(change.value)
        yield tomlkit.dumps(document)


def _dotted(keys: Keys) -> str:
    import tomlkit

    return ".".join(tomlkit.key(key).as_string() for key in keys)


def _appended(text: str, line: str) -> str:
    """The section with one more line at its end, before trailing blank lines."""
    body = text.rstrip()
    blank = text[len(body) :].partition("\n")[2]
    if body:
        return f"{body}\n{line}{blank}"
    return f"{line}\n{blank}" if blank else line


def _renamed(sections: Sequence[_Section], change: Rename) -> str:
    """The text with the key renamed on each line that contains it."""
    old, new = change.keys[-1], _dotted((change.name,))
    token = re.compile(
        rf"(?<![\w-])(?:\"{re.escape(old)}\"|'{re.escape(old)}'|{re.escape(old)})(?![\w-])"
    )
    texts = []
    for section in sections:
        lines = _lines(section.text)
        located = parse_toml(section.text, Path("EDF")).lines
        for line in {located[change.keys]} if change.keys in located else ():
            lines[line - 1] = token.sub(lambda _: new, lines[line - 1], count=1)
        texts.append("".join(lines))
    return "".join(texts)
