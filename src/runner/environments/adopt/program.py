"""The program of a step: which launcher starts it, the script or command, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runner.environments.adopt.adopted import Adopted, plain
from runner.environments.adopt.options import ACCELERATE, PYTHON, TORCHRUN, Grammar, Option, split
from runner.environments.adopt.shell import Word
from runner.expansion import Variable, parts

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_PYTHON = re.compile(r"python[0-9.]*")
_COUNTED = {"nnodes", "node-rank", "master-addr", "master-port", "standalone", "local-addr", "num-machines",
            "machine-rank", "main-process-ip", "main-process-port", "multi-gpu", "same-network",
            "num-processes"}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """What a job file says about its program."""

    launcher: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    processes: int | None = None
    """per node, where the launcher's words say so"""


def read_program(words: Sequence[Word], tasks_per_node: int | None, adopted: Adopted) -> Program:
    """The program that these words start, once for each of a node's tasks."""
    words = _without_prefixes(list(words), adopted)
    first = words[0].text.rsplit("/", 1)[-1] if words else ""
    launcher, grammar, behind = "", PYTHON, 1
    texts = [word.text for word in words]
    if first == "torchrun":
        launcher, grammar = "torchrun", TORCHRUN
    elif _PYTHON.fullmatch(first) and "-m" in texts[1:3]:
        at = texts.index("-m", 1)
        if texts[at + 1 : at + 2] in (["torch.distributed.run"], ["torch.distributed.launch"]):
            launcher, grammar, behind = "torchrun", TORCHRUN, at + 2
        elif texts[at + 1 : at + 3] in (["accelerate.commands.launch"],):
            launcher, grammar, behind = "accelerate", ACCELERATE, at + 2
    elif first == "accelerate" and texts[1:2] == ["launch"]:
        launcher, grammar, behind = "accelerate", ACCELERATE, 2
    if launcher:
        return _launched(launcher, grammar, words[behind:], adopted)
    several = "srun" if (tasks_per_node or 1) > 1 else "none"
    if _PYTHON.fullmatch(first):
        options, rest = split(words[1:], PYTHON)
        if {option.name for option in options} <= {"u"} and rest and rest[0].text.endswith(".py"):
            return _program(several, rest, words)
    if first in {"bash", "sh"} and len(words) > 1 and words[1].text.endswith(".sh"):
        return _program(several, words[1:], words)
    if first.endswith((".py", ".sh")):
        return _program(several, words, words)
    return _program("none", (), words)


def _without_prefixes(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words without `exec` and `env -u NAME NAME=VALUE`, whose variables go to [env]."""
    while words and words[0].text in {"exec", "env", "time"}:
        prefix = words.pop(0)
        while prefix.text == "env" and words:
            if words[0].text == "-u" and len(words) > 1:
                adopted.env[words[1].text] = ""
                words = words[2:]
            elif (found := _ASSIGNMENT.fullmatch(words[0].text)) and not words[0].computed:
                adopted.variable(found[1], found[2], words[0].raw)
                words = words[1:]
            else:
                break
    return words


def _launched(launcher: str, grammar: Grammar, words: Sequence[Word], adopted: Adopted) -> Program:
    dashed = [
        Word(re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word.text), word.raw, word.computed)
        for word in words
    ]
    options, rest = split(dashed, grammar)
    rest = tuple(words[len(words) - len(rest) :])
    processes, module = None, False
    for option in options:
        if option.name == "nproc-per-node":
            processes = int(option.value) if option.value and option.value.isdigit() else None
            if processes is None:
                adopted.holds(option.given, "one process for each GPU is the default")
        elif option.name in {"module", "no-python"}:
            module = option.name == "module"
        else:
            _say(option, adopted)
    if module:
        command = (Word("python", "python"), Word("-m", "-m"), *rest)
        return _program(launcher, (), command, processes)
    return _program(launcher, rest, rest, processes)


def _say(option: Option, adopted: Adopted) -> None:
    if option.name in _COUNTED or option.name.startswith("rdzv-"):
        adopted.holds(option.given, "runner sets the rendezvous and the ranks for each task")
    elif option.name == "max-restarts":
        adopted.lost(option.given, "runner starts the whole job again, not single processes")
    else:
        adopted.lost(option.given, "a job file has no word for it: say it in the script's own settings")


def _program(launcher: str, rest: Sequence[Word], words: Sequence[Word], processes: int | None = None) -> Program:
    """The script with its arguments; the command where there is no script, or where a shell must read the words."""
    texts = [plain(word.text) if not word.computed else None for word in rest]
    if texts and None not in texts and str(texts[0]).endswith((".py", ".sh")):
        script, *arguments = (str(text) for text in texts)
        return Program(launcher, script, tuple(arguments), (), processes)
    texts = [plain(word.text) if not word.computed else None for word in words]
    if words and None not in texts:
        return Program(launcher, "", (), tuple(str(text) for text in texts), processes)
    if not words:
        return Program(launcher, processes=processes)
    prefix = ["python"] if words[0].text.endswith(".py") and launcher in {"torchrun", "accelerate"} else []
    text = " ".join((*prefix, *(shell_text(word) for word in words)))
    return Program(launcher, "", (), ("bash", "-c", f"exec {text}"), processes)


def shell_text(word: Word) -> str:
    """The word for a shell: variables alive, text literal; what only a shell can work out as it was written."""
    if word.computed or re.fullmatch(r"[A-Za-z0-9_@%+:,./=-]+", word.text):
        return word.raw if word.computed else word.text
    written = ""
    for piece in parts(word.text, "a word"):
        if isinstance(piece, Variable):
            written += f"${{{piece.name}}}" if piece.default is None else f"${{{piece.name}:-{piece.default}}}"
        else:
            written += re.sub(r'([\\"$`])', r"\\\1", piece)
    return f'"{written}"'
