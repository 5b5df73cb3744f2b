"""Split a bash script into commands, words and here-documents, without running it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_OPERATOR = re.compile(r"\|\||&&|;;&|;;|;&|\|&|[;&|]")
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|>>|>\||<>|<&|>&|<|>)")
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\(")
_DECLARES = re.compile(r"declare|local|typeset|readonly|export|-[a-zA-Z]+")
_OPENING = ("if", "for", "while", "until", "case", "select", "{", "(")
_CLOSING = ("fi", "done", "esac", "}", ")")
_PREFIXES = ("then", "do", "else", "elif", "!", "time", "if", "while", "until", "{", "(")
_SKIPPED = re.compile(r"\\.|`[^`]*`?|\$'(?:[^'\\]|\\.)*'?|'[^']*'?", re.S)
_SKIPPED_IN_QUOTES = re.compile(r"\\.|`[^`]*`?", re.S)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
# a bare word may be a file pattern, a list in braces, or begin with the home folder
_BARE = re.compile(r"'([^']*)'|\\(.)|([^*?\[\]{}~$`\"'\\]+)", re.S)
_IN_QUOTES = re.compile(r"()\\([$`\"\\\n])|([^$`\"\\]+|\\)")
UNKNOWN = "\x01"
"""in `evaluated`, the last character of a word that only a shell can evaluate"""


@dataclass(frozen=True)
class Command:
    """One simple command."""

    words: tuple[str, ...]
    """as in the script; without redirections, and without the elements of an array that it assigns"""
    line: int
    raw: str
    nested: bool
    """it is inside a function, a loop or a condition (also behind `&&`), so it may never run, or run several times"""


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
    documents = here_documents(text)
    ranges = (range(each.line, each.line + each.body.count("\n") + 1) for each in documents)
    return frozenset(number for lines in ranges for number in lines)


def evaluated(word: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """The words that bash makes of a word of a script, if all its variables are `known`; else the word and UNKNOWN."""
    unknown = (word + UNKNOWN,)
    text, position, quoted = "", 0, False
    while position < len(word):
        if word[position] == '"':
            quoted = not quoted
            position += 1
        elif found := _VARIABLE.match(word, position):
            value = known.get(found[1] or found[2])
            if value is None or (not quoted and re.search(r"[*?\[]", value)):
                return unknown
            if not quoted and (not value or re.search(r"\s", value)):
                return tuple(value.split()) if found[0] == word else unknown
            text += value
            position = found.end()
        elif found := (_IN_QUOTES if quoted else _BARE).match(word, position):
            text += (found[1] or "") + (found[2] or "").replace("\n", "") + (found[3] or "")
            position = found.end()
        else:
            return unknown
    return (text,)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.parentheses = 0
        self.depends = False
        """the next command runs only if the one before succeeds, or only if it fails"""
        self.opened: list[tuple[str, bool]] = []
        """(mark, quoted) of the here-documents whose bodies begin on the next line"""
        self.here_documents: list[HereDocument] = []

    def commands(self) -> Iterator[Command]:
        while self.position < len(self.text):
            command = self._command()
            if command is not None:
                yield command
        self._end_line()  # the last line may open a here-document

    def _command(self) -> Command | None:
        self._skip(_BLANKS)
        start, words, is_array = self.position, list[str](), False
        while True:
            self._skip(_BLANKS)
            rest = self.text[self.position : self.position + 3]
            if not rest or rest[0] in "\n#":
                raw, ended = self.text[start : self.position], "\n"
                self._end_line()
                break
            if "[[" in words and words[-1] != "]]" and rest[0] in "&|()<>":
                words.append(rest[0])
                self.position += 1
            elif found := _REDIRECTION.match(self.text, self.position):
                self._redirection(found[0])
            elif found := _OPERATOR.match(self.text, self.position):
                raw, ended = self.text[start : self.position], found[0]
                self.position = found.end()
                break
            elif rest[:2] == "((" and not words:  # in arithmetic, << does not open a here-document
                self._nested("(")
                words.append("((")
            elif rest[0] in "()":
                self._parenthesis(rest[:2] == "()", rest[0] == "(")
                if words:
                    raw, ended = self.text[start : self.position], "("
                    break
            elif all(map(_DECLARES.fullmatch, words)) and _ARRAY.match(self.text, self.position):
                self.position = self.text.index("(", self.position)
                is_array = True
                self._elements()
            else:
                words.append(self._word())
        return self._finished(words, start, raw, is_array, ended)

    def _parenthesis(self, is_empty: bool, opens: bool) -> None:
        """Neither `name()` nor the `)` after a pattern of `case` opens or closes anything."""
        self.position += 2 if is_empty else 1
        if not is_empty and (opens or self.parentheses > 0):
            self.parentheses += 1 if opens else -1
            self.depth += 1 if opens else -1

    def _finished(
        self, words: list[str], start: int, raw: str, is_array: bool, ended: str
    ) -> Command | None:
        nested, self.depends = self.depth > 0 or self.depends, ended in {"&&", "||"}
        if words and not is_array:
            if words[0] in _CLOSING:
                self.depth = max(0, self.depth - 1)
            while words and words[0] in _PREFIXES:
                self.depth += words[0] in _OPENING
                nested = True
                words = words[1:]
            if words and (words[0] in _OPENING or (words[0] == "function" and words[-1] == "{")):
                self.depth += 1
        if not words and not is_array:
            return None
        line = self.text.count("\n", 0, start) + 1
        return Command(() if is_array else tuple(words), line, raw.strip(), nested)

    def _end_line(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end + 1
        for mark, quoted in self.opened:
            start = self.position
            last = re.compile(rf"^\t*{re.escape(mark)}$", re.M).search(self.text, start)
            self.position = len(self.text) if last is None else min(last.end() + 1, len(self.text))
            body = self.text[start : last.start() if last else None]
            line = self.text.count("\n", 0, start) + 1
            self.here_documents.append(HereDocument(mark, quoted, line, body))
        self.opened.clear()

    def _redirection(self, operator: str) -> None:
        self.position += len(operator)
        self._skip(_BLANKS)
        target = self._word()
        if operator.lstrip("0123456789") in {"<<", "<<-"}:
            mark = re.sub(r"[\\'\"]", "", target)
            self.opened.append((mark, mark != target))

    def _elements(self) -> None:
        """Skip the elements of an array, from its opening to its closing parenthesis."""
        self.position += 1
        while self.position < len(self.text):
            self._skip(re.compile(r"(?:\s|\\\n|#[^\n]*)+"))
            if self.text.startswith(")", self.position):
                self.position += 1
                return
            self._word()

    def _word(self) -> str:
        start = self.position
        while self.text[self.position : self.position + 1] not in ("", *" \t\n;&|<>()"):
            self._piece(_SKIPPED)
        if self.position == start:
            self.position += 1  # a character that cannot begin a word
        return self.text[start : self.position]

    def _piece(self, skipped: re.Pattern[str]) -> None:
        """Skip an expansion, a quoted text, an escape, or a character."""
        if self.text.startswith(("$(", "${"), self.position):
            self.position += 1
            self._nested(self.text[self.position])
        elif self.text[self.position] == '"' and skipped is _SKIPPED:
            self.position += 1
            while self.text[self.position : self.position + 1] not in ("", '"'):
                self._piece(_SKIPPED_IN_QUOTES)
            self.position += 1
        elif not self._skip(skipped):
            self.position += 1

    def _nested(self, opening: str) -> None:
        """Skip `(…)` or `{…}`, whatever is inside."""
        closing = {"(": ")", "{": "}"}[opening]
        depth = 0
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == "'":
                self._skip(_SKIPPED)
                continue
            depth += (character == opening) - (character == closing)
            self.position += 1
            if depth == 0 and character == closing:
                return

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found is not None
