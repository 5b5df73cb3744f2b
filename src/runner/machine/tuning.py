"""Tuning of this process: the C library's heap, and Python's thread switching and garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# parameters of mallopt, from glibc's malloc.h: sizes above which memory is mapped separately, and returned
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations.

    Otherwise, each buffer of 100 KiB to 1 MiB gets new pages from the kernel, which costs 5% of an import's CPU time.
    With another C library, this does nothing.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


_SWITCH_SECONDS = 0.0002


@contextmanager
def set_for_streams() -> Iterator[None]:
    """Tune Python for threads that process streams while one thread builds a large tree. Restored on exit.

    By default, threads that inflate and hash wait up to 5 ms for the thread that parses, and the garbage collector
    repeatedly scans the whole tree, which costs 10% of the time. The block must not create large reference cycles.
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
