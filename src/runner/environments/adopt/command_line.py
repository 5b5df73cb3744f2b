"""A command line that someone typed: `srun …`, `sbatch …`, `docker run …`, `podman run …`, or flags of pyxis alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from runner.environments.adopt import pyxis
from runner.environments.adopt.adopted import Adopted
from runner.environments.adopt.job import Draft
from runner.environments.adopt.options import SBATCH, split
from runner.environments.adopt.program import Program, read_program
from runner.environments.adopt.script import read_script, take_step
from runner.environments.adopt.shell import Word
from runner.errors import RunnerError
from runner.expansion import literal


def read_command_line(argv: Sequence[str], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Take over the words; returns the program that they start. A shell has read them, so nothing in them is alive.

    Raises RunnerError for a program that is not known here.
    """
    words = tuple(Word(literal(word), shlex.quote(word)) for word in argv)
    adopted.folder = folder
    while words and words[0].text in {"sudo", "exec", "time"}:
        words = words[1:]
    first = words[0].text if words else ""
    first = first if first.startswith("-") else first.rsplit("/", 1)[-1]
    if first in {"docker", "nvidia-docker", "podman"}:
        words = words[1:]
        while words and words[0].text in {"container", "run", "--remote"}:
            words = words[1:]
        words = take_step(first.removeprefix("nvidia-"), words, adopted, draft, folder)
    elif first == "srun" or first.startswith(("--container-", "--no-container-", "--environment", "--edf")):
        words = take_step("srun", words[1:] if first == "srun" else words, adopted, draft, folder)
    elif first == "sbatch":
        return _sbatch(words[1:], adopted, draft, folder)
    else:
        raise RunnerError(
            f"cannot adopt a command line of {first!r}",
            "known are srun, sbatch, docker run, podman run, and flags of pyxis alone (--container-image=…)",
            "write it as one of them, or write the EDF: docs/env.md has the keys",
        )
    program = read_program(words, draft.tasks_per_node(adopted), adopted)
    draft.count(program, adopted)
    return program


def _sbatch(words: Sequence[Word], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """`sbatch OPTIONS SCRIPT`: the script, and over it the options."""
    options, rest = split(words, SBATCH)
    program = Program("none")
    if rest:
        path = folder / rest[0].text
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RunnerError(f"cannot read {path}", why, "check the path") from error
        program = read_script(text, adopted, draft, folder, rest[0].text)
    for word in rest[1:]:
        adopted.lost(word.raw, "the script's own arguments are not followed: $1, $2 … stay unknown")
    container = [option for option in options if pyxis.is_flag(option)]
    pyxis.read_flags(container, adopted)
    draft.read([option for option in options if option not in container], "sbatch", adopted)
    return program
