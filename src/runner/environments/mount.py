"""Mounts: `SOURCE[:TARGET[:FLAG+FLAG]]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runner.errors import RunnerError
from runner.expansion import parts

# a colon inside `${VAR:-x}` is not a separator
_FIELDS = re.compile(r"(?:\$\{(?:[^{}]|\$\{[^{}]*\})*\}|[^:])*")


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host, or (flag `sqsh`) the content of a squashfs file, mounted in the container."""

    source: str
    target: str
    flags: tuple[str, ...] = ()

    def text(self, separator: str = "+") -> str:
        """`SOURCE:TARGET[:FLAGS]`. Separator of flags: `+` for the Container Engine, `,` for Sarus Suite and podman."""
        return ":".join((self.source, self.target, *((separator.join(self.flags),) if self.flags else ())))

    @property
    def read_only(self) -> bool:
        """Whether the mount is read-only."""
        return "ro" in self.flags or "sqsh" in self.flags


def split_fields(text: str) -> tuple[str, ...]:
    """The text split at each colon outside `${VAR:-default}`."""
    fields, position = [], 0
    while True:
        match = _FIELDS.match(text, position)
        assert match is not None  # the pattern matches the empty text too
        fields.append(match[0])
        position = match.end() + 1
        if position > len(text):
            return tuple(fields)


def parse_mount(text: str, where: str = "") -> Mount:
    """The mount that a text describes. Without a target, the source's path is the target; flags are joined with
    `+` (Container Engine, pyxis) or `,` (Sarus Suite). Raises RunnerError that begins with `where`."""
    fields = split_fields(text)
    what = f"{where}: " if where else ""
    if len(fields) > 3 or not all(fields):
        raise RunnerError(
            f"{what}cannot read the mount {text!r}",
            "a mount must have the form SOURCE[:TARGET[:FLAG+FLAG]], without empty fields",
            "'${SCRATCH}/data:/data:ro'",
        )
    source, target = fields[0], fields[1] if len(fields) > 1 else fields[0]
    for field in fields:
        parts(field, f"{what}the mount {text!r}")
    for role, path, begins in (("source", source, ("/", ".", "${")), ("target", target, ("/", "${"))):
        if not path.startswith(begins):
            raise RunnerError(
                f"{what}cannot read the mount {text!r}",
                f"the {role} {path!r} must begin with {' or '.join(begins)}",
                _advice(role, path),
            )
    flags = tuple(re.split(r"[+,]", fields[2])) if len(fields) > 2 else ()
    if not all(flags):
        raise RunnerError(
            f"{what}cannot read the mount {text!r}", "one of its flags is empty", f"'{source}:{target}:ro'"
        )
    return Mount(source, target, flags)


def _advice(role: str, path: str) -> str:
    if path.startswith("~"):
        return f"write ${{HOME}}{path[1:]}"
    if path.startswith("$"):
        return f"put the variable in braces: ${{{path[1:].partition('/')[0]}}}"
    return f"write ./{path}, relative to the folder in which the job starts" if role == "source" else f"write /{path}"
