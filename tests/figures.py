"""What goes with figures: the machine that they were measured on, and a table of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def machine(folder: Path) -> dict[str, str]:
    """Processor, cores, kernel, memory and disk that figures were measured on."""
    text = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in text if line.startswith("model name")), os.uname().machine)
    device = folder.stat().st_dev
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    disk = [words for words in mounts if words[2] == f"{os.major(device)}:{os.minor(device)}"]
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": os.uname().release,
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "disk": f"{disk[0][disk[0].index('-') + 1]} on {disk[0][disk[0].index('-') + 2]}" if disk else "unknown",
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
