"""The login of `--on HOST` is OpenSSH's: a key and a one-time code, asked once for all verbs."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.sshd import Sshd

SEED = "00112233445566778899aabbccddeeff00112233"
CONFIG = "UsePAM yes\nKbdInteractiveAuthentication yes\nAuthenticationMethods publickey,keyboard-interactive"
pytestmark = pytest.mark.skipif(
    not (shutil.which("/usr/sbin/sshd") and shutil.which("oathtool")) or os.geteuid() != 0,
    reason="needs openssh-server, libpam-oath, oathtool and root",
)


@pytest.fixture
def host() -> Iterator[Sshd]:
    """An sshd that wants a key and a code. Its PAM service has the name of the program, so the program gets another."""
    started = Sshd(os.environ, config=CONFIG)
    program = started.folder / f"runner-test-{os.getpid()}"
    shutil.copy("/usr/sbin/sshd", program)
    users = started.folder / "users.oath"
    users.write_text(f"HOTP/T30 root - {SEED}\n")
    users.chmod(0o600)
    service = Path("/etc/pam.d") / program.name
    service.write_text(
        f"auth required pam_oath.so usersfile={users} window=10\n"
        "account required pam_permit.so\nsession required pam_permit.so\n"
    )
    started.program = str(program)
    try:
        with started:
            started.install()
            yield started
    finally:
        service.unlink()


def answer(host: Sshd, code: str, *words: str) -> tuple[int, str]:
    """Run a command line on a terminal, and type the code when it is asked for: the exit code and all output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(host.local)
        os.execvpe(host.argv()[0], host.argv(*words), host.here())
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
            if b"One-time password" in piece:
                os.write(terminal, f"{code}\n".encode())
    except OSError:  # the end of a terminal
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_key_and_a_one_time_code_are_asked_once(host: Sshd) -> None:
    done = host("--on", "lab", "status", "--site", "local", code=1)
    assert "try:     in a terminal: runner connect lab\n" in done.stderr
    totp = subprocess.run(("oathtool", "--totp", SEED), capture_output=True, text=True, check=True).stdout.strip()
    wrong = f"{(int(totp) + 1) % 10**6:06}"
    code, shown = answer(host, wrong, "connect", "lab")
    assert code == 1 and "connected" not in shown
    code, shown = answer(host, totp, "connect", "lab")
    assert code == 0 and shown.count("One-time password") == 1 and "lab: connected" in shown, shown
    for _ in range(2):
        assert "* marks the site in use" in host("--on", "lab", "site", "list", "--site", "local").stderr
    project = host.local / "project"
    (project / "jobs").mkdir(parents=True)
    (project / "jobs/hello.sh").write_text("echo hello\n")
    words = ("launch", "--site", "local", "--engine", "host", "--env", "host", "--script", "hello", "--wait")
    assert "hello\n" in host("--on", "lab", *words, cwd=project).stderr
