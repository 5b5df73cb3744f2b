"""RUN/lock.toml: everything that a launch was made of, so that it can be made again. Secrets never enter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Value = str | int | bool | Sequence[str] | None
"""None is not written"""

HEADER = """\
# What this run was made of, as launched. Written once; nothing reads it while the job runs.
# Values that look like secrets are left out.
"""


def lock_text(tables: Mapping[str, Mapping[str, Value]]) -> str:
    """The lock as TOML; a table's name may be dotted (`site.values`). Empty tables are not written."""
    lines = [HEADER]
    for name, values in tables.items():
        written = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]
        if written:
            lines += [f"[{name}]", *written, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _string(key)


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    words = [_string(word) for word in value or ()]
    if sum(map(len, words)) < 90:
        return f"[{', '.join(words)}]"
    return "[\n" + "".join(f"    {word},\n" for word in words) + "]"


def _string(text: str) -> str:
    # TOML's basic strings take JSON's escapes; DEL must be escaped too, and lone surrogates cannot be written
    safe = text.encode("utf-8", "replace").decode()
    return json.dumps(safe, ensure_ascii=False).replace("\x7f", "\\u007F")
