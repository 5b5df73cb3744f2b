"""The C library's heap of this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt's names for what is taken from the system apart, and for what is given back (glibc's malloc.h)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for what is asked for next.

    Who works on one piece of 100 KiB to 1 MiB after another gets pages that are new to the system each time, else: a
    twentieth of an import's processor time. Another C library goes on as it does.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


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
