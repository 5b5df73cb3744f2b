"""Time limits in Slurm's words."""

from __future__ import annotations

import re

from runner.errors import RunnerError

_FORMS = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+))|(?P<bare_minutes>\d+))"
)


def minutes(text: str, what: str) -> int:
    """Whole minutes, rounded up, of `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`. Source: sbatch(1), --time."""
    found = _FORMS.fullmatch(text.strip())
    if not found:
        raise RunnerError(
            f"{what}: cannot read the time limit {text!r}",
            "a limit is MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            '"00:30:00" for half an hour, "1-00" for a day',
        )
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    whole = hours * 60 + part["day_minutes"] + part["minutes"] + part["bare_minutes"]
    total = whole + -(-(part["day_seconds"] + part["seconds"]) // 60)
    if total < 1:
        raise RunnerError(f"{what}: the time limit {text!r} is zero", "a job needs time", "give a minute at least")
    return total


def text(total: int) -> str:
    """`HH:MM:00`, or `D-HH:MM:00` from a day on."""
    days, rest = divmod(total, 24 * 60)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock
