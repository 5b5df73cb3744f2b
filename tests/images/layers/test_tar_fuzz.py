"""Damaged layers are taken or refused, quickly, and never anything else."""

from __future__ import annotations

import random
import time

import pytest

from tests.images.sources.mutations import CASES, taken

SECONDS = 3.0
LONGEST = 5.0


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("seed", [1, random.SystemRandom().randrange(1 << 32)], ids=["fixed", "fresh"])
def test_a_damaged_layer_is_taken_or_refused(kind: str, seed: int) -> None:
    begun, number, answers = time.monotonic(), 0, {True: 0, False: 0}
    while time.monotonic() - begun < SECONDS or number <= 50 or min(answers.values()) == 0:
        number += 1
        case = CASES[kind](random.Random(f"{seed}-{number}"))
        before = time.process_time()
        try:
            answers[taken(case)] += 1
        except Exception as error:
            raise AssertionError(f"case {seed}-{number} of {kind}") from error
        assert time.process_time() - before < LONGEST, f"case {seed}-{number} of {kind}"
