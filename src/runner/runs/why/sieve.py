"""Which of hundreds of words stand in a piece of a log: fast, since a log says the same again and again.

Lines are compared without their digits, and each is searched once: a line of training then costs a set look-up, not
a search for every word. A line may end with a carriage return (a progress bar).
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 100_000  # shapes of lines that are remembered
_LONGEST = 512  # bytes of a shape that is remembered
LONG_LINE_BYTES = 256 << 10  # of a longer line the first and the last half of this much are searched
_NUMBERS = b"0123456789"
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")


class Sieve:
    """The words in question, and what is known of the lines seen so far."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words: dict[bytes, list[bytes]] = {}
        for word in words:
            self._words.setdefault(word.translate(None, _NUMBERS), []).append(word)
        self._known: dict[bytes, tuple[bytes, ...]] = {}

    def words_in(self, piece: bytes) -> tuple[bytes, ...]:
        """The words that may stand in a piece: all that do, and those that only differ from them in digits."""
        shapes = set(piece.translate(_LINE_ENDS, _NUMBERS).split(b"\n"))
        new = shapes - self._known.keys()
        found = {word for shape in shapes & self._known.keys() for word in self._known[shape]}
        found.update(self._learn(new))
        return tuple(sorted(word for shape in found for word in self._words[shape]))

    def _learn(self, shapes: set[bytes]) -> set[bytes]:
        text = b"\n".join(map(_ends_of_long, shapes))
        present = [word for word in self._words if word in text]
        if len(self._known) + len(shapes) > _MOST:
            self._known.clear()
        for shape in shapes:
            if len(shape) <= _LONGEST and len(self._known) < _MOST:
                self._known[shape] = tuple(word for word in present if word in shape)
        return set(present)


def _ends_of_long(line: bytes) -> bytes:
    half = LONG_LINE_BYTES // 2
    return line if len(line) <= LONG_LINE_BYTES else b"%b\n%b" % (line[:half], line[-half:])
