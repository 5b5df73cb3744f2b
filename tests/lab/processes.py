"""Start and stop the lab's daemons: only processes that carry the lab's own mark are ever signalled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "RUNNER_LAB_FOLDER"  # set in the environment of daemons, inherited by slurmstepd, never by a job's own processes


class LabError(RuntimeError):
    """A part of the lab could not be started or did not do what it must; the text holds the daemon's own words."""


def wait_until(ready: Callable[[], bool], seconds: float, what: str, pause: float = 0.02) -> None:
    """Return as soon as `ready()` is true; LabError when `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(pause)


def start_daemon(argv: Sequence[str], environ: Mapping[str, str], log: Path, folder: Path) -> None:
    """Run a program that puts itself into the background; LabError with its output when it refuses."""
    marked = {**environ, MARK: str(folder)}
    with log.open("ab") as output:
        code = subprocess.run(
            argv, env=marked, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode
    if code != 0:
        raise LabError(f"{argv[0]} ended with {code}: {log.read_text(errors='replace')[-2000:]}")


def spawn(argv: Sequence[str], environ: Mapping[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a program that stays in the foreground, in its own session, marked as the lab's."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env={**environ, MARK: str(folder)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def read_pid(path: Path) -> int | None:
    """Return the process id in a pid file, None where there is none yet."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def is_marked(pid: int, folder: Path) -> bool:
    """True when the process was started by the lab in `folder` (its start environment says so)."""
    try:
        return f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """True while the process runs; one that has ended but was not yet waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(folder: Path) -> frozenset[int]:
    """Every process of the lab in `folder`."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return frozenset(pid for pid in pids if pid != os.getpid() and is_marked(pid, folder))


def descendants(roots: Iterable[int]) -> frozenset[int]:
    """The processes below `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return frozenset(found)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """Kill at once and wait until each is gone."""
    asked = frozenset(pids)
    _signal(asked, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, asked)), 60, f"killed processes {sorted(asked)} to be gone")


def end_all(folder: Path) -> None:
    """Kill every process of the lab in `folder` and what runs below them, until none is left."""
    while ours := frozenset(filter(is_alive, marked(folder))):
        kill(descendants(ours) | ours)


def remove(folder: Path) -> None:
    """Unmount what is mounted below the folder, then remove it; LabError where something stays mounted there."""
    for target in reversed(_mounts_below(folder)):
        subprocess.run(("umount", "--lazy", target), capture_output=True, check=False)
    if left := _mounts_below(folder):
        raise LabError(f"still mounted, so nothing is removed: {', '.join(left)}")
    for _ in range(20):  # a process that is just ending may still write
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _mounts_below(folder: Path) -> list[str]:
    targets = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    return [target for target in targets if target.startswith(f"{folder}/")]


def guard(folder: Path) -> subprocess.Popen[bytes]:
    """A process of its own session that ends the lab as soon as this process has gone, even by SIGKILL."""
    return subprocess.Popen(
        (sys.executable, str(Path(__file__).with_name("guard.py")), str(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
