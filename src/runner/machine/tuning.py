"""The C library's heap of this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt's names for what is taken from the system apart, and for what is given back (glibc's malloc.h)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations.

    Who works on one piece of 100 KiB to 1 MiB after another gets pages that are new to the system each time, else: a
    twentieth of an import's processor time. Other C libraries are left as they are.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


_SWITCH_SECONDS = 0.0002


@contextmanager
def set_for_streams() -> Iterator[None]:
    """Settings of Python for threads that process streams while one of them builds a large tree; restored afterwards.

    By default, threads that inflate and hash wait 5 ms for the one that parses, and the cycle collector scans the whole
    tree repeatedly, a tenth of the time that building it takes. The block must not create large reference cycles.
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
