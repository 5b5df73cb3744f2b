"""`--on HOST`: a verb on another machine is the verb there, through a real sshd, whatever the shell and its noise."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue

import pytest

from runner.commands import on
from runner.commands.console import Console
from runner.commands.on import Lines
from runner.machine.tunnel import listener
from runner.remote import ssh
from runner.remote.host import find_host
from runner.remote.ssh import Connection
from tests.end_to_end.test_open import page
from tests.lab.slurm import SlurmLab
from tests.remote.sshd import Sshd
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    not shutil.which("/usr/sbin/sshd") or os.geteuid() != 0, reason="needs openssh-server and root"
)
HOSTILE = ["a b", "100%", "%h %C", "it's", 'say "x"', "two\nlines", "$HOME `id` \\n", "", "*", "ä\u00a0ö", "-x", "!!"]


@pytest.fixture(scope="module")
def host() -> Iterator[Sshd]:
    with Sshd(os.environ) as started:
        started.install()
        yield started


def over_ssh(host: Sshd, command: str) -> subprocess.CompletedProcess[str]:
    """The same command by plain ssh, over the same connection."""
    argv = ("ssh", "-o", f"ControlPath={host.folder}/runner-%C", "lab", command)
    return subprocess.run(argv, env=host.here(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words", [("--on", "lab", "site", "list"), ("env", "check", "--list", "--on=lab"), ("why", "--on", "lab", "x")]
)
def test_a_verb_answers_as_over_plain_ssh(host: Sshd, words: tuple[str, ...]) -> None:
    """stdout, stderr and the exit code are the same."""
    plain = [word for word in words if word not in ("--on", "lab", "--on=lab")]
    here, there = host(*words, code=None), over_ssh(host, f"runner {' '.join(plain)}")
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash", "/usr/bin/fish", "/usr/bin/zsh"])
def test_arguments_reach_the_verb_unchanged_in_every_shell(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"not on this machine: {shell}")
    with Sshd(os.environ, shell=f"{shell}") as host:
        program = host.home / "bin/runner"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:] if sys.argv[1] != '--version' else 'runner 0.1.0')\n"
        )
        program.chmod(0o755)
        assert host("--on", "lab", "status", *HOSTILE[:-2]).stdout == f"{['status', *HOSTILE[:-2]]}\n"
        assert host("--on", "lab", "shell", "--", *HOSTILE).stdout == f"{['shell', '--', *HOSTILE]}\n"


def test_what_a_start_up_file_and_a_banner_print_is_dropped() -> None:
    with Sshd(os.environ, config="Banner /etc/os-release", shell="/tmp/noisy-shell-of-the-test") as host:
        host.install()
        noisy = host.folder / "noisy"
        noisy.write_text('#!/bin/sh\necho WELCOME; printf "no line end" ; echo trouble >&2\nexec /bin/sh "$@"\n')
        noisy.chmod(0o755)
        login = host.folder / "login"
        login.write_text(login.read_text().replace("/tmp/noisy-shell-of-the-test", str(noisy)))
        done = host("--on", "lab", "site", "list", "--site", "local")
        assert done.stdout == host("site", "list", "--site", "local").stdout
        assert "trouble" not in done.stderr and "PRETTY_NAME" not in done.stderr


def test_without_a_terminal_a_needed_prompt_is_one_line_that_names_the_command(host: Sshd) -> None:
    with Sshd(os.environ) as closed:
        (closed.folder / "authorized").write_text("")
        done = closed("--on", "lab", "status", code=1)
        assert "try:     in a terminal: runner connect lab\n" in done.stderr and not done.stdout


def test_an_expired_certificate_is_named_with_the_command_that_renews_it() -> None:
    """Found by itself beside the key of ssh's configuration, or named in the host file."""
    with Sshd(os.environ) as closed:
        (closed.folder / "authorized").write_text("")
        keygen = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", closed.folder / "ca")
        subprocess.run(keygen, check=True)
        sign = ("ssh-keygen", "-q", "-s", closed.folder / "ca", "-I", "me", "-n", "root")
        subprocess.run((*sign, "-V", "-2d:-200m", closed.folder / "user.pub"), check=True)
        found = closed("--on", "lab", "status", code=1).stderr
        assert f"the certificate {closed.folder}/user-cert.pub expired 3 h ago" in found
        assert "try:     get a new certificate, then: runner connect lab" in found
        hosts = closed.local / ".config/runner/hosts"
        hosts.mkdir(parents=True)
        (hosts / "near.toml").write_text(
            f'host = "lab"\n[login]\ncertificate = "{closed.folder}/user-cert.pub"\nrenew = "cscs-key sign"\n'
        )
        assert "try:     cscs-key sign\n" in closed("--on", "near", "status", code=1).stderr
        subprocess.run((*sign, "-V", "-2d:+1d", closed.folder / "user.pub"), check=True)
        assert "runner connect near\n" in closed("--on", "near", "status", code=1).stderr
        (hosts / "near.toml").write_text("[login]\nrenw = 'x'\n")
        assert "did you mean 'renew'?" in closed("--on", "near", "status", code=1).stderr


