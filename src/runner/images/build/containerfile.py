"""Containerfiles: their instructions, and ARG lines that runner adds after each FROM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from runner.bash import here_documents


def instructions(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, line after the last, text) of each instruction, without comments, blank lines and heredocs."""
    lines = text.split("\n")
    line = 0
    while line < len(lines):
        if not lines[line].strip() or lines[line].lstrip().startswith("#"):
            line += 1
            continue
        start = line
        while line < len(lines) - 1 and (lines[line].rstrip().endswith("\\") or _is_comment_inside(lines, start, line)):
            line += 1
        line += 1
        words = "\n".join(lines[start:line])
        end = line
        if words.split(maxsplit=1)[0].upper() in ("RUN", "COPY", "ADD"):
            for document in here_documents(words):
                while end < len(lines) and lines[end].strip() != document.mark:
                    end += 1
                end += 1
        yield start, min(end, len(lines)), words
        line = end


def _is_comment_inside(lines: list[str], start: int, line: int) -> bool:
    """Whether a comment line is inside a continued instruction. Source: Dockerfile reference."""
    return line > start and lines[line].lstrip().startswith("#")


def with_arguments(text: str, arguments: Mapping[str, str]) -> str:
    """The Containerfile with ARG lines after each FROM. RUN sees the values, but the image does not store them."""
    lines = text.split("\n")
    for _, end, words in reversed(list(instructions(text)) if arguments else []):
        if words.split(maxsplit=1)[0].upper() == "FROM":
            lines[end:end] = [" ".join(["ARG", *(f"{name}={value}" for name, value in arguments.items())])]
    return "\n".join(lines).rstrip("\n") + "\n"


def declares_base(text: str) -> bool:
    """Whether `ARG BASE` comes before the first FROM, so that runner can choose the base."""
    for _, _, words in instructions(text):
        keyword = words.split(maxsplit=1)[0].upper()
        if keyword == "FROM":
            return False
        if keyword == "ARG" and re.match(r"ARG\s+BASE\b", words, re.IGNORECASE):
            return True
    return False
