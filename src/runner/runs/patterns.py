"""The patterns of trainers (runs/trainers/*.toml), compiled to read the text of a log.

Text is latin-1: one character for each byte, whatever the log's encoding is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

GENERIC = "generic"
BARS = "bars"
"""what is read if no other trainer is found"""

Number = int | float
"""an int if the log has only digits"""


@dataclass
class Line:
    """How to read one kind of line: a table [[lines]]. Its patterns are compiled when a log first needs them."""

    match: str
    unless: str = ""
    fields: list[tuple[str, str]] = field(default_factory=list)
    """(key, a pattern for the text before its value)"""

    @cached_property
    def words(self) -> frozenset[str]:
        """A line that matches contains one of these; empty: not known."""
        return required_words(self.match)

    @cached_property
    def unless_words(self) -> frozenset[str]:
        return required_words(self.unless)

    def reads(self, text: str) -> bool:
        return bool(usable(self.match).search(text)) and not self._is_other(text)

    def _is_other(self, text: str) -> bool:
        if not self.unless or (self.unless_words and not has_one(self.unless_words, text)):
            return False
        return bool(usable(self.unless).search(text))


@dataclass
class Trainer:
    """How to read the lines of one trainer."""

    name: str
    strength: int = 2
    """a line of a stronger trainer replaces the trainer that was found before; 0: its lines have no loss"""
    detect: str = ""
    first_epoch: int = 0
    lines: list[Line] = field(default_factory=list)

    @cached_property
    def detect_words(self) -> frozenset[str]:
        return required_words(self.detect)


def has_one(words: Iterable[str], text: str) -> bool:
    """Whether the text has one of the words. This is faster than to look for a pattern that needs one of them."""
    for word in words:  # noqa: SIM110 (any() is slower)
        if word in text:
            return True
    return False


class Plan(NamedTuple):
    """What a line with certain words may be to a trainer."""

    trainer: Trainer
    lines: tuple[Line, ...]


class Plans:
    """Finds the few lines of trainers that a text may be: to look for words is faster than to look for patterns."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self._trainers = trainers
        each = [line.words for trainer in trainers for line in trainer.lines]
        each += [trainer.detect_words for trainer in trainers if trainer.detect]
        self._words = tuple(sorted(frozenset().union(*each)))
        self._found: dict[tuple[str, ...], tuple[Plan, ...]] = {}
        self.candidate = _candidate(self._words) if all(each) else None
        """a pattern that is in each line of interest; None if all lines may be of interest"""

    def of(self, text: str) -> tuple[Plan, ...]:
        present = tuple([word for word in self._words if word in text])
        found = self._found.get(present)
        if found is None:
            found = self._found[present] = tuple(self._plans(frozenset(present)))
        return found

    def _plans(self, present: frozenset[str]) -> Iterator[Plan]:
        for trainer in self._trainers:
            lines = tuple(line for line in trainer.lines if not line.words or line.words & present)
            is_told = trainer.detect and (
                not trainer.detect_words or trainer.detect_words & present
            )
            if lines or is_told:
                yield Plan(trainer, lines)


