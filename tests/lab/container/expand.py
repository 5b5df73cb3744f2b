"""`${VAR}`, `${VAR:-default}` and `$${VAR}` in EDF values, as the Container Engine's documents describe them."""

import re
from collections.abc import Mapping

from tests.lab.container.request import Refusal

PATTERN = re.compile(r"\$?\$\{([^}]*)\}")
NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\Z", re.DOTALL)


def expand(text: str, variables: Mapping[str, str], where: str, lenient: bool = False) -> str:
    """The text with its variables filled in; Refusal for an undefined one.

    `lenient`: before submission a job's own SLURM_* variables are not known yet and stay as they are.
    """

    def value(match: re.Match[str]) -> str:
        if match.group().startswith("$$"):
            return match.group()[1:]
        name = NAME.match(match.group(1))
        if name is None:
            raise Refusal(f"{where}: cannot expand {match.group()!r}")
        if found := variables.get(name.group(1), ""):
            return found
        if name.group(2) is not None:
            return name.group(2)
        if name.group(1) in variables:
            return ""
        if lenient and name.group(1).startswith("SLURM"):
            return match.group()
        raise Refusal(f"{where}: variable {name.group(1)} is not defined: {text!r}")

    return PATTERN.sub(value, text)
