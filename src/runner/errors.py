"""The one error that users see, in three parts."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers read this as true; `typing` itself is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable


class RunnerError(Exception):
    """An error that the user can fix: what happened, why, and what to try.

    `exit_code` is what the command line returns: 1 by default; or the exit code of a child process.
    """

    def __init__(self, what: str, why: str, fix: str, *, exit_code: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        """The three parts as printed on stderr, continuation lines indented under their part."""
        parts = [("runner: ", self.what), ("  because: ", self.why), ("  try:     ", self.fix)]
        return "\n".join(
            label + text.strip("\n").replace("\n", "\n           ")
            for label, text in parts
            if text.strip()
        )


def unknown(
    kind: str,
    name: str,
    known: Iterable[str],
    fix: str = "",
    place: object = None,
    *,
    is_file: bool = False,
) -> RunnerError:
    """The error for a name that does not exist. It suggests a similar name and lists all known names.

    `place` is the line of the file that contains the name. `is_file`: the user may give a path instead.
    """
    names = sorted(known)
    of_part = [each for each in names if name in each.split("-")]  # `clariden` of alps-clariden
    close = nearest(name, names, 0.6) or (of_part[0] if len(of_part) == 1 else None)
    advice = f"did you mean {close!r}?" if close else fix
    own = f", or the path of your own {kind}" if is_file else ""
    return RunnerError(
        f"{place}: there is no {kind} {name!r}" if place else f"there is no {kind} {name!r}",
        f"the known names are {', '.join(names)}" if names else f"no {kind} is available here",
        advice or f"use one of the known names{own}",
    )


def nearest(word: str, known: Iterable[str], cutoff: float) -> str | None:
    """The most similar of the known words.

    None if all are less similar than `cutoff`, from 0 to 1, or differ in more than a third of the letters.
    """
    import difflib  # slow to import, and only errors need it

    close = next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
    most = max(1, len(word.lstrip("-")) // 3)
    return close if close is not None and _edits(word, close) <= most else None


def _edits(one: str, other: str) -> int:
    """The edit distance of two words: letters to add, remove, replace, or swap with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, b in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                least = min(least, earlier[j - 2] + 1)
            row.append(least)
    return row[-1]
