"""Split a bash script into commands, words and here-documents, without running it.

A word is stored as EDF text: `${NAME}` is a variable, and everything else is literal. If only a shell can evaluate it
(`$(…)`, `${X%.*}`, a file pattern), the word is `computed`, and its text is unchanged from the script.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from runner.expansion import Variable, join, parts

_OPERATOR = re.compile(r"\|\||&&|;;&|;;|;&|\|&|[;&|]")
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|>>|>\||<>|<&|>&|<|>)")
_ARRAY = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}")
_BRACED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=]([^${}\"'`\\]*))?\}")
_HERE = re.compile(r"\$\(\s*pwd(?: -[LP])?\s*\)|`pwd`")
_ARRAY_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=\(")
_DECLARES = re.compile(r"declare|local|typeset|readonly|export|-[a-zA-Z]+")
OPENING = ("if", "for", "while", "until", "case", "select", "{", "(")
_CLOSING = ("fi", "done", "esac", "}", ")")
_PREFIXES = ("then", "do", "else", "elif", "!", "time", "if", "while", "until", "{", "(")


@dataclass(frozen=True)
class Word:
    """One word of a command."""

    text: str
    """EDF text, in which `${NAME}` is a variable; if `computed`, the text of the script"""
    raw: str
    """as in the script"""
    computed: bool = False
    splits: bool = False
    """it is a single unquoted variable, whose value may be several words"""
    array: str = ""
    """the array whose elements the word expands to; empty: none"""


@dataclass(frozen=True)
class Command:
    """One simple command."""

    words: tuple[Word, ...]
    line: int
    raw: str
    nested: bool = False
    """it is inside a function, a loop or a condition (also behind `&&`), so it may never run, or run several times"""
    array: str = ""
    """the words are the elements assigned to this array"""
    redirections: tuple[str, ...] = ()
    pipe: bool = False
    """its output is piped to another command"""


@dataclass(frozen=True)
class HereDocument:
    """The lines after a command with `<<MARK`."""

    mark: str
    quoted: bool
    """bash does not expand the body"""
    line: int
    """of the first line of the body"""
    body: str


def commands(text: str) -> tuple[Command, ...]:
    """The commands of a bash script, in their order; comments and the bodies of here-documents are left out."""
    return tuple(_Reader(text.replace("\r\n", "\n")).commands())


def here_documents(text: str) -> tuple[HereDocument, ...]:
    """The here-documents of a bash script, in order; the body is empty if the text ends before it."""
    reader = _Reader(text.replace("\r\n", "\n"))
    for _ in reader.commands():
        pass
    return tuple(reader.here_documents)


def here_document_lines(text: str) -> frozenset[int]:
    """The numbers of the lines inside here-documents, with the lines of their marks."""
    ranges = (
        range(each.line, each.line + each.body.count("\n") + 1) for each in here_documents(text)
    )
    return frozenset(number for lines in ranges for number in lines)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.parentheses = 0
        self.depends = (
            False  # the next command runs only if the one before succeeds, or only if it fails
        )
        # (mark, quoted) of the here-documents whose bodies begin on the next line
        self.opened: list[tuple[str, bool]] = []
        self.here_documents: list[HereDocument] = []

    def commands(self) -> Iterator[Command]:
        while self.position < len(self.text):
            command = self._command()
            if command is not None:
                yield command
        self._end_line()  # the last line may open a here-document

    def _skip_blanks(self) -> None:
        while match := re.compile(r"[ \t]+|\\\n").match(self.text, self.position):
            self.position = match.end()

    def _command(self) -> Command | None:
        self._skip_blanks()
        start, words, redirections, array = self.position, list[Word](), list[str](), ""
        while True:
            self._skip_blanks()
            rest = self.text[self.position : self.position + 3]
            if not rest or rest[0] == "\n" or rest[0] == "#":
                raw, ended = self.text[start : self.position], "\n"
                self._end_line()
                break
            if (
                any(word.raw == "[[" for word in words)
                and words[-1].raw != "]]"
                and rest[0] in "&|()<>"
            ):
                words.append(Word(rest[0], rest[0]))
                self.position += 1
            elif found := _REDIRECTION.match(self.text, self.position):
                redirections.append(self._redirection(found[0]))
            elif found := _OPERATOR.match(self.text, self.position):
                raw, ended = self.text[start : self.position], found[0]
                self.position = found.end()
                break
            elif rest[:2] == "((" and not words:  # in arithmetic, << does not open a here-document
                begun = self.position
                self.position -= 1
                self._nested("(")
                words.append(Word("((", self.text[begun : self.position], computed=True))
            elif rest[0] in "()":
                self.position += 1
                # neither `name()` nor the `)` after a pattern of `case` opens or closes anything
                counts = rest[:2] != "()" and (rest[0] == "(" or self.parentheses > 0)
                self.position += rest[:2] == "()"
                self.parentheses += counts * (1 if rest[0] == "(" else -1)
                self.depth += counts * (1 if rest[0] == "(" else -1)
                if words:
                    raw, ended = self.text[start : self.position], "("
                    break
            elif all(_DECLARES.fullmatch(word.raw) for word in words) and (
                found := _ARRAY_ASSIGNED.match(self.text, self.position)
            ):
                self.position = found.end()
                array = found[1]
                words = self._elements()
            else:
                words.append(self._word())
        return self._finished(words, start, raw, array, tuple(redirections), ended)

    def _finished(
        self,
        words: list[Word],
        start: int,
        raw: str,
        array: str,
        redirections: tuple[str, ...],
        ended: str,
    ) -> Command | None:
        nested, self.depends = self.depth > 0 or self.depends, ended in {"&&", "||"}
        if words and not array:
            first = words[0].raw
            if first in _CLOSING:
                self.depth = max(0, self.depth - 1)
            while words and words[0].raw in _PREFIXES:
                self.depth += words[0].raw in OPENING
                nested = nested or words[0].raw in _PREFIXES
                words = words[1:]
            if words and (
                words[0].raw in OPENING or (words[0].raw == "function" and words[-1].raw == "{")
            ):
                self.depth += 1
        if not words and not array:
            return None
        line = self.text.count("\n", 0, start) + 1
        return Command(
            tuple(words), line, raw.strip(), nested, array, redirections, ended in {"|", "|&"}
        )

    def _end_line(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end + 1
        for mark, quoted in self.opened:
            start = self.position
            last = re.compile(rf"^\t*{re.escape(mark)}$", re.M).search(self.text, start)
            self.position = len(self.text) if last is None else min(last.end() + 1, len(self.text))
            body = self.text[start : last.start() if last else None]
            self.here_documents.append(
                HereDocument(mark, quoted, self.text.count("\n", 0, start) + 1, body)
            )
        self.opened.clear()

    def _redirection(self, operator: str) -> str:
        start = self.position
        self.position += len(operator)
        self._skip_blanks()
        target = self._word()
        if operator.lstrip("0123456789") in {"<<", "<<-"}:
            mark = re.sub(r"[\\'\"]", "", target.raw)
            self.opened.append((mark, mark != target.raw))
        return self.text[start : self.position]

    def _elements(self) -> list[Word]:
        found: list[Word] = []
        while self.position < len(self.text):
            if match := re.compile(r"(?:\s|\\\n|#[^\n]*)+").match(self.text, self.position):
                self.position = match.end()
            if self.text.startswith(")", self.position):
                self.position += 1
                break
            if self.position < len(self.text):
                found.append(self._word())
        return found

    def _word(self) -> Word:
        start, pieces, marks = self.position, list[str | Variable](), set[str]()
        while (
            self.position < len(self.text)
            and (character := self.text[self.position]) not in " \t\n;&|<>()"
        ):
            if character == "'":
                pieces.append(self._until("'"))
            elif character == '"':
                self.position += 1
                self._double_quoted(pieces, marks)
            elif character == "\\":
                pieces.append(self.text[self.position + 1 : self.position + 2].replace("\n", ""))
                self.position += 2
            elif character in "$`":
                self._expansion(pieces, marks)
            elif character == "~" and self.position == start:
                pieces.append(Variable("HOME"))
                self.position += 1
            else:
                marks |= {"computed"} if character in "*?" else set()
                pieces.append(character)
                self.position += 1
        self.position += (
            self.position == start
        )  # always advance, also past a character that cannot begin a word
        raw = self.text[start : self.position]
        array = _ARRAY.fullmatch(raw.strip('"'))
        text = written(pieces)
        computed = "computed" in marks or text is None or ("array" in marks and not array)
        single = len(pieces) == 1 and isinstance(pieces[0], Variable) and raw.startswith("$")
        return Word(
            raw if text is None or computed else text,
            raw,
            computed,
            single,
            array[1] if array else "",
        )

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.position + 1)
        end = len(self.text) if end < 0 else end
        inner = self.text[self.position + 1 : end]
        self.position = end + 1
        return inner

    def _double_quoted(self, pieces: list[str | Variable], marks: set[str]) -> None:
        pieces.append("")  # "" is a word too
        while self.position < len(self.text) and (character := self.text[self.position]) != '"':
            following = self.text[self.position + 1 : self.position + 2]
            if character == "\\" and following in tuple('$`"\\\n'):
                pieces.append(following.replace("\n", ""))
                self.position += 2
            elif character in "$`":
                self._expansion(pieces, marks)
            else:
                pieces.append(character)
                self.position += 1
        self.position += 1

    def _expansion(self, pieces: list[str | Variable], marks: set[str]) -> None:
        """An expansion, which begins with a dollar sign or a backtick."""
        if found := _BRACED.match(self.text, self.position):
            pieces.append(Variable(found[1], found[2]))
            self.position = found.end()
        elif found := _HERE.match(self.text, self.position):
            pieces.append(Variable("PWD"))
            self.position = found.end()
        elif found := _ARRAY.match(self.text, self.position):
            marks.add("array")
            self.position = found.end()
        elif found := re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)").match(self.text, self.position):
            pieces.append(Variable(found[1]))
            self.position = found.end()
        elif found := re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S).match(self.text, self.position):
            pieces.append(
                found[1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")
            )
            self.position = found.end()
        elif self.text.startswith(("$(", "${"), self.position):
            marks.add("computed")
            self._nested(self.text[self.position + 1])
        elif self.text.startswith("`", self.position):
            marks.add("computed")
            self._until("`")
        elif found := re.compile(r"\$[0-9@*#?$!-]").match(self.text, self.position):
            marks.add("computed")
            self.position = found.end()
        else:
            pieces.append("$")
            self.position += 1

    def _nested(self, opening: str) -> None:
        """Skip `$(…)` or `${…}`, whatever is inside."""
        closing = {"(": ")", "{": "}"}[opening]
        self.position += 1
        depth = 0
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == "'":
                self._until("'")
                continue
            depth += (character == opening) - (character == closing)
            self.position += 1
            if depth == 0:
                return


def written(pieces: list[str | Variable]) -> str | None:
    """The EDF text of these pieces; None if EDF text cannot express them (a dollar sign directly before a variable)."""
    merged: list[str | Variable] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif piece != "":
            merged.append(piece)
    text = join(tuple(merged))
    return text if parts(text) == tuple(merged) else None
