"""How Python itself works in this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 0.0002


@contextmanager
def set_for_streams() -> Iterator[None]:
    """Python set for threads that work on streams while one of them makes a tree of many objects; as before after it.

    Else threads that inflate and hash wait 5 ms for the one that parses, and the search for cycles goes through the
    whole tree again and again, a tenth of the time that it takes to make it. Whoever is inside makes no cycles that
    hold much.
    """
    interval, collecting = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collecting:
            gc.enable()
