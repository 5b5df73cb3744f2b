"""The words of a step after its options, read into the program of a job file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from runner.bash import Word
from runner.runs.adopt.adopted import Adopted, plain, secrets_in
from runner.runs.adopt.job import Draft, Program
from runner.runs.adopt.options import TORCHRUN, split

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_PYTHON = re.compile(r"python[0-9.]*")
_COUNTED = {"node-rank", "master-addr", "master-port", "standalone", "local-addr", "tee", "redirects", "log-dir",
            "role", "local-ranks-filter", "max-restarts"}  # fmt: skip


def read_program(words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program:
    """The program that these words start in every task."""
    words = _without_secrets(_without_env(list(words), adopted), adopted)
    texts = [word.text for word in words]
    first = texts[0].rsplit("/", 1)[-1] if words else ""
    if first in {"bash", "sh", "zsh"} and all(text.startswith("-") and text != "-c" for text in texts[1:]):
        adopted.refuse(" ".join(texts), "an interactive shell is not a job: runner shell ENVIRONMENT")
    module = texts.index("-m") + 1 if _PYTHON.fullmatch(first) and "-m" in texts[1:3] else 0
    # with several tasks per node, srun starts several launchers on each node
    if (first == "torchrun" or texts[module : module + 1] == ["torch.distributed.run"]) and (
        (draft.tasks_per_node(adopted) or 1) == 1
    ):
        launched = _torchrun(words[module + 1 :], draft, adopted)
        if launched:
            return launched
    return _program("none", words, draft)


def _without_env(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words without a leading `env NAME=VALUE`. The variables go to [env] of the EDF."""
    count = 1
    while count < len(words) and not words[count].computed and _ASSIGNMENT.fullmatch(words[count].text):
        count += 1
    if not words or words[0].text != "env" or not words[count:] or re.match(r"-|\w+=", words[count].text):
        return words
    for word in words[1:count]:
        name, _, value = word.text.partition("=")
        adopted.variable(name, value, word.raw)
    return words[count:]


def _without_secrets(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words, in which variables of the user's environment replace secrets."""
    for index, (option, before) in secrets_in([word.text for word in words]).items():
        name = re.sub(r"\W+", "_", option.strip("-")).upper() or "SECRET"
        words[index] = replace(words[index], raw=f'{before}"${{{name}:?}}"', computed=True)
        adopted.note(f"{option} …", f"it is a secret: export {name} where you launch")
    return words


def _torchrun(words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program | None:
    """The program that torchrun starts; None if the job file cannot express one of its options."""
    dashed = [
        replace(word, text=re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word.text)) for word in words
    ]
    options, rest = split(dashed, TORCHRUN)
    rest = tuple(words[len(words) - len(rest) :])
    processes: int | None = 1
    for option in options:
        value = draft.value(option)
        if option.name == "nnodes" and value and value.isdigit():
            if draft.resources.setdefault("nodes", int(value)) != int(value):
                adopted.refuse(option.given, f"the job has {draft.resources['nodes']} nodes")
        elif option.name == "nproc-per-node" and value is not None and re.fullmatch(r"\d*|gpu|auto", value):
            processes = int(value) if value.isdigit() else None
        elif option.name == "module":
            rest = (Word("-m", "-m"), *rest)
        elif option.name == "max-restarts" and value != "0":
            adopted.not_carried_over(option.given, "runner restarts the whole job, not single processes")
        elif option.name in _COUNTED or option.name.startswith("rdzv-"):
            adopted.not_needed(option.given, "runner sets the rendezvous, the ranks and the logs of each process")
        elif option.name != "no-python":
            return None
    return _program("torchrun", rest, draft, processes)


def _program(launcher: str, words: Sequence[Word], draft: Draft, processes: int | None = None) -> Program:
    """The words as a command, or as STEP_COMMAND if only a shell can evaluate them."""
    texts = [plain(word.text) if not word.computed and not word.array else None for word in words]
    if None not in texts:
        return Program(launcher, tuple(str(text) for text in texts), processes)
    python = ["python"] if launcher == "torchrun" and words[0].text.endswith((".py", "-m")) else []
    draft.host_setup.append(f"export STEP_COMMAND=$(printf '%q ' {' '.join((*python, *(word.raw for word in words)))})")
    return Program(launcher, ("bash", "-c", 'eval "exec $STEP_COMMAND"'), processes)
