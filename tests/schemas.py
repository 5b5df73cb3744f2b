"""The schemas of docs/schemas, for the tests of what the verbs print with --json."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[1] / "docs/schemas"


def schema_of(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{verb.replace(' ', '-')}.json").read_text())
    return found


def check(verb: str, text: str) -> Any:
    """The output, which must match the schema of its verb."""
    output = json.loads(text)
    errors = [f"{error.json_path}: {error.message[:300]}" for error in
              Draft202012Validator(schema_of(verb)).iter_errors(output)]  # fmt: skip
    assert not errors, f"{verb}: {errors}"
    return output
