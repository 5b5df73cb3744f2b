"""What a batch script has assigned: its variables, its arrays, and which of them only a shell can know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runner.environments.adopt.adopted import Adopted
from runner.environments.adopt.shell import Command, Word, commands
from runner.expansion import Variable, join, names, parts

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
RENDEZVOUS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
"""set for each task by the batch script that runner writes"""


@dataclass
class Scope:
    """What the script has assigned so far."""

    values: dict[str, str] = field(default_factory=dict)
    """EDF text"""
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """name -> the words that only a shell can work out, with their line"""
    exported: dict[str, str] = field(default_factory=dict)
    """name -> the words that export it"""

    def resolve(self, words: Sequence[Word]) -> tuple[Word, ...]:
        """The words with known variables and arrays put in."""
        found: list[Word] = []
        for word in words:
            if word.array in self.arrays:
                found += self.resolve(self.arrays[word.array])
            elif word.computed or word.array:
                found.append(replace(word, computed=True, text=word.raw))
            elif word.splits and word.text.strip("${}") in self.values:
                found += [Word(text, text) for text in self.value(word.text).split()]
            else:
                found.append(replace(word, text=self.value(word.text)))
        return tuple(found)

    def value(self, text: str) -> str:
        """EDF text with known variables put in; the others stay alive."""
        pieces: list[str | Variable] = []
        for part in parts(text, "a word"):
            known = self.values.get(part.name) if isinstance(part, Variable) else None
            pieces += [part] if known is None else [*parts(known, "a variable")]
        return join(tuple(pieces))

    def assign(self, word: Word, command: Command, *, export: bool) -> None:
        """Note one NAME=VALUE."""
        found = ASSIGNMENT.fullmatch(word.text)
        if found is None:
            if export:
                self.exported[word.text] = command.raw
            return
        name, value = found[1], found[2]
        own = () if word.computed else parts(value, "a word")
        if len(own) == 1 and isinstance(own[0], Variable) and own[0].name == name and name not in self.values:
            value = own[0].default or value  # A=${A:-x}
        for kind in (self.values, self.computed):
            kind.pop(name, None)
        if word.computed or command.nested:
            self.computed[name] = f"line {command.line}: {word.raw}"
        else:
            self.values[name] = self.value(value)
        if export:
            self.exported[name] = f"export {word.raw}"


def assign_default(words: Sequence[Word], scope: Scope, command: Command) -> bool:
    """Whether the words are `"${NAME:=value}"`, which gives a variable that is not set a value."""
    found = re.fullmatch(r"\"?\$\{([A-Za-z_][A-Za-z0-9_]*):?=(.*)\}\"?", words[0].raw, re.S) if words else None
    if found and found[1] not in scope.values:
        [value, *_] = commands(f'{found[1]}="{found[2]}"')
        scope.assign(value.words[0], replace(command, nested=False), export=found[1] in scope.exported)
    return found is not None


def say_unknown(scope: Scope, adopted: Adopted, words: Sequence[Word]) -> None:
    """Say which variables of the EDF, and of the program's words, only the script knows; and which exports."""
    texts = [adopted.image, adopted.workdir, adopted.base, *adopted.env.values(), *adopted.annotations.values()]
    texts += [mount.text() for mount in adopted.mounts]
    in_edf = {name for text in texts for name in names(text)}
    raw = [word.text for word in words if word.computed]
    in_words = {name for text in raw for name in re.findall(r"(?<!\\)\$\{?([A-Za-z_]\w*)", text)}
    in_words |= {name for word in words if not word.computed for name in names(word.text)}
    for name, given in scope.computed.items():
        if name in RENDEZVOUS and name in scope.exported:
            adopted.holds(given, "runner sets it for each task")
        elif name in in_edf:
            adopted.changed(given, f"the EDF needs ${{{name}}}: export it where you launch, or write its value")
        elif name in scope.exported:
            adopted.lost(given, "only a shell can work it out: export it in task_prolog of the job file")
        elif name in in_words:
            adopted.changed(given, f"the step's words have ${name}: write its value, or export it where you launch")
    for name in sorted(in_words & (scope.values.keys() | scope.arrays.keys()) - scope.exported.keys()):
        if name not in {"PWD", "SLURM_SUBMIT_DIR"}:
            adopted.changed(f"${name}", "the step's words have it where only a shell can put it in: write its value")
