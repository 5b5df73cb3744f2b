"""Every lint code: severity, meaning, fix. `runner env check --list` prints them."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Code:
    """What a code means."""

    title: str
    fix: str
    severities: Sequence[str] = ("error",)
    """the usual one first"""


# codes.toml has a table for each code
CODES = {
    name: Code(**row)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
