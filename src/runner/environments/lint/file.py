"""Rules for one EDF file: keys, types, texts. They find all errors, even in a file that no engine can load."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.environments.edf import KEYS, texts
from runner.environments.lint.finding import Finding, finding
from runner.environments.rewriting import Change, Rename, Set, Unset
from runner.errors import RunnerError, nearest
from runner.expansion import parts
from runner.located_toml import Document, Place

_TYPES: dict[str, tuple[type, str]] = {
    "image": (str, 'text: image = "…"'),
    "workdir": (str, 'text: workdir = "/…"'),
    "entrypoint": (bool, "true or false, without quotes"),
    "writable": (bool, "true or false, without quotes"),
    "mounts": (list, 'an array of texts: mounts = ["…"]'),
    "devices": (list, 'an array of texts: devices = ["…"]'),
    "env": (dict, "a table: [env]"),
    "annotations": (dict, "a table: [annotations]"),
}
_OTHER_NAMES = {  # names in other tools
    "mount": "mounts",
    "volumes": "mounts",
    "volume": "mounts",
    "binds": "mounts",
    "environment": "env",
    "variables": "env",
    "environ": "env",
    "container_image": "image",
    "container": "image",
    "sqsh": "image",
    "working_dir": "workdir",
    "workingdir": "workdir",
    "cwd": "workdir",
    "pwd": "workdir",
    "base": "base_environment",
    "base_environments": "base_environment",
    "from": "base_environment",
    "annotation": "annotations",
    "hooks": "annotations",
    "labels": "annotations",
    "readonly": "writable",
    "read_only": "writable",
    "device": "devices",
    "gpus": "devices",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ANGLE = r"<[A-Za-z][\w .-]*>"
_PLACEHOLDER = re.compile(rf"\{{\{{[^{{}}]*\}}\}}|(?<![$\w}}])\{{[A-Za-z_]\w*\}}|{_ANGLE}")
_PLACEHOLDER_FOLDER = re.compile(rf"/{_ANGLE}(?=/|$)")


def check_file(document: Document) -> Iterator[Finding]:
    """All errors in a file's keys, types and texts."""
    for key, value in document.data.items():
        if key.startswith(REPAIRED) and isinstance(value, dict):
            continue  # a table opened twice, which is reported already
        if key not in KEYS:
            yield _unknown_key(document, key, value)
        elif key == "base_environment":
            yield from _base(document, value)
        else:
            yield from _typed(document, key, value)
    yield from _env(document)
    yield from _annotations(document, ("annotations",), {})
    yield from _texts(document)


def _unknown_key(document: Document, key: str, value: Any) -> Finding:
    """`--fix` renames a misspelt key if the right name is unused and the value fits."""
    near, place = near_name(key), document.place(key)
    reason = f"EDFs have no key {key!r}; the keys of an EDF: {', '.join(KEYS)}"
    if near is None:
        return finding("unknown-key", key, place, reason)
    fits = near not in document.data and near in _TYPES and isinstance(value, _TYPES[near][0])
    changes: tuple[Change, ...] = (Rename((key,), near),) if fits else ()
    return finding("unknown-key", key, place, reason, f"did you mean {near!r}?", changes=changes)


def near_name(key: str) -> str | None:
    """The EDF key that a misspelt word most likely means."""
    plain = key.lower().replace("-", "_")
    words = {**_OTHER_NAMES, **{name: name for name in KEYS}}
    close = nearest(plain, words, 0.7)
    return words[close] if close else None


def _typed(document: Document, key: str, value: Any) -> Iterator[Finding]:
    kind, expected = _TYPES[key]
    if type(value) is not kind:
        reason = f"{key} must be {expected.partition(':')[0].partition(',')[0]}, not {value!r}"
        changes: tuple[Change, ...] = ()
        if kind is bool and isinstance(value, str) and value.lower() in {"true", "false"}:
            changes = (Set((key,), value.lower() == "true"),)
        if kind is list and isinstance(value, str):
            changes = (Set((key,), (value,)),)
        yield finding(
            "wrong-type", key, document.place(key), reason, f"write {expected}", changes=changes
        )
    elif isinstance(value, list):
        for index, element in enumerate(value):
            if not isinstance(element, str):
                place = document.place(key, str(index))
                reason = f"every element of {key} must be text; this element is {element!r}"
                is_text = isinstance(element, str | int | float) and not isinstance(element, bool)
                fix = f'write "{element}"' if is_text else f"write {expected}"
                yield finding("wrong-type", f"{key}.{index}", place, reason, fix)


