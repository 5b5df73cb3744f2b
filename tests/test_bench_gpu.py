"""bench.gpu: the figures of its tables."""

from bench.gpu import WARM, tokens_per_second


def test_tokens_per_second_are_those_of_all_counted_steps_together() -> None:
    """With padding, a short step has few tokens and few seconds: the quotient of the medians would be 100."""
    ways = {"tokens": [0] * WARM + [100, 100, 1000], "seconds": [9.0] * WARM + [1.0, 1.0, 2.0]}
    assert tokens_per_second(ways) == 1200 / 4.0
