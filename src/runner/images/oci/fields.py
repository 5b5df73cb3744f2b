"""JSON that somebody else wrote, read field by field: whatever is wrong with it becomes a RunnerError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runner.errors import RunnerError


class Fields:
    """A JSON object; a field that is missing and one that is null are the same."""

    def __init__(self, value: Mapping[str, Any], what: str) -> None:
        self.value = value
        self.what = what

    def text(self, key: str) -> str:
        """A string, empty where there is none."""
        return self._get(key, str, "a string") or ""

    def number(self, key: str) -> int:
        """An integer that is not negative, 0 where there is none."""
        number: int = self._get(key, int, "a number") or 0
        if number < 0 or isinstance(number, bool):
            raise damaged(self.what, f"{key!r} is {number!r}")
        return number

    def object(self, key: str) -> Fields:
        """An object, an empty one where there is none."""
        return Fields(self._get(key, dict, "an object") or {}, self.what)

    def objects(self, key: str) -> tuple[Fields, ...]:
        """A list of objects."""
        return tuple(Fields(self._kind(each, dict, key, "a list of objects"), self.what) for each in self._list(key))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; one string alone is a list of it, as Docker's old Entrypoint and Cmd."""
        alone = self.value.get(key)
        if isinstance(alone, str):
            return (alone,)
        return tuple(self._kind(each, str, key, "a list of strings") for each in self._list(key))

    def mapping(self, key: str) -> dict[str, str]:
        """An object of strings; a null in it is the empty string."""
        found = self._get(key, dict, "an object") or {}
        return {name: self._kind(each or "", str, key, "an object of strings") for name, each in found.items()}

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.value.get(key) is not None

    def _list(self, key: str) -> list[Any]:
        return self._get(key, list, "a list") or []

    def _get(self, key: str, kind: type, name: str) -> Any:
        value = self.value.get(key)
        return None if value is None else self._kind(value, kind, key, name)

    def _kind(self, value: Any, kind: type, key: str, name: str) -> Any:
        if not isinstance(value, kind):
            raise damaged(self.what, f"{key!r} is not {name}")
        return value


def parse_object(data: bytes, what: str) -> Fields:
    """The JSON object in `data`, which `what` names in errors."""
    value = _parse(data, what)
    if not isinstance(value, dict):
        raise damaged(what, "it is not a JSON object")
    return Fields(value, what)


def parse_objects(data: bytes, what: str) -> tuple[Fields, ...]:
    """The JSON list of objects in `data`."""
    return Fields({"list": _parse(data, what)}, what).objects("list")


def _parse(data: bytes, what: str) -> Any:
    try:
        value = json.loads(data)
        if b"\\u" in data:  # half a surrogate pair can be parsed, but never be written anywhere
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise damaged(what, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise damaged(what, f"it is not JSON: {error}") from error
    return value


def damaged(what: str, why: str) -> RunnerError:
    """The error for a part of an image that is not what it should be."""
    return RunnerError(f"cannot read {what}", why, "it is damaged or not an image: make or fetch it again")
