"""References to variables in text: `${VAR}`, `${VAR:-default}`, and `$${VAR}` for the literal text `${VAR}`.

This is the grammar of the Container Engine. There, and in runner, `$VAR` without braces is plain text. In Sarus Suite
it is a variable, so `sarus_text` converts text for Sarus Suite.
Source: CSCS documentation, software/container-engine/edf.md, "Environment variables" (2026-08-20).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from runner.errors import RunnerError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPEN = re.compile(r"\$?\$\{")


class Variable(NamedTuple):
    """`${name}` or `${name:-default}`; the default may contain references itself."""

    name: str
    default: str | None = None


def parts(text: str, what: str = "text") -> tuple[str | Variable, ...]:
    """Split text into literal pieces and variables. Raises RunnerError for an incomplete or invalid reference."""
    found: list[str | Variable] = []
    literal, position = "", 0
    while match := _OPEN.search(text, position):
        literal += text[position : match.start()]
        if match[0] == "$${":
            literal += "${"
            position = match.end()
            continue
        variable, position = _variable(text, match.end(), what)
        found += [literal, variable] if literal else [variable]
        literal = ""
    literal += text[position:]
    return (*found, literal) if literal else tuple(found)


def _variable(text: str, start: int, what: str) -> tuple[Variable, int]:
    """The variable whose name begins at `start`, and the position behind its closing brace."""
    name = _NAME.match(text, start)
    if name and text.startswith("}", name.end()):
        return Variable(name[0]), name.end() + 1
    if name and text.startswith(":-", name.end()):
        depth, position = 1, name.end() + 2
        while position < len(text):
            if text.startswith("${", position):
                depth += 1
            elif text[position] == "}":
                depth -= 1
            position += 1
            if depth == 0:
                return Variable(name[0], text[name.end() + 2 : position - 1]), position
    raise RunnerError(
        f"cannot read the variable in {what}: {text[start - 2 : start + 40]!r}",
        "a variable must be written ${NAME} or ${NAME:-default}",
        "close the brace; to get the plain text ${ itself, write $${",
    )


def names(text: str, what: str = "text") -> tuple[str, ...]:
    """The names of the variables in a text, including those inside defaults."""
    found: list[str] = []
    for part in parts(text, what):
        if isinstance(part, Variable):
            found += [part.name, *names(part.default or "", what)]
    return tuple(dict.fromkeys(found))


def expand(text: str, variables: Mapping[str, str], what: str) -> str:
    """The text with every reference replaced. A default is used if the variable is unset or empty.

    Raises RunnerError for a variable that is not defined and has no default.
    """
    return "".join(
        part if isinstance(part, str) else _value(part, variables, what)
        for part in parts(text, what)
    )


def _value(variable: Variable, variables: Mapping[str, str], what: str) -> str:
    if variable.default is not None:
        return variables.get(variable.name) or expand(variable.default, variables, what)
    if variable.name in variables:
        return variables[variable.name]
    raise RunnerError(
        f"the variable {variable.name} in {what} is not defined",
        f"{what} contains ${{{variable.name}}}, but {variable.name} is not set in this shell",
        f"export {variable.name}=…, or write ${{{variable.name}:-DEFAULT}} in the file that contains it",
    )


def literal(text: str) -> str:
    """The text, escaped so that expansion returns it unchanged."""
    return text.replace("${", "$${")


def join(pieces: tuple[str | Variable, ...]) -> str:
    """The text that `parts` splits into these pieces."""
    return "".join(
        literal(piece)
        if isinstance(piece, str)
        else f"${{{piece.name}}}"
        if piece.default is None
        else f"${{{piece.name}:-{piece.default}}}"
        for piece in pieces
    )


def sarus_text(text: str, what: str) -> str:
    """The text, converted for Sarus Suite, where `$NAME` without braces is a variable too, and `$$` is a `$`.

    Raises RunnerError for a default that contains a variable or a brace: Sarus Suite reads it up to the first `}`, as
    plain text.
    Source: sarus-suite/raster@20f75bd src/common.rs; shellexpand 3.1.1, env_with_context.
    """
    written = ""
    for part in parts(text, what):
        if isinstance(part, str):
            written += part.replace("$", "$$")
        elif part.default is not None and re.search(r"[$}]", part.default):
            raise RunnerError(
                f"Sarus Suite cannot expand {what}: {text!r}",
                f"Sarus Suite reads the default of {part.name} as plain text that ends at the first closing brace",
                f"export {part.name}, and write ${{{part.name}}}",
            )
        else:
            written += join((part,))
    return written
