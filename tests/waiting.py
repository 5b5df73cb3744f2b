"""Waiting for an event: a limit ends a test that would hang, and says nothing about speed."""

import subprocess
import sys
import time
from collections.abc import Callable

SECONDS = 120.0


def until(condition: Callable[[], object], what: str = "what the test waits for", seconds: float = SECONDS) -> None:
    """Return as soon as the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)


def slowness() -> float:
    """How many times longer Python takes to start just now than on an idle machine (0.02 s); at least 1."""
    begun, times = time.monotonic(), 10
    for _ in range(times):
        subprocess.run((sys.executable, "-S", "-c", ""), check=True)
    return max(1.0, (time.monotonic() - begun) / times / 0.02)