def test_another_version_is_refused_and_a_missing_one_is_named() -> None:
    with Sshd(os.environ) as host:
        host.install(version="0.0.9")
        assert "lab has runner 0.0.9, this machine has runner 0." in host("--on", "lab", "status", code=1).stderr
        (host.home / "bin/runner").unlink()
        assert "runner is not installed on lab" in host("--on", "lab", "status", code=1).stderr
        hosts = host.local / ".config/runner/hosts"
        hosts.mkdir(parents=True)
        (hosts / "near.toml").write_text('host = "lab"\nfolder = "${HOME}/else"\n')
        told = host("--on", "near", "status", code=1).stderr
        assert "try:     runner connect near --install\n" in told, "it installs in the folder of the host file"


def test_one_session_at_a_time_is_enough(tmp_path: Path) -> None:
    """Some sites set MaxSessions 1: what is sent before the verb, and the verb, are one after the other."""
    with Sshd(os.environ, config="MaxSessions 1") as host:
        host.install()
        (tmp_path / "runner.toml").touch()
        words = ("launch", "--site", "local", "--engine", "host", "--env", "host", "--", "true")
        name = host("--on", "lab", *words, cwd=tmp_path).stdout.strip()
        assert name in host("--on", "lab", "status", "--site", "local", cwd=tmp_path).stdout


def test_two_users_of_one_configuration_have_sockets_of_their_own() -> None:
    """Each in the user's own folder, where no other user can connect to it."""
    with Sshd(os.environ) as host:
        host.install()
        for user in ("one", "two"):
            folder = host.folder / user
            folder.mkdir(mode=0o700)
            mine = {"XDG_RUNTIME_DIR": str(folder)}
            host("--on", "lab", "site", "list", extra_environ=mine)
            (socket_file,) = folder.glob("runner-*")
            assert socket_file.stat().st_mode & 0o077 == 0
            host("connect", "lab", "--close", extra_environ=mine)