def _candidate(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the words.

    It also finds colours, which may be anywhere in a line, and lines of blanks, after which a bar is drawn again.
    """
    # of two words, of which one contains the other, the shorter one is enough
    shortest = [word for word in words if not any(each in word for each in words if each != word)]
    # each alternative begins with a character, not with `^`: Python then looks for these characters first
    return re.compile("|".join(map(re.escape, ("\x1b", *shortest))) + r"|\n +(?=\n)|\]: +(?=\n)")


def parse(text: str) -> tuple[tuple[Trainer, ...], str]:
    """(trainers, the name of the one that the job chose; empty: none) of the file `trainers` of a run."""
    trainers: list[Trainer] = []
    chosen = ""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "chosen":
            chosen = value
        elif key == "trainer":
            trainers.append(Trainer(value, strength=1 if value in (GENERIC, BARS) else 2))
        elif trainers:
            _add(trainers[-1], key, value)
    return tuple(trainers), chosen


def _add(trainer: Trainer, key: str, value: str) -> None:
    """Add a line of the file to the trainer."""
    if key == "without_loss":
        trainer.strength = 0
    elif key == "first_epoch":
        trainer.first_epoch = int(value)
    elif key == "detect":
        trainer.detect = value
    elif key == "line":
        trainer.lines.append(Line(value))
    elif key == "unless" and trainer.lines:
        trainer.lines[-1].unless = value
    elif key == "find" and trainer.lines:
        name, _, pattern = value.partition(" ")
        trainer.lines[-1].fields.append((name, pattern))


@cache
def usable(pattern: str) -> re.Pattern[str]:
    """The pattern, compiled. One of an earlier version that Python does not understand matches nothing."""
    try:
        return compiled(pattern)
    except re.error:
        return re.compile("(?!)")


def _latin(text: str) -> str:
    return text.encode(errors="surrogateescape").decode("latin-1")


_CLASSES = {
    "alnum": "A-Za-z0-9",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": " \\t\\n\\r\\f\\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
_BRACKET = re.compile(r"\\.|\[\^?\]?(?:\[:[a-z]+:\]|\\.|[^]\\])*\]", re.DOTALL)
"""an escaped character, or a bracket expression; a `]` at its beginning is a member of it"""


def compiled(pattern: str) -> re.Pattern[str]:
    """A POSIX extended regular expression, compiled. Raises re.error.

    Python takes the first alternative that matches, not the longest: write `iteration|iter`.
    """

    def in_python(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == "\\":
            return text
        opened = re.match(r"\[\^?\]?", text)
        begin = opened.end() if opened else 1
        inner = re.sub(
            r"\[:([a-z]+):\]", lambda name: _CLASSES.get(name[1], name[0]), text[begin:-1]
        )
        # Python warns of a `[`, and of two of these, which may once mean something in a set
        inner = re.sub(r"(?<!\\)[\[&~|]", r"\\\g<0>", inner)
        return text[:begin].replace("]", "\\]") + inner + "]"

    return re.compile(_BRACKET.sub(in_python, _latin(pattern)))


def required_words(pattern: str) -> frozenset[str]:
    """Words, one of which is in each text that matches; empty if the pattern does not tell.

    They come from the parts of the pattern that are plain text and must match.
    """
    return _alternatives(_tokens(_latin(pattern)))


def _tokens(pattern: str) -> Iterator[str]:
    """The parts of a pattern: an escaped character, a bracket expression, or one character."""
    at = 0
    while at < len(pattern):
        found = _BRACKET.match(pattern, at)
        token = found[0] if found else pattern[at]
        at += len(token)
        yield token


def _alternatives(tokens: Iterator[str]) -> frozenset[str]:
    """The words of `a|b|c` until its closing parenthesis: those of each alternative, if each has some."""
    found: list[frozenset[str]] = []
    ended = False
    while not ended:
        words, ended = _sequence(tokens)
        found.append(words)
    return frozenset().union(*found) if all(found) else frozenset()


def _sequence(tokens: Iterator[str]) -> tuple[frozenset[str], bool]:
    """(words of the best part of a sequence, whether it is the last alternative)."""
    parts: list[frozenset[str]] = []
    literal = ""
    newest: frozenset[str] = (
        frozenset()
    )  # the words of a group, which a `*` or `?` may make optional
    last = True
    for token in tokens:
        if token in ("*", "?"):
            literal, newest = literal[:-1], frozenset()
        parts.append(newest)
        newest = frozenset()
        if len(token) == 1 and token not in "^$.*+?()|":
            literal += token
            continue
        if len(token) == 2 and token[0] == "\\" and not token[1].isalnum():
            literal += token[1]
            continue
        parts.append(frozenset((literal,) if literal else ()))
        literal = ""
        if token == "(":
            newest = _alternatives(tokens)
        elif token in ("|", ")"):
            last = token == ")"
            break
    parts += [newest, frozenset((literal,) if literal else ())]
    return max(parts, key=_usefulness), last


def _usefulness(words: frozenset[str]) -> tuple[int, int]:
    """Long words are rare, and few are found quickly."""
    return min(map(len, words), default=0), -len(words)


_NUMBER = re.compile(
    r"(?P<thousands>[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?)"
    r"|(?P<plain>[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|[-+]?(?:[Nn][Aa][Nn]|[Ii][Nn][Ff])"
)
_THOUSANDS = re.compile(r"([kK])(?![A-Za-z0-9_])|M(?![A-Za-z0-9_])")  # LeRobot: step:12K


def number_after(text: str, before: str) -> tuple[Number, str] | None:
    """The number that follows the first match that a number follows, and the rest of the text."""
    pattern = usable(before)
    while text:
        found = pattern.search(text)
        if found is None:
            break
        text = text[found.end() :]
        number = _NUMBER.match(text)
        if number:
            digits = number[0].replace(",", "")
            value = int(digits) if digits.isdecimal() else float(digits)
            if unit := _THOUSANDS.match(text, number.end()):
                value = round(value * (1000 if unit[1] else 1_000_000))
                number = unit
            return value, text[number.end() :]
        if not found[0]:
            text = text[1:]
    return None
