"""The C library's heap of this process."""

from __future__ import annotations

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
