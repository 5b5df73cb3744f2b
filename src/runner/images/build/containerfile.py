"""The little that we read and add in a Containerfile: its instructions, and ARG lines after each FROM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from runner.bash import here_documents



def instructions(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, line after the last, text) of each instruction; comments, blank lines and heredocs skipped."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        start = at
        while at < len(lines) - 1 and (lines[at].rstrip().endswith("\\") or _is_comment_inside(lines, start, at)):
            at += 1
        at += 1
        words = "\n".join(lines[start:at])
        end = at
        if words.split(maxsplit=1)[0].upper() in ("RUN", "COPY", "ADD"):
            for document in here_documents(words):
                while end < len(lines) and lines[end].strip() != document.mark:
                    end += 1
                end += 1
        yield start, min(end, len(lines)), words
        at = end


def _is_comment_inside(lines: list[str], start: int, at: int) -> bool:
    """A comment line within a continued instruction does not end it. Source: Dockerfile reference."""
    return at > start and lines[at].lstrip().startswith("#")


def with_additions(text: str, arguments: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """The Containerfile with one ARG after each FROM (RUN sees the values, the image does not keep them) and one
    LABEL at its end."""
    lines = text.split("\n")
    found = list(instructions(text))
    if labels:
        end = found[-1][1] if found else len(lines)
        lines[end:end] = [" ".join(["LABEL", *(f"{key}={_quoted(value)}" for key, value in labels.items())])]
    for _, end, words in reversed(found if arguments else []):
        if words.split(maxsplit=1)[0].upper() == "FROM":
            lines[end:end] = [" ".join(["ARG", *(f"{name}={value}" for name, value in arguments.items())])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ") + '"'


def declares_base(text: str) -> bool:
    """Whether an `ARG BASE` stands before the first FROM, so that the tool's choice of base reaches it."""
    for _, _, words in instructions(text):
        keyword = words.split(maxsplit=1)[0].upper()
        if keyword == "FROM":
            return False
        if keyword == "ARG" and re.match(r"ARG\s+BASE\b", words, re.IGNORECASE):
            return True
    return False
