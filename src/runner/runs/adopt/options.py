"""The options of other programs as data: which options have a value, and their short forms."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.bash import Word, here_document_lines
from runner.expansion import literal
from runner.runs.adopt.adopted import Adopted
from runner.runs.schedulers.flags import SHORT


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
    computed: bool = False
    """only a shell can evaluate its value"""


def split(words: Sequence[Word], grammar: Grammar) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
    """(the options, the words from the first that is not an option)."""
    found: list[Option] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word.text == "--":
            return tuple(found), tuple(words[position + 1 :])
        if not word.text.startswith("-") or word.text == "-":
            break
        position += 1
        following = words[position] if position < len(words) else None
        if not word.text.startswith("--"):
            position += _short(word, following, grammar, found)
            continue
        name, equals, value = word.text[2:].partition("=")
        name = name.replace("_", "-")  # torchrun accepts both
        if equals or name in grammar.flags or name in grammar.optional or following is None:
            found.append(Option(name, value if equals else None, word.raw, word.computed))
        else:
            found.append(
                Option(name, following.text, f"{word.raw} {following.raw}", following.computed)
            )
            position += 1
    return tuple(found), tuple(words[position:])


def _short(word: Word, following: Word | None, grammar: Grammar, found: list[Option]) -> int:
    """Read `-itv VALUE`; returns how many of the following words belong to it."""
    for index, letter in enumerate(word.text[1:], 1):
        name = grammar.short.get(letter, letter)
        rest = word.text[index + 1 :]
        if name in grammar.flags:
            found.append(Option(name, None, f"-{letter}"))
        elif rest or name in grammar.optional or following is None:
            found.append(Option(name, rest.removeprefix("=") or None, word.raw, word.computed))
            return 0
        else:
            found.append(
                Option(name, following.text, f"{word.raw} {following.raw}", following.computed)
            )
            return 1
    return 0


# Source: srun(1) and sbatch(1) of Slurm 25.05; pyxis 0.24.0, args.c
_SLURM_FLAGS = (
    "allocate-all",
    "contiguous",
    "disable-status",
    "exact",
    "get-user-env-all",
    "help",
    "hold",
    "ignore-pbs",
    "interactive",
    "label",
    "multi-prog",
    "no-allocate",
    "no-requeue",
    "oom-kill-step",
    "overcommit",
    "overlap",
    "oversubscribe",
    "parsable",
    "preserve-env",
    "quiet",
    "quit-on-interrupt",
    "reboot",
    "requeue",
    "spread-job",
    "sockets",
    "stepmgr",
    "test-only",
    "unbuffered",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "whole",
    "container-mount-home",
    "no-container-mount-home",
    "container-remap-root",
    "no-container-remap-root",
    "container-entrypoint",
    "no-container-entrypoint",
    "container-entrypoint-log",
    "container-writable",
    "container-readonly",
    "no-container-entrypoint-log",
)
_SLURM_OPTIONAL = (
    *(
        "compress",
        "exclusive",
        "get-user-env",
        "immediate",
        "kill-on-bad-exit",
        "nice",
        "no-kill",
        "propagate",
    ),
    *("pty", "resv-ports", "send-libs"),
)
SRUN = Grammar(SHORT["srun"], frozenset(_SLURM_FLAGS), frozenset(_SLURM_OPTIONAL))
SBATCH = Grammar(SHORT["sbatch"], frozenset((*_SLURM_FLAGS, "wait")), frozenset(_SLURM_OPTIONAL))

# Source: torchrun --help of PyTorch 2.7
TORCHRUN = Grammar(
    {"m": "module"}, frozenset(("standalone", "module", "no-python", "run-path", "help"))
)


def read_directives(text: str, adopted: Adopted) -> tuple[Option, ...]:
    """The options in the `#SBATCH` lines. sbatch reads them up to the first command, and expands nothing in them."""
    words: list[Word] = []
    ended, inside = False, here_document_lines(text)
    for number, line in enumerate(text.splitlines(), 1):
        if number in inside:  # the directives of another script
            continue
        ended = ended or bool(line.strip() and not line.lstrip().startswith("#"))
        if not line.startswith("#SBATCH"):
            continue
        if ended:
            adopted.not_carried_over(
                f"line {number}: {line}", "sbatch ignores #SBATCH lines after the first command"
            )
            continue
        try:
            found = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            adopted.refuse(f"line {number}: {line}", "a quote or escape is not closed", edf=True)
            continue
        words += [Word(literal(word), word) for word in found]
    options, rest = split(words, SBATCH)
    for word in rest[:1]:
        adopted.refuse(f"#SBATCH … {word.raw}", "this word is not an option")
    return options
