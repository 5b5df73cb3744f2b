"""The variables of a batch script, as far as they are known without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runner.bash import Command, Word, commands
from runner.expansion import Variable, join, parts

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)


@dataclass
class Scope:
    """The variables that the script has set so far."""

    values: dict[str, str] = field(default_factory=dict)
    """EDF text"""
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """name -> the words that only a shell can evaluate, with their line"""
    fallback: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    """name -> its words before a condition changes it"""
    defaults: list[str] = field(default_factory=list)
    """names for which the script has a default"""

    def resolve(self, words: Sequence[Word]) -> tuple[Word, ...]:
        """The words with known variables and arrays replaced."""
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
        """EDF text with known variables replaced. Other variables are unchanged."""
        pieces: list[str | Variable] = []
        for part in parts(text, "a word"):
            known = self.values.get(part.name) if isinstance(part, Variable) else None
            pieces += [part] if known is None else [*parts(known, "a variable")]
        return join(tuple(pieces))

    def assign(self, word: Word, command: Command) -> None:
        """Record one NAME=VALUE."""
        if (found := ASSIGNMENT.fullmatch(word.text)) is None:
            return
        name, value = found[1], found[2]
        own = () if word.computed else parts(value, "a word")
        if (
            len(own) == 1
            and isinstance(own[0], Variable)
            and own[0].name == name
            and name not in self.values
        ):
            self.defaults += [name] if own[0].default else []
            value = own[0].default or value  # A=${A:-x}
        value = value if word.computed else self.value(value)
        before = self.values.pop(name, None)
        self.computed.pop(name, None)
        if not word.computed and not command.nested:
            self.values[name] = value
            return
        self.computed[name] = f"line {command.line}: {word.raw}"
        if before is not None and command.nested:
            self.fallback[name] = tuple(Word(text, text) for text in before.split())

    def assign_array(self, command: Command) -> None:
        """Record NAME=(…) or NAME+=(…); an array that a condition changes is not known."""
        name, before = command.array, self.arrays.pop(command.array, None)
        words: list[Word] = [*(before or ())] if f"{name}+=" in command.raw else []
        for word in command.words:
            words += (before or ()) if word.array == name else (word,)
        if not command.nested and (
            before is not None or name not in self.computed or not words[len(command.words) :]
        ):
            self.arrays[name] = tuple(words)
            return
        self.computed[name] = f"line {command.line}: {name}=(…)"
        if before is not None:
            self.fallback[name] = before

    def assign_default(self, words: Sequence[Word], command: Command) -> bool:
        """Whether the words are `"${NAME:=value}"`, which sets NAME if it is unset."""
        found = (
            re.fullmatch(r"\"?\$\{([A-Za-z_][A-Za-z0-9_]*):?=(.*)\}\"?", words[0].raw, re.S)
            if words
            else None
        )
        if found and found[1] not in self.values:
            [value, *_] = commands(f'{found[1]}="{found[2]}"')
            self.defaults.append(found[1])
            self.assign(value.words[0], replace(command, nested=False))
        return found is not None
