"""Keep values that look like secrets out of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.machine import files
from runner.machine.secrets import looks_secret, refuse

HIDDEN = "(looks like a secret: left out)"


def hide_values(values: Mapping[str, str]) -> dict[str, str]:
    """The mapping with secret-looking values replaced."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in values.items()}


def hide_words(words: Sequence[str]) -> tuple[str, ...]:
    """A command line with the values of secret-looking options and assignments replaced."""
    shown: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if option and not word.startswith("-"):
            shown.append(HIDDEN if looks_secret(option, word) else word)
        elif equals and looks_secret(name.lstrip("-"), value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(HIDDEN if looks_secret("", word) else word)
        option = word.lstrip("-") if word.startswith("-") and not equals else ""
    return tuple(shown)


def write_record(path: Path, text: str) -> None:
    """Write a record that contains words of the user. Raises RunnerError if it would contain a known secret."""
    refuse(text.encode(), str(path))
    files.write(path, text)


def refuse_in(texts: Mapping[str, str]) -> None:
    """Raise RunnerError if one of the files (path -> text) would contain a known secret."""
    for name, text in texts.items():
        refuse(text.encode(errors="surrogateescape"), name)
