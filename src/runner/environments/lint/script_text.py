"""Parse a batch script for the linter: directives, commands, here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runner.bash import commands, here_documents

_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One command, or the body of a here-document."""

    number: int
    text: str
    early: str
    """the same text, with spaces in place of everything that this script's shell does not expand: single quotes,
    `\\$`"""


@dataclass(frozen=True)
class Script:
    """A batch script. Directives are the `#SBATCH` lines that sbatch reads: those before the first command."""

    path: Path
    directives: tuple[Line, ...]
    late: tuple[Line, ...]
    commands: tuple[Line, ...]

    @property
    def steps(self) -> tuple[Line, ...]:
        """The commands that call srun."""
        return tuple(line for line in self.commands if re.search(r"(?<![\w./$-])srun(?=\s)", line.text))

    def option(self, *names: str) -> str | None:
        """The value of the last such option in the directives; empty if it has no value."""
        found = [value for line in self.directives for value in [option(line.text, *names)] if value is not None]
        return found[-1] if found else None


def option(text: str, *names: str) -> str | None:
    """The value of an option in a command line; None if the option is missing."""
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
    found = sorted(_lines(text), key=lambda line: line.number)
    return Script(path, tuple(directives), tuple(late), tuple(found))


def _lines(text: str) -> Iterator[Line]:
    """The commands and the bodies of here-documents, in their order."""
    for command in commands(text):
        words = command.raw.replace("\\\n", " ")
        yield Line(command.line, words, _QUOTED.sub(_blank, words))
    for document in here_documents(text):
        # bash expands the body, unless its mark is quoted
        yield Line(document.line, document.body, "" if document.quoted else document.body.replace("\\$", "  "))


def _blank(quoted: re.Match[str]) -> str:
    """Replace what the shell does not expand by spaces: escapes, single quotes, and escapes within double quotes."""
    text = quoted[0]
    return re.sub(r"\\.", "  ", text, flags=re.DOTALL) if text.startswith('"') else " " * len(text)
