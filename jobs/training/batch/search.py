"""The order in which micro batches are tried: doubling, then bisection, over those that keep the global batch.

A process that has taken several tries is not quite like a fresh one, so a failure counts only as the first try of its
process; one that comes later is tried again at the head of the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Search:
    candidates: tuple[int, ...]  # divisors of the sequences that a process takes per step, ascending
    fits: int = 0  # the largest that has fitted
    fails: int | None = None  # the smallest that has failed in a fresh process
    doubtful: int | None = None  # failed after others in the same process

    def next_round(self) -> tuple[int, ...]:
        """Return what one process is to try, in this order, until one fails; nothing when the answer is known."""
        left = [one for one in self.candidates if one > self.fits and (self.fails is None or one < self.fails)]
        if not left:
            return ()
        if self.doubtful in left:
            return doubling(left, left.index(self.doubtful))
        if self.fails is None:
            at_least = 2 * self.fits
            return doubling(left, next((index for index, one in enumerate(left) if one >= at_least), len(left) - 1))
        return (left[len(left) // 2],)

    def after(self, round_: Sequence[int], fitted: int) -> Search:
        """Return the search once the first `fitted` of a round have fitted, and the next, if any, has not."""
        found = replace(self, fits=max(self.fits, *round_[:fitted]), doubtful=None) if fitted else self
        if fitted == len(round_):
            return found
        failed = round_[fitted]
        return replace(found, fails=failed, doubtful=None) if fitted == 0 else replace(found, doubtful=failed)


def divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def doubling(numbers: Sequence[int], start: int) -> tuple[int, ...]:
    """Return numbers[start] and then, of the ascending numbers, always the first that is at least twice the last."""
    chosen = [numbers[start]]
    for one in numbers[start:]:
        if one >= 2 * chosen[-1]:
            chosen.append(one)
    return tuple(chosen)