def test_ctrl_c_reaches_the_verb(host: Sshd) -> None:
    program = host.home / "bin/runner"
    before = program.read_text()
    try:
        program.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && { echo runner 0.1.0; exit; }\n'
            "trap 'echo heard; exit 130' INT; echo begun; while :; do sleep 0.05; done\n"
        )
        argv = host.argv("--on", "lab", "watch")
        child = subprocess.Popen(argv, env=host.here(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert child.stdout and child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert (child.stdout.read(), child.wait(20)) == ("heard\n", 130)
    finally:
        program.write_text(before)


@pytest.mark.parametrize("words", [("status", "--on"), ("--on=", "status")])
def test_a_missing_name_is_a_usage_error(host: Sshd, words: tuple[str, ...]) -> None:
    assert "--on has no host" in host(*words, code=2).stderr


def test_a_host_file_gives_the_address_and_the_site(host: Sshd) -> None:
    folder = host.local / ".config/runner/hosts"
    folder.mkdir(parents=True)
    (folder / "daint.toml").write_text('host = "lab"\nsite = "alps-daint"\n')
    assert "* marks the site in use (RUNNER_SITE)" in host("--on", "daint", "site", "list").stderr
    (folder / "far.toml").write_text('host = "root@host.invalid"\n')
    assert "cannot connect to far\n" in host("connect", "far", code=1).stderr
    (folder / "far.toml").unlink()
    (folder / "daint.toml").write_text("hsot = 'lab'\n")
    assert "hsot" in host("--on", "daint", "status", code=None).stderr
    assert host("completion", "words", "--", "--on", "").stdout == "daint\n"


def test_a_host_file_names_the_key_which_ssh_would_not_try_by_itself() -> None:
    with Sshd(os.environ) as host:
        host.install()
        key, config = host.local / "a key.pem", host.folder / "config"
        (host.folder / "user").rename(key)
        config.write_text(config.read_text().replace(f"IdentityFile {host.folder}/user\n", ""))
        hosts = host.local / ".config/runner/hosts"
        hosts.mkdir(parents=True)
        (hosts / "near.toml").write_text('host = "lab"\nsite = "local"\n')
        assert "near refuses the login" in host("--on", "near", "site", "list", code=1).stderr
        (hosts / "near.toml").write_text(f'host = "lab"\nsite = "local"\n[login]\nkey = "{key}"\n')
        assert "* marks the site in use" in host("--on", "near", "site", "list").stderr
        host("connect", "near", "--close")


def test_the_folder_of_a_host_file_is_below_the_home_there_or_absolute(host: Sshd) -> None:
    hosts = host.local / ".config/runner/hosts"
    hosts.mkdir(parents=True, exist_ok=True)
    (host.local / "it.toml").write_text("[env]\n")
    try:
        for text, place in (("~/a b", host.home / "a b"), (str(host.folder / "c"), host.folder / "c")):
            (hosts / "near.toml").write_text(f'host = "lab"\nsite = "local"\nfolder = "{text}"\n')
            host("--on", "near", "env", "show", "./it.toml", code=None)
            assert [*place.glob("code/*/**/it.toml")] and not (host.home / "~").exists()
        for text, word in (("copies", "absolute path"), ("${SCRATCH:-/tmp}/x", "`folder` of the host file")):
            (hosts / "near.toml").write_text(f'host = "lab"\nfolder = "{text}"\n')
            assert word in host("--on", "near", "status", code=None).stderr
    finally:
        shutil.rmtree(hosts)


def test_logs_go_on_after_the_connection_was_cut(host: Sshd) -> None:
    """No line is lost, and none comes twice, although it was cut five times."""
    script = 'n=0; until [ -e "$RUNNER_RUN/stop" ]; do n=$((n + 1)); echo "line $n"; sleep 0.1; done'
    launch = ("launch", "--site", "local", "--engine", "host", "--env", "host", "--", "sh", "-c", script)
    run = host("--on", "lab", *launch).stdout.strip()
    argv = host.argv("--on", "lab", "logs", "-f", "--site", "local", run)
    shown, told = host.local / "shown", host.local / "told"

    def lines() -> list[str]:
        return [line for line in shown.read_text().splitlines() if line.startswith("line ")]

    with shown.open("w") as output, told.open("w") as errors:
        child = subprocess.Popen(argv, env=host.here(), stdout=output, stderr=errors)
        for cut in range(5):
            seen = len(lines())
            until(lambda seen=seen: len(lines()) > seen)  # type: ignore[misc]
            host.drop()
            until(lambda cut=cut: told.read_text().count("; reconnecting") > cut)  # type: ignore[misc]
        seen = len(lines())
        until(lambda: len(lines()) > seen)
        (folder,) = host.home.rglob(f"runs/{run}")
        (folder / "stop").touch()
        assert child.wait(timeout=180) == 0, told.read_text()
    assert lines() == [f"line {n}" for n in range(1, len(lines()) + 1)]


def test_progress_bars_and_a_last_line_without_an_end_are_shown_once() -> None:
    shown = BytesIO()
    output = Lines(shown)
    output.write(b"one\r\n 10%\r 2")
    assert shown.getvalue() == b"one\r\n 10%\r"
    output.begin_again()
    output.write(b"one\r\n 10%\r 20%\rdone")
    assert shown.getvalue() == b"one\r\n 10%\r 20%\r"
    output.end()
    assert shown.getvalue() == b"one\r\n 10%\r 20%\rdone"


def test_the_status_of_all_hosts(host: Sshd) -> None:
    folder = host.local / ".config/runner/hosts"
    shutil.rmtree(folder, ignore_errors=True)
    assert "there is no file" in host("status", "--on", "all", code=2).stderr
    folder.mkdir(parents=True)
    (folder / "near.toml").write_text('host = "lab"\nsite = "local"\n')
    (folder / "far.toml").write_text('host = "nobody@host.invalid"\n')
    launch = ("launch", "--site", "local", "--engine", "host", "--env", "host", "--name", "first", "--", "true")
    name = host("--on", "lab", *launch).stdout.strip()
    done = host("status", "--on", "all", code=1)
    far, near = done.stdout.index("far:"), done.stdout.index("near:")
    assert far < near < done.stdout.index(name) and "far: runner: cannot connect" in done.stderr
    answers = json.loads(host("status", "--on", "all", "--json", code=1).stdout)
    assert answers["far"] is None and name in [each["run"] for each in answers["near"]]
    done = host("status", "--on", "far", "--on=near", code=1)
    assert done.stdout.index("far:") < done.stdout.index("near:") < done.stdout.index(name)
    assert "`runner logs` can ask only one host at a time" in host("logs", "--on", "all", code=2).stderr
    assert (
        "`runner launch` can ask only one host at a time"
        in host("launch", "--on", "far", "--on", "near", code=2).stderr
    )
    shutil.rmtree(folder)


def test_a_host_that_hangs_is_named_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\n[ "$5" != slow ] || exec sleep 60\necho run of $5\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(on, "_PATIENCE_SECONDS", 3)
    assert on.run_on(("near", "slow"), ("status",), argparse.Namespace(verb="status", json=False), Console()) == 1
    shown = capsys.readouterr()
    assert shown.out == "near:\nrun of near\nslow:\n  no answer\n" and "slow: no answer: it did not end" in shown.err


def test_a_file_of_the_project_that_has_our_name_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text("print('not ours')\n")
    words = (sys.executable, "-P", "-m", "runner", "status", "--on", "a@host.invalid", "--on", "b@host.invalid")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "not ours" not in done.stdout and done.stderr.count("cannot connect") == 2, done


def test_which_host_would_start_a_job_and_when(plain_slurm: SlurmLab) -> None:
    """One table, so that the user picks the cluster; nothing is submitted."""
    with Sshd(plain_slurm.environ) as host:
        host.install()
        words = ("launch", "--dry-run", "--ask", "--env", "host", "--engine", "host", "--time", "5")
        there = ("--on", "lab", "--on", "nobody@host.invalid", "--site", "generic-slurm")
        done = host(*words, *there, "--", "true")
        header, first, second = done.stdout.splitlines()
        assert header.split() == ["HOST", "SITE", "ACCEPTED", "START", "NODES", "WHY"]
        assert first.split()[:3] == ["lab", "generic-slurm", "yes"] and "nid00" in first
        assert second.split()[:4] == ["nobody@host.invalid", "-", "no", "answer"] and "host.invalid: " in done.stderr
        found = json.loads(host(*words, "--partition", "none", *there, "--json", "--", "true", code=1).stdout)
        assert found["lab"]["accepted"] is False and "partition" in found["lab"]["why"]
        assert found["nobody@host.invalid"] is None
        assert plain_slurm.run(("squeue", "--noheader", "--states=all", "--name=true")).stdout == ""
        assert "--ask is given without --dry-run" in host("launch", "--ask", "--", "true", code=2).stderr


def test_through_a_jump_host_with_a_second_of_latency(host: Sshd) -> None:
    """A verb over the open connection waits for at most two round trips more than the same verb nearby.

    A round trip is so long that what the machine does beside it does not change the count.
    """
    with Sshd(os.environ) as jump, slow(host.port, 0.5) as port:
        host.write_client("ProxyJump jump\nHost jump\nHostName 127.0.0.1\n"
                          f"Port {jump.port}\nIdentityFile {jump.folder}/user\nStrictHostKeyChecking no\n"
                          f"UserKnownHostsFile /dev/null\nProxyJump none\n", port)  # fmt: skip
        try:
            (jump.folder / "login").write_text("#!/bin/sh\nexit 1\n")
            host("connect", "lab", "--close")
            host("--on", "lab", "site", "list")
            far = seconds(host, "--on", "lab", "site", "list")
        finally:
            host("connect", "lab", "--close")
            host.write_client()
    host("--on", "lab", "site", "list")
    assert far - seconds(host, "--on", "lab", "site", "list") < 3


def seconds(host: Sshd, *words: str) -> float:
    """The shortest of three runs of a command line: other tests run at the same time."""
    durations = []
    for _ in range(3):
        begun = time.monotonic()
        host(*words)
        durations.append(time.monotonic() - begun)
    return min(durations)


@contextmanager
def slow(port: int, seconds: float) -> Iterator[int]:
    """A relay to a port of this machine that passes on each piece, in both directions, this much later."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

        def send() -> None:
            while True:
                due, data = queue.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with suppress(OSError):
                    sink.sendall(data) if data else sink.shutdown(socket.SHUT_WR)
                if not data:
                    return

        threading.Thread(target=send, daemon=True).start()
        data = b"-"
        while data:
            data = b""
            with suppress(OSError):
                data = source.recv(1 << 16)
            queue.put((time.monotonic() + seconds, data))

    def accept() -> None:
        with suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.create_connection(("127.0.0.1", port))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


def test_open_prints_a_url_of_this_machine(host: Sshd) -> None:
    """The page of a server there has a port here, for as long as the verb lasts; the browser is the one here."""
    program = host.home / "bin/openvscode-server"
    program.write_text(SERVER)
    program.chmod(0o755)
    browser = host.local / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" >{host.local}/opened\n')
    browser.chmod(0o755)
    words = ("open", "--on", "lab", "code", "host", "--site", "local", "--engine", "host", "--browser")
    environ = {**host.here(), "BROWSER": str(browser)}
    log = host.folder / "open.log"
    with log.open("w") as errors:
        child = subprocess.Popen(host.argv(*words), env=environ, cwd=host.local, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=errors, text=True)  # fmt: skip
    try:
        assert child.stdout
        url = child.stdout.readline().strip()
        assert page(url) == (200, "the page of the server"), log.read_text()
        (state,) = host.home.glob("runs/code-*/open/code")
        token = (state / "token").read_text().strip()
        assert url.endswith(f"/?tkn={token}")
        until((host.local / "opened").exists, "the browser")
        assert token not in (host.local / "opened").read_text() and not (state / "page.html").exists()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        with pytest.raises(OSError):
            page(url)
    finally:
        child.kill()
        host("--on", "lab", "cancel", "--site", "local", "last", code=None)


def test_a_port_that_is_taken_in_the_last_moment_is_not_used(host: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that takes the chosen port before ssh does cannot be ordered: the choice is a port in use."""
    for name, value in host.here().items():
        monkeypatch.setenv(name, value)
    connection = Connection(find_host("lab", os.environ), os.environ)
    connection.open(terminal=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = [(socket.socket(), port)]
        monkeypatch.setattr(ssh, "listener", lambda port: found.pop() if found else listener(port))
        forward = connection.forward(port)
        assert not found and not forward.startswith(f"127.0.0.1:{port}:") and forward.endswith(f":{port}")
        with socket.create_connection(("127.0.0.1", int(forward.split(":")[1])), timeout=60):
            taken.settimeout(60)
            taken.accept()[0].close()
        connection.cancel(forward)


SERVER = """#!/usr/bin/python3
import http.server, os, socketserver, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
token = open(options["--connection-token-file"]).read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.client_address = ("", 0)
        self.send_response(200 if self.path.endswith(f"?tkn={token}") else 403)
        self.end_headers()
        self.wfile.write(b"the page of the server")
    def log_message(self, *words): pass
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): pass
Server(options["--socket-path"], Handler).serve_forever()
"""


def test_connect_opens_and_closes_the_connection(host: Sshd) -> None:
    assert "connected" in host("connect", "lab").stderr
    assert len(list(host.folder.glob("runner-*"))) == 1
    assert "closed" in host("connect", "lab", "--close").stderr
    assert not list(host.folder.glob("runner-*"))


def test_a_verb_is_one_session_over_the_open_connection(host: Sshd) -> None:
    """As plain ssh is: it costs neither another login nor a question before it."""
    host("--on", "lab", "status", "--site", "local")
    login, sessions = host.folder / "login", host.folder / "sessions"
    before = login.read_text()
    login.write_text(before.replace("\n", f"\necho session >>{sessions}\n", 1))
    try:
        host("--on", "lab", "status", "--site", "local")
        assert sessions.read_text() == "session\n"
    finally:
        login.write_text(before)


def test_a_runtime_folder_that_is_gone_is_not_used(host: Sshd) -> None:
    gone = {"XDG_RUNTIME_DIR": "/run/user/gone"}
    try:
        assert "lab: connected" in host("connect", "lab", extra_environ=gone).stderr
        assert [*(host.local / ".ssh").glob("runner-*")]
    finally:
        host("connect", "lab", "--close", extra_environ=gone)


def test_connect_does_not_end_what_runs_over_the_connection(host: Sshd) -> None:
    """A shell of the user, `runner logs -f`: they go on, and later commands use the new connection."""
    host("connect", "lab")
    argv = ("ssh", "-o", f"ControlPath={host.folder}/runner-%C", "lab", "echo begun; read word; echo got $word")
    with subprocess.Popen(argv, env=host.here(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdin and session.stdout
        assert session.stdout.readline() == "begun\n"
        host("connect", "lab")
        assert over_ssh(host, "echo hello").stdout == "hello\n"
        session.stdin.write("it\n")
        session.stdin.close()
        assert session.stdout.read() == "got it\n"
    assert session.returncode == 0
    assert over_ssh(host, "echo hello").stdout == "hello\n"
