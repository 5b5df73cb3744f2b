"""When and where a line was written: its time, its rank, its node, as far as launchers and loggers say so."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

# `[rank3]:` torch, `[default3]:` torchrun's tee, `[Rank 3]` ProcessGroupNCCL, `rank: 3` torchrun's summary,
# `3: ` srun --label, `task 3:` srun, `rank 3 ` our own
_RANK = re.compile(
    r"\[rank ?(\d{1,6})\]|\[Rank (\d{1,6})\]|^\s*rank\s*: (\d{1,6})\b|^ ?(\d{1,6}): "
    r"|\b[Rr]ank[ :=]{1,3}(\d{1,6})\b|\btask (\d{1,6}):"
)
_RANK_FILE = re.compile(r"rank[-_.]?(\d{1,6})\b")
_NODE = re.compile(
    r"\bsrun: error: ([A-Za-z][\w.-]{0,63}): task|\bON ([A-Za-z][\w.-]{0,63}) CANCELLED|^\s*host\s*: (\S{1,64})"
)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[EWIF](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")  # torch writes no leading zero
_PREFIX = re.compile(r"^(?:\s?\d{1,6}: |\[(?:rank ?\d{1,6}|default\d{1,4})\]:? ?)+")


def rank_of(text: str, path: Path | None = None) -> int | None:
    """The global rank that wrote a line, from the line, else from the file's name."""
    found = _RANK.search(text)
    if found:
        return int(next(group for group in found.groups() if group is not None))
    in_name = _RANK_FILE.search(path.name) if path else None
    return int(in_name[1]) if in_name else None


def node_of(text: str) -> str:
    """The node that a line names, or nothing."""
    found = _NODE.search(text)
    return next((group for group in found.groups() if group), "") if found else ""


def time_of(text: str, year: int) -> datetime | None:
    """The time in a line; `year` is taken where it names none."""
    if found := _ISO.search(text):
        numbers = found.groups()
    elif short := _GLOG.search(text):
        numbers = (str(year), *short.groups())
    else:
        return None
    *parts, fraction = numbers
    try:
        year, month, day, hour, minute, second = map(int, parts)
        return datetime(year, month, day, hour, minute, second, int((fraction or "0")[:6].ljust(6, "0")))
    except ValueError:
        return None


def without_prefix(text: str) -> tuple[str, str]:
    """(what a launcher put before a line to tell the rank, the line itself)."""
    found = _PREFIX.match(text)
    return (found[0], text[found.end() :]) if found else ("", text)
