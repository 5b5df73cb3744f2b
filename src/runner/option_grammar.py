"""The options of other programs as data: which options have a value, and their short forms."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Grammar:
    """The options of one program. Every option that is not in `flags` or `optional` has a value."""

    short: Mapping[str, str]
    """letter -> long name"""
    flags: frozenset[str]
    """long names without a value"""
    optional: frozenset[str] = frozenset()
    """long names with an optional value, which follows `=` or, in the short form, the letter"""


@dataclass(frozen=True)
class Option:
    """One option of a command line."""

    name: str
    """the long name, without leading dashes, and with `-` for `_`"""
    value: str | None
    given: str
    """as written"""


def split(words: Sequence[str], grammar: Grammar) -> tuple[tuple[Option, ...], tuple[str, ...]]:
    """(the options, the words from the first that is not an option)."""
    found: list[Option] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return tuple(found), tuple(words[position + 1 :])
        if not word.startswith("-") or word == "-":
            break
        position += 1
        following = words[position] if position < len(words) else None
        if not word.startswith("--"):
            position += _short(word, following, grammar, found)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")  # torchrun accepts both
        if equals or name in grammar.flags or name in grammar.optional or following is None:
            found.append(Option(name, value if equals else None, word))
        else:
            found.append(Option(name, following, f"{word} {following}"))
            position += 1
    return tuple(found), tuple(words[position:])


def _short(word: str, following: str | None, grammar: Grammar, found: list[Option]) -> int:
    """Read `-itv VALUE`; returns how many of the following words belong to it."""
    for index, letter in enumerate(word[1:], 1):
        name = grammar.short.get(letter, letter)
        rest = word[index + 1 :]
        if name in grammar.flags:
            found.append(Option(name, None, f"-{letter}"))
        elif rest or name in grammar.optional or following is None:
            found.append(Option(name, rest.removeprefix("=") or None, word))
            return 0
        else:
            found.append(Option(name, following, f"{word} {following}"))
            return 1
    return 0


_SHORT_OF_BOTH = {
    "A": "account",
    "b": "begin",
    "B": "extra-node-info",
    "c": "cpus-per-task",
    "C": "constraint",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "h": "help",
    "H": "hold",
    "i": "input",
    "I": "immediate",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "V": "version",
    "w": "nodelist",
    "x": "exclude",
}
SHORT = {
    "sbatch": {**_SHORT_OF_BOTH, "a": "array", "W": "wait"},
    "srun": {
        **_SHORT_OF_BOTH,
        "K": "kill-on-bad-exit",
        "l": "label",
        "r": "relative",
        "T": "threads",
        "u": "unbuffered",
        "W": "wait",
        "X": "disable-status",
        "E": "preserve-env",
        "Z": "no-allocate",
    },
}
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_FLAGS, _OPTIONAL = frozenset(_TABLES["flags"]), frozenset(_TABLES["optional"])
OF_STEPS = frozenset(_TABLES["of_steps"])
SRUN = Grammar(SHORT["srun"], _FLAGS, _OPTIONAL)
SBATCH = Grammar(SHORT["sbatch"], _FLAGS | {"wait"}, _OPTIONAL)
