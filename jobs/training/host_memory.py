"""Memory of the node that this process may still use."""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 1 << 60


def free_bytes() -> int:
    """Return what is free on the node, or in this process's control group if that is less."""
    free = UNKNOWN
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = control_group()
    return free if group is None else max(0, min(free, group[0] - group[1]))


def control_group() -> tuple[int, int] | None:
    """Return limit and use in bytes of this process's control group (v2 or v1); None if it has no limit."""
    for limit, used in _files():
        try:
            text = limit.read_text(encoding="ascii").strip()
            if text.isdigit() and int(text) < UNKNOWN:
                return int(text), int(used.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def _files() -> list[tuple[Path, Path]]:
    """Return the files of limit and use, those of the innermost group first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    root, found = Path("/sys/fs/cgroup"), []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder = root / path.lstrip("/")
            found.append((folder / "memory.max", folder / "memory.current"))
        elif "memory" in controllers.split(","):
            folder = root / "memory" / path.lstrip("/")
            found.append((folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"))
    return [*found, (root / "memory.max", root / "memory.current")]
