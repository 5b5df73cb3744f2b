"""The words of a step after its options, read into the program of a job file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from runner.bash import Word
from runner.runs.adopt.adopted import Adopted, plain, secrets_in
from runner.runs.adopt.job import Draft, Program
from runner.runs.adopt.options import ACCELERATE, PYTHON, TORCHRUN, Grammar, Option, split

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_PYTHON = re.compile(r"python[0-9.]*")
_COUNTED = {"node-rank", "master-addr", "master-port", "standalone", "local-addr", "machine-rank", "main-process-ip",
            "main-process-port", "multi-gpu", "same-network"}  # fmt: skip
_LOGGED = {"tee", "redirects", "log-dir", "role", "local-ranks-filter", "max-restarts"}
STEP_COMMAND = ("bash", "-c", 'eval "exec $STEP_COMMAND"')
"""runs the words that host_setup has evaluated"""


def read_program(words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program:
    """The program that these words start in every task."""
    words = _without_secrets(_without_prefixes(list(words), adopted), adopted)
    texts = [word.text for word in words]
    first = texts[0].rsplit("/", 1)[-1] if words else ""
    if first in {"bash", "sh", "zsh"} and all(text.startswith("-") and text != "-c" for text in texts[1:]):
        adopted.refuse(" ".join(texts), "an interactive shell is not a job: runner shell ENVIRONMENT")
    launched = None
    once = (draft.tasks_per_node(adopted) or 1) == 1  # otherwise srun starts several launchers on each node
    module = texts.index("-m") + 1 if _PYTHON.fullmatch(first) and "-m" in texts[1:3] else 0
    if once and (first == "torchrun" or texts[module : module + 1] == ["torch.distributed.run"]):
        launched = _launched("torchrun", TORCHRUN, words[module + 1 :], draft, adopted)
    elif once and first == "accelerate" and texts[1:2] == ["launch"]:
        launched = _launched("accelerate", ACCELERATE, words[2:], draft, adopted)
    if launched:
        return launched
    rest: Sequence[Word] = words
    if _PYTHON.fullmatch(first):
        options, rest = split(words[1:], PYTHON)
        rest = rest if {option.name for option in options} <= {"u"} else ()
    elif first in {"bash", "sh"}:
        rest = words[1:]
    return _program("none", rest, words, draft, adopted)


def _without_prefixes(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words without a leading `exec` or `env -u NAME NAME=VALUE`. The variables of `env` go to [env] of the EDF."""
    while words and words[0].text in {"exec", "env", "time"}:
        prefix = words.pop(0)
        while prefix.text == "env" and words:
            if words[0].text == "-u" and len(words) > 1:
                adopted.env[words[1].text] = ""
                words = words[2:]
            elif (found := _ASSIGNMENT.fullmatch(words[0].text)) and not words[0].computed:
                adopted.variable(found[1], found[2], words[0].raw)
                words = words[1:]
            elif words[0].text.startswith("-") or found:
                return [prefix, *words]
            else:
                break
    return words


def _without_secrets(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words, in which variables of the user's environment replace secrets."""
    for index, (option, before) in secrets_in([word.text for word in words]).items():
        name = re.sub(r"\W+", "_", option.strip("-")).upper() or "SECRET"
        words[index] = replace(words[index], raw=f'{before}"${{{name}:?}}"', computed=True)
        adopted.note(f"{option} …", f"it is a secret: export {name} where you launch")
    return words


def _launched(launcher: str, grammar: Grammar, words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program | None:
    """The program that a launcher starts; None if the job file cannot express one of its options."""
    dashed = [
        replace(word, text=re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word.text)) for word in words
    ]
    options, rest = split(dashed, grammar)
    rest = tuple(words[len(words) - len(rest) :])
    nodes = draft.resources.get("nodes", 1)
    assert isinstance(nodes, int)
    processes, module, said = 1 if launcher == "torchrun" else None, False, list[Option]()
    for option in options:
        value = draft.value(option)
        if option.name in {"nnodes", "num-machines"} and value and value.isdigit():
            if "nodes" in draft.resources and int(value) != nodes:
                adopted.refuse(option.given, f"the job has {nodes} nodes")
            nodes = int(value)
            draft.resources |= {"nodes": nodes} if nodes > 1 else {}
        elif option.name == "num-processes" and value and value.isdigit() and not int(value) % nodes:
            processes = int(value) // nodes
        elif option.name == "nproc-per-node" and value and value.isdigit():
            processes = int(value)
        elif option.name == "nproc-per-node" and value in {"", "gpu", "auto"}:
            processes = None
            said.append(option)
        elif option.name in {"module", "no-python"}:
            module = option.name == "module"
        elif option.name in _COUNTED or option.name in _LOGGED or option.name.startswith("rdzv-"):
            said.append(option)
        else:
            return None
    for option in said:
        if option.name == "max-restarts" and option.value != "0":
            adopted.not_carried_over(option.given, "runner restarts the whole job, not single processes")
        elif option.name in _LOGGED:
            adopted.not_needed(option.given, "each process has its own log")
        else:
            adopted.not_needed(option.given, "runner sets the rendezvous, the ranks and the processes of each node")
    if module:
        rest = (Word("-m", "-m"), *rest)
    return _program(launcher, rest, rest, draft, adopted, processes)


def _program(
    launcher: str,
    rest: Sequence[Word],
    words: Sequence[Word],
    draft: Draft,
    adopted: Adopted,
    processes: int | None = None,
) -> Program:
    """The script with its arguments if it is a file of the project, or else the command."""
    texts = [plain(word.text) if not word.computed and not word.array else None for word in words]
    if None not in texts:
        command = tuple(str(text) for text in texts)
        script = adopted.file_of_project(command[len(words) - len(rest)]) if rest else ""
        if script:
            adopted.note(script, "the job runs the copy of your code that launch makes")
            return Program(launcher, script, command[len(words) - len(rest) + 1 :], (), processes)
        return Program(launcher, "", (), command, processes)
    python = ["python"] if launcher in {"torchrun", "accelerate"} and words[0].text.endswith((".py", "-m")) else []
    draft.host_setup.append(f"export STEP_COMMAND=$(printf '%q ' {' '.join((*python, *(word.raw for word in words)))})")
    return Program(launcher, "", (), STEP_COMMAND, processes)
