"""A process of ours is told from a later one with its number, and a session is ended whole, and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from runner.machine import sessions
from tests.waiting import until


def start(code: str) -> "subprocess.Popen[str]":
    """A Python program in a session of its own, which says when it is ready."""
    child = subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_identity_tells_processes_apart_and_ends_with_them() -> None:
    one = start("print('ready', flush=True); import time; time.sleep(60)")
    two = start("print('ready', flush=True); import time; time.sleep(60)")
    assert sessions.identity(one.pid) == sessions.identity(one.pid) != ""
    assert sessions.identity(one.pid) != sessions.identity(two.pid) or one.pid != two.pid
    for child in (one, two):
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert sessions.identity(one.pid) == "", "a zombie counts as ended"
    one.wait()
    two.wait()
    assert sessions.identity(one.pid) == ""


def test_end_takes_orphans_along_and_leaves_others_alone() -> None:
    """The leader has gone before; a grandchild is still of its session. Another session is not touched."""
    other = start("print('ready', flush=True); import time; time.sleep(60)")
    gone = start("import subprocess; subprocess.Popen(['sleep', '60']); print('ready', flush=True)")
    gone.wait()
    assert len(sessions.members(gone.pid)) == 1
    assert sessions.end(gone.pid, 60)
    assert sessions.members(gone.pid) == ()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    stubborn = start(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    threading.Thread(target=stubborn.wait).start()  # so that no zombie stays
    started = time.monotonic()
    assert sessions.end(stubborn.pid, 0.5)
    assert time.monotonic() - started > 0.4
    until(lambda: stubborn.returncode is not None)
    assert stubborn.returncode == -signal.SIGKILL


def test_ctrl_c_is_held_back_until_the_block_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), sessions.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("still here")
    assert done == ["still here"]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
