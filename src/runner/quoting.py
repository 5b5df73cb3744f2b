"""Quoting for the batch script: the user's text stays literal, and in an engine's flags only `${NAME}` is expanded.

Three programs read a batch script, each with its own grammar: bash, sbatch (the `#SBATCH` lines), and `/bin/sh`
inside the container. A word that one of them cannot represent raises a RunnerError here.
"""

from __future__ import annotations

import re

from runner.errors import RunnerError
from runner.expansion import Variable, parts

WORD_BYTES = 131_071
"""the longest argument of a program. Source: Linux, MAX_ARG_STRLEN: 32 pages with the final NUL"""

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./=-]+")
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def literal(word: str, what: str = "a word of the command") -> str:
    """The word, quoted for bash, always on one line. Raises RunnerError if the word cannot be an argument."""
    encoded = _checked(word, what)
    if _PLAIN.fullmatch(word):
        return word
    if word.isprintable():
        return "'" + word.replace("'", "'\\''") + "'"
    return (
        "$'"
        + "".join(_ansi_c(character) for character in encoded.decode("utf-8", "surrogateescape"))
        + "'"
    )


def live(word: str, what: str = "a flag of the container engine") -> str:
    """The word, quoted so that bash expands `${NAME}`, but not `$${NAME}`, which is the text `${NAME}`."""
    pieces = parts(word, what)
    if not any(isinstance(piece, Variable) for piece in pieces):
        return literal("".join(str(piece) for piece in pieces), what)
    quoted = ""
    for piece in pieces:
        if isinstance(piece, str):
            quoted += _inside_double_quotes(piece, what)
        elif piece.default is None:
            quoted += f"${{{piece.name}}}"
        else:
            raise RunnerError(
                f"{what} contains a variable with a default: {word!r}",
                "a variable must be written ${NAME} here, without a default",
                f"export {piece.name} first, and write ${{{piece.name}}}",
            )
    return f'"{quoted}"'


def directive(word: str, what: str) -> str:
    """The word, quoted for an `#SBATCH` line.

    There, sbatch understands quotes and backslashes, starts a comment at every `#` that is not escaped, even inside
    quotes, and expands nothing.
    Raises RunnerError for line breaks and for `$`. Source: Slurm, src/sbatch/opt.c, _get_argument.
    """
    _checked(word, what)
    if not word.isprintable():
        raise RunnerError(
            f"{what} cannot be written to a batch script: {word!r}",
            "an #SBATCH line must be a single line of printable text",
            "leave out line breaks and control characters",
        )
    if "$" in word:
        raise RunnerError(
            f"{what} contains a variable",
            "sbatch does not expand variables in #SBATCH lines, so it would take the name for the value",
            "write the value itself",
        )
    escaped = re.sub(r'([\\"#])', r"\\\1", word)
    return f'"{escaped}"' if re.search(r"[\s']", word) else escaped


def past_srun(word: str) -> str:
    r"""The word, escaped for srun, which treats the word `:` as the separator between parts of a heterogeneous step.

    A word that consists of backslashes and one colon gets another backslash, which payload/task.sh removes. Source:
    srun(1) of Slurm 22.05, "heterogeneous job steps"; srun looks for `:` in the words of the command too.
    """
    return "\\" + word if re.fullmatch(r"\\*:", word) else word


def _checked(word: str, what: str) -> bytes:
    if "\0" in word:
        raise RunnerError(
            f"{what} contains a NUL character: {word[:60]!r}",
            "an argument of a program cannot contain NUL",
            "write the text to a file, and pass the file's name",
        )
    try:
        encoded = word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise RunnerError(
            f"{what} is not valid text: {word[:60]!r}",
            "it contains half of a surrogate pair",
            "write the whole character",
        ) from error
    if len(encoded) > WORD_BYTES:
        raise RunnerError(
            f"{what} is too long ({len(encoded)} bytes): {word[:40]!r}…",
            f"Linux limits a single command-line argument to {WORD_BYTES} bytes",
            "write the text to a file, and pass the file's name",
        )
    return encoded


def _ansi_c(character: str) -> str:
    r"""A character, escaped for `$'…'`. Bytes that are not text become three octal digits, so that a digit may
    follow."""
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def _inside_double_quotes(text: str, what: str) -> str:
    _checked(text, what)
    if not text.isprintable():
        raise RunnerError(
            f"{what} contains a character that cannot be printed: {text!r}",
            "runner cannot quote such a character in a text that also contains a variable",
            "leave out that character, or write the value of the variable instead of the variable",
        )
    return re.sub(r'([\\"$`])', r"\\\1", text)