def _base(document: Document, value: Any) -> Iterator[Finding]:
    if not isinstance(value, str) and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        reason = f"base_environment must be a name or an array of names, not {value!r}"
        yield finding(
            "wrong-type",
            "base_environment",
            document.place("base_environment"),
            reason,
            'write "name"',
        )


def _env(document: Document) -> Iterator[Finding]:
    table = document.data.get("env")
    if not isinstance(table, Mapping):
        return
    for name, value in table.items():
        place, field = document.place("env", name), f"env.{name}"
        if name in KEYS:
            yield _after_table(document, "env", name)
        elif not isinstance(value, str):
            yield _not_text(document, "env-not-text", ("env", name), value)
        elif not _NAME.fullmatch(name):
            yield finding("env-name", field, place, f"{name!r} is not a variable name")


def _after_table(document: Document, table: str, name: str) -> Finding:
    """In TOML, every key below a [table] heading belongs to that table."""
    value, place = document.get(table, name), document.place(table, name)
    alone = name not in document.data
    movable = isinstance(value, str | bool) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )
    reason = f"{name} is below [{table}], so TOML reads it as {table}.{name}"
    changes: tuple[Change, ...] = (
        (Unset((table, name)), Set((name,), value)) if alone and movable else ()
    )
    severity = "error" if alone else "warning"
    return finding(
        "key-after-table", f"{table}.{name}", place, reason, severity=severity, changes=changes
    )


def _not_text(document: Document, code: str, keys: tuple[str, ...], value: Any) -> Finding:
    field = ".".join(keys)
    if isinstance(value, bool | int | float):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        reason, fix = f"{field} is {text}, but must be text", f'write "{text}"'
        return finding(code, field, document.place(*keys), reason, fix, changes=(Set(keys, text),))
    return finding(code, field, document.place(*keys), f"{field} is {value!r}, but must be text")


