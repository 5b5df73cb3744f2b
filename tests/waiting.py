"""Waiting for an event: a limit ends a test that would hang, and says nothing about speed."""

import time
from collections.abc import Callable

SECONDS = 120.0


def until(condition: Callable[[], object], what: str = "what the test waits for", seconds: float = SECONDS) -> None:
    """Return as soon as the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)
