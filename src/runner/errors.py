"""The one error that a user is meant to see, in three parts."""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take as true; `typing` itself is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable


class RunnerError(Exception):
    """Something the user can mend: what happened, because of what, and what to try.

    `exit_code` is what the command line returns: 1 by default; a passed-on code of a child where one is meant.
    """

    def __init__(self, what: str, why: str, fix: str, *, exit_code: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        """The three parts as they are printed on stderr, continuation lines indented under their part."""
        parts = [("runner: ", self.what), ("  because: ", self.why), ("  try:     ", self.fix)]
        return "\n".join(
            label + text.strip("\n").replace("\n", "\n           ") for label, text in parts if text.strip()
        )


def unknown(kind: str, name: str, known: Iterable[str], fix: str = "") -> RunnerError:
    """The error for a name that does not exist: near-misses are suggested, all known names listed."""
    import difflib  # slow to import, and only errors need it

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    advice = f"did you mean {close[0]!r}?" if close else fix
    return RunnerError(
        f"there is no {kind} {name!r}",
        f"known: {', '.join(names)}" if names else f"no {kind} is known here",
        advice or f"give one of the known names, or a path to a {kind} of your own",
    )