def _annotations(
    document: Document, keys: tuple[str, ...], seen: dict[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """`seen` holds the keys of each dotted name: a.b.c may be nested, dotted and quoted."""
    table = document.get(*keys)
    if not isinstance(table, Mapping):
        return
    for name, value in table.items():
        if keys == ("annotations",) and name in KEYS:
            yield _after_table(document, "annotations", name)
        elif isinstance(value, Mapping):
            yield from _annotations(document, (*keys, name), seen)
            continue
        elif not isinstance(value, str):
            yield _not_text(document, "annotation-not-text", (*keys, name), value)
        dotted = ".".join((*keys[1:], name))
        first = seen.setdefault(dotted, (*keys, name))
        if first != (*keys, name) and not isinstance(value, Mapping):
            reason = f"the annotation {dotted} is already set in {document.place(*first)}, in another TOML notation"
            yield finding("key-twice", f"annotations.{dotted}", document.place(*keys, name), reason)


def _texts(document: Document) -> Iterator[Finding]:
    for keys, text in texts(document):
        field = ".".join(keys)
        if "\0" in text:
            yield finding("nul-byte", field, document.place(*keys), f"{field} contains a NUL byte")
        try:
            parts(text, field)
        except RunnerError as error:
            yield finding(
                "broken-reference", field, document.place(*keys), f"{field}: {error.why}", error.fix
            )
        # such text may be JSON or a prompt: only a complete folder name is clearly a placeholder
        free_text = keys[0] in {"env", "annotations"}
        if match := (_PLACEHOLDER_FOLDER if free_text else _PLACEHOLDER).search(text):
            reason = f"{field} still has the placeholder {match[0].strip('/')}"
            yield finding("placeholder", field, document.place(*keys), reason)


REPAIRED = "__table_opened_twice_"
"""the prefix of the names that replace tables which are opened a second time"""
_MOST_FAULTS = 100
_HEADING = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")


def read_all(path: Path) -> tuple[Document | None, list[Finding]]:
    """The readable part of a file (None if there is none) and all its syntax errors."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        fix = f"`file {path}` may show the encoding; for Latin-1: iconv -f LATIN1 -t UTF-8 {path} > NEW, then mv"
        return None, [
            finding("file-unreadable", "file", Place(path, line), "the text is not UTF-8", fix)
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
                return None, found  # further attempts would fail too
            reached = line
            twice = found[-1].code == "table-twice" and _HEADING.match(lines[line - 1])
            in_array = "Unclosed array" in message or _HEADING.match(lines[line - 1])
            if in_array and not twice and (repaired := _repaired_array(text, error)):
                lines = repaired
            else:
                lines[line - 1] = f"[{REPAIRED}{number}]" if twice else ""
            continue
        return Document(path, data, text), found
    return None, found


def _repaired_array(text: str, error: tomllib.TOMLDecodeError) -> list[str] | None:
    """The lines with the missing comma, or the missing bracket on the line above; None if neither repairs the array."""
    line, column = (int(number) for number in re.findall(r"\d+", str(error))[-2:])
    before, at = text.split("\n")[: line - 1], text.split("\n")[line - 1 :]
    comma = [*before, f"{at[0][: column - 1]},{at[0][column - 1 :]}", *at[1:]]
    bracket = [*before[:-1], f"{before[-1]}]", *at] if before else comma
    for lines in (comma, bracket):
        try:
            tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError as other:
            if (_position(str(other))[1] or 0) <= line:
                continue
        return lines
    return None


def _position(message: str) -> tuple[str, int | None]:
    """The message without its position, and its line; None at the end of the text."""
    match = re.search(r" \(at line (\d+), column \d+\)", message)
    return (message.replace(match[0], ""), int(match[1])) if match else (message, None)


def _fault(message: str, line: int | None, lines: list[str], path: Path) -> Finding:
    if line is None:
        # the last key, in which an unterminated value most likely begins
        last = (
            n
            for n in range(len(lines), 0, -1)
            if re.match(r"\s*[A-Za-z0-9_.\"'-]+\s*=", lines[n - 1])
        )
        place = Place(path, next(last, None))
        reason = f"a string, array or table is not closed: {message.partition(' (at')[0]}"
        return finding("toml-syntax", "file", place, reason, "close the string, array or table")
    wrong, place = lines[line - 1].strip(), Place(path, line)
    if re.search(r"twice|namespace", message):
        return _table_twice(wrong, line, lines, place)
    if re.search(r"overwrite|[Dd]uplicate", message):
        return finding("key-twice", "file", place, f"a key is set a second time: {wrong}")
    if "Invalid value" in message:
        advice = 'write text in quotes (key = "value"), and true and false in lower case; close arrays with ]'
    elif "Unclosed array" in message:
        advice = "separate the elements of an array by commas, and close it with ]; is one of them missing above?"
    elif "Expected newline" in message and wrong.endswith(","):
        advice = "remove the comma at the end: only elements of an array are separated by commas"
    elif "Illegal character '\\n'" in message:
        advice = "close the quotes on the line that opens them"
    else:
        advice = "fix that line"
    return finding("toml-syntax", "file", place, f"{message}: {wrong}", advice)


def _table_twice(wrong: str, line: int, lines: list[str], place: Place) -> Finding:
    heading = _HEADING.match(wrong)
    name = heading[1] if heading else wrong.partition("=")[0].strip()
    headings = ((number, _HEADING.match(text)) for number, text in enumerate(lines[: line - 1], 1))
    first = next((number for number, found in headings if found and found[1] == name), None)
    before = f"it was opened in line {first}" if first else "dotted keys above have opened it"
    what = f"the table [{name}]" if heading else f"the table of {name}"
    return finding("table-twice", "file", place, f"{what} is opened a second time: {before}")
