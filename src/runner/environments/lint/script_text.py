"""A batch script as its lines mean it: directives, commands joined over backslashes and quotes, here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"\\]?)([A-Za-z_]\w*)['\"]?")


@dataclass(frozen=True)
class Line:
    """One command, or the body of a here-document."""

    number: int
    text: str
    early: str
    """the same text with blanks for what the shell of this script leaves alone: single quotes, `\\$`, comments"""


@dataclass(frozen=True)
class Script:
    """A batch script. Directives are those that sbatch reads: in front of the first command."""

    path: Path
    directives: tuple[Line, ...]
    late: tuple[Line, ...]
    commands: tuple[Line, ...]

    @property
    def steps(self) -> tuple[Line, ...]:
        """The commands that call srun."""
        return tuple(line for line in self.commands if re.search(r"(?<![\w./$-])srun(?=\s)", line.text))

    def option(self, *names: str) -> str | None:
        """The value of an option in the directives, the last one; empty for one without a value."""
        found = [value for line in self.directives for value in [option(line.text, *names)] if value is not None]
        return found[-1] if found else None


def option(text: str, *names: str) -> str | None:
    """The value of an option in a line of words; None where it does not stand there."""
    for name in names:
        form = rf"{name}[=\s]+" if name.startswith("--") else rf"{name}\s*=?"
        if match := re.search(rf"(?<!\S){form}(\"[^\"]*\"|'[^']*'|[^\s\"']+)", text):
            return match[1].strip("\"'")
        if re.search(rf"(?<!\S){name}(?!\S)", text):
            return ""
    return None


def is_script(path: Path) -> bool:
    """Whether a file begins with `#!`."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def read_script(path: Path) -> Script:
    """The script in a file. Raises OSError."""
    return parse_script(path.read_text(encoding="utf-8", errors="replace"), path)


def parse_script(text: str, path: Path) -> Script:
    """The script of a text."""
    lines = text.replace("\r\n", "\n").split("\n")
    directives, late, seen = list[Line](), list[Line](), False
    for number, line in enumerate(lines, 1):
        if line.startswith("#SBATCH"):
            words = line.removeprefix("#SBATCH").strip()
            (late if seen else directives).append(Line(number, words, words))
        elif line.strip() and not line.lstrip().startswith("#"):
            seen = True
    return Script(path, tuple(directives), tuple(late), tuple(_commands(lines)))


def _commands(lines: Sequence[str]) -> Iterator[Line]:
    number = 0
    while number < len(lines):
        first, text = number + 1, lines[number]
        number += 1
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        early, still_open = _early(text)
        while still_open and number < len(lines):
            text = f"{text[:-1]} {lines[number]}" if still_open == "\\" else f"{text}\n{lines[number]}"
            number += 1
            early, still_open = _early(text)
        yield Line(first, text, early)
        for match in _HERE_DOCUMENT.finditer(text):
            if not early.startswith("<<", match.start()):
                continue  # inside of quotes
            end = next((n for n in range(number, len(lines)) if lines[n].strip() == match[2]), len(lines))
            body = "\n".join(lines[number:end])
            # bash expands the body, unless the word that ends it is quoted
            yield Line(number + 1, body, "" if match[1] else body.replace("\\$", "  "))
            number = min(end + 1, len(lines))


def _early(text: str) -> tuple[str, str]:
    """(the text that this shell expands, what is open at its end: a quote, a backslash or nothing)."""
    kept: list[str] = []
    quote, position = "", 0
    while position < len(text):
        sign = text[position]
        if quote == "'":
            quote = "" if sign == "'" else quote
            kept.append(" ")
        elif sign == "\\":
            if position + 1 == len(text):
                return "".join(kept), "\\"
            kept.append("  ")
            position += 1
        elif sign == "#" and not quote and (position == 0 or text[position - 1].isspace()):
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            kept.append(" " * (end - position))
            position = end
            continue
        else:
            if sign == '"' or (sign == "'" and not quote):
                quote = "" if quote == sign else sign
            kept.append(" " if sign == "'" and quote != '"' else sign)
        position += 1
    return "".join(kept), quote
