"""Values that look like secrets never enter a record of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.machine.secrets import looks_secret

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
