"""Which names and values look like secrets: those never enter a record of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "(looks like a secret: left out)"

_NAME = re.compile(
    r"(^|[-_.])(token|secret|passwd|password|passphrase|credentials?|api_?key|access_?key|private_?key|auth|key)s?$",
    re.IGNORECASE,
)
# names that end like a secret's and are none
_HARMLESS = re.compile(
    r"(max|min|num|n|pad|eos|bos|new|sort|group|primary|foreign|per)[-_]?(tokens?|keys?)$", re.IGNORECASE
)
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[opsru]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|sk-[\w-]{20,}"
    r"|xox[abpr]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|nvapi-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----|://[^/\s:@]{1,200}:[^/\s@]{1,200}@"
)


def looks_secret(name: str, value: str) -> bool:
    """Whether a value should stay out of records, by its name or by its form."""
    named = bool(_NAME.search(name) and not _HARMLESS.search(name))
    # a name like `tokens` with a number is a count, not a secret
    return bool(_VALUE.search(value)) or (named and bool(value) and not value.isdigit())


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
