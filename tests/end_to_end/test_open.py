"""`runner open`: one URL; the token and the server are out of other users' reach; the server ends with its job."""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need
from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.browser import Browser
from tests.lab.plugins import cache_folder
from tests.lab.slurm import SlurmLab
from tests.waiting import until

# in place of VS Code's server: the same options, and a page for those who know the token
SERVER = """#!/usr/bin/python3
import http.server, os, socketserver, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
token = open(options["--connection-token-file"]).read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.client_address = ("", 0)
        known = self.path.endswith(f"?tkn={token}")
        body = f"{os.environ['FROM_EDF']} {os.getcwd()} {'x' * 300_000}" if known else "no"
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *words): pass
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): pass
Server(options["--socket-path"], Handler).serve_forever()
"""


class Opened:
    """A `runner open` that goes on, its URL and what it has said."""

    def __init__(self, runner: Runner, *words: str) -> None:
        began = time.monotonic()
        self.errors = runner.project / f"open-{began}.txt"
        with self.errors.open("w") as errors:
            self.process = runner.start("open", *words, stderr=errors)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.seconds = time.monotonic() - began
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\S*=[0-9a-f]{48}", self.url), self.said
        self.token = self.url.rpartition("=")[2]

    @property
    def said(self) -> str:
        return self.errors.read_text()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def page(url: str) -> tuple[int, str]:
    """(status, text) of a page."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def opened(runner: Runner, *words: str) -> Iterator[Opened]:
    found = Opened(runner, *words)
    try:
        yield found
    finally:
        found.end()


@pytest.fixture
def coded(cluster: Runner, slurm: SlurmLab, python_sqsh: Path) -> Runner:
    """The cluster, with an environment that has the server on PATH."""
    if not slurm.plugins:
        pytest.skip("this Slurm has no container plug-in")
    tools = cluster.project / "tools"
    write(tools, {"openvscode-server": SERVER})
    (tools / "openvscode-server").chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "FROM_EDF": "edf"}
    write(cluster.project, {"edf/py.toml": environment(python_sqsh, (f"{tools}:{tools}",), env)})
    return cluster


def socket_of(folder: Path) -> Path:
    return Path((folder / "open/code/server").read_text().split()[2]) / "socket"


def test_a_server_in_an_environment(coded: Runner, slurm: SlurmLab) -> None:
    """One URL with the environment's variables in the user's folder; the token is nowhere else; others stay out."""
    words = ("code", "py", "--engine", "ce", "--time", "20")
    with opened(coded, *words) as first:
        folder = coded.runs / "code-0001"
        status, text = page(first.url)
        assert status == 200 and text.startswith(f"edf {coded.project} xxx") and len(text) > 300_000
        assert page(first.url.replace(first.token, "0" * 48)) == (403, "no")
        # nobody else learns the token
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not any(first.token.encode() in command for command in commands)
        job = coded.status("code-0001")["job_id"]
        assert first.token not in slurm.run(("scontrol", "show", "job", "-dd", job)).stdout
        holders = [path for path in folder.rglob("*") if path.is_file() and first.token in path.read_text("latin-1")]
        assert holders == [folder / "open/code/token"] and first.token not in first.said
        assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "open/code").stat().st_mode) == 0o700
        # or reaches the socket
        path = socket_of(folder)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        if os.geteuid() == 0:
            other = "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
            connect = f"{other}; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
            done = subprocess.run((sys.executable, "-c", connect), capture_output=True, text=True)
            assert "PermissionError" in done.stderr
        # again: the same server, token and job
        with opened(coded, *words) as again:
            assert again.token == first.token and page(again.url)[0] == 200
        assert first.end() and page_is_gone(first)
    with opened(coded, *words) as third:
        assert third.url == first.url and len(list(coded.runs.glob("code-*"))) == 1
        # a tunnel that dies is reported, also by the pages that are open, and the server goes on
        steps = subprocess.run(("pgrep", "-f", f"tunnel.py {path}"), capture_output=True, text=True).stdout.split()
        for pid in steps:
            os.kill(int(pid), 9)
        until(lambda: "the tunnel has ended" in third.said, "the report")
        assert page(third.url)[0] == 502 and "The tunnel to the server has ended" in page(third.url)[1]
        assert third.process.wait(60) == 1 and "the same command connects again" in third.said
    with opened(coded, *words) as fourth:
        assert page(fourth.url)[0] == 200
        coded("cancel", "code-0001")
        assert fourth.process.wait(60) == 1 and "code-0001 is not running" in fourth.said
    until(lambda: not path.parent.exists(), "the private folder to go")
    assert not (folder / "open/code/server").exists()


@pytest.mark.slow
def test_twenty_starts_and_stops_leave_nothing(coded: Runner, slurm: SlurmLab) -> None:
    """Ten new runs, each opened twice: no process, no socket, no step and no job is left."""
    before = set(Path("/dev/shm").glob("runner-open.*"))
    for number in range(1, 11):
        for _ in range(2):
            with opened(coded, "code", "py", "--engine", "ce", "--time", "20") as found:
                assert page(found.url)[0] == 200
            assert page_is_gone(found)
        coded("cancel", f"code-{number:04}")
    until(lambda: set(Path("/dev/shm").glob("runner-open.*")) == before, "the private folders to go")
    until(lambda: not slurm.run(("squeue", "--noheader", "--format=%i")).stdout, "the jobs to end")
    until(lambda: subprocess.run(("pgrep", "-f", str(coded.project)), capture_output=True).returncode == 1, "processes")


def page_is_gone(found: Opened) -> bool:
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", int(found.url.split(":")[2].split("/")[0]))) != 0


def test_a_server_inside_a_running_run(coded: Runner) -> None:
    """A step of the same job, with the job's variables, in the run's code; it ends with the job."""
    folder = coded.launch("--env", "py", "--engine", "ce", "--", "sleep", "600")
    coded.wait("last", lambda status: status["state"] == "RUNNING")
    until(lambda: (folder / "attempts/1/environment.sh").exists(), "the task")
    with opened(coded, "code", "last") as found:
        assert page(found.url)[1].startswith(f"edf {folder}/code xxx")
        assert (folder / "open/code/server").read_text().split()[0] == coded.status("last")["job_id"]
        path = socket_of(folder)
        coded("cancel", "last")
        assert found.process.wait(60) == 1 and "is not running" in found.said
    until(lambda: not path.parent.exists(), "the server to end")
    assert [each.name for each in coded.runs.glob("*-0*")] == [folder.name]


@pytest.mark.parametrize("engine", ["sandbox", "host"])
def test_without_a_scheduler(local: Runner, python_sqsh: Path, engine: str) -> None:
    """The same on one machine, in the sandbox or without a container; `cancel` ends it."""
    tools = local.project / "tools"
    write(tools, {"openvscode-server": SERVER})
    (tools / "openvscode-server").chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "FROM_EDF": "edf"}
    write(local.project, {"edf/py.toml": environment(python_sqsh, env=env)})
    with opened(local, "code", "py", "--engine", engine) as found:
        assert page(found.url)[1].startswith(f"edf {local.project} xxx")
        path = socket_of(local.runs / "code-0001")
        local("cancel", "code-0001")
        assert found.process.wait(60) == 1
    until(lambda: not path.parent.exists(), "the server to end")


def test_a_missing_program_is_named(coded: Runner) -> None:
    """An image without the program, and a node without network: the error says what to do."""
    (coded.project / "tools/openvscode-server").unlink()
    done = coded("open", "code", "py", "--engine", "ce", code=1)
    assert "neither openvscode-server, code-server nor code is on PATH in the container" in done.stderr
    done = coded("open", "tensorboard", "py", "--engine", "ce", code=1)
    assert "No module named pip" in done.stderr and "pip install --target" in done.stderr
    assert "there is no" in coded("open", "code", "nothing", code=1).stderr


def jupyterlab(runs: Path, python: str) -> None:
    """Put JupyterLab where `runner open` would have installed it; the folder is kept between test runs."""
    kept = cache_folder() / f"jupyterlab-{python}"
    names = next((runs / ".cache/open").glob("jupyterlab-*.txt"))
    if not kept.exists():
        flags = ("--quiet", "--only-binary=:all:", f"--python-version={python}", f"--constraint={names}")
        partial = kept.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        done = subprocess.run((sys.executable, "-m", "pip", "install", "--target", partial, *flags, "jupyterlab"))
        if done.returncode != 0:
            pytest.skip("JupyterLab cannot be installed: no network")
        partial.rename(kept)
    subprocess.run(("cp", "-r", kept, names.with_suffix("")), check=True)


def shown(browser: Browser, script: str, seconds: float = 60) -> Any:
    """The value of an expression as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := browser.run(script)):
        assert time.monotonic() < deadline, browser.run("document.body.innerText")
        time.sleep(0.05)
    return found


OUTPUTS = "[...document.querySelectorAll('.jp-OutputArea-output pre')].map(each => each.innerText)"


def answered(browser: Browser, text: str, wanted: str) -> None:
    """Type `text` into the active cell and run it, until an output begins with `wanted`.

    A notebook that is being drawn and JupyterLab's questions take the focus; then text and keys are lost, also after
    the cell had the text.
    """
    cell = "document.querySelector('.jp-Notebook .jp-mod-active .cm-content')"
    deadline = time.monotonic() + 120
    while not any(each.startswith(wanted) for each in browser.run(OUTPUTS)):
        assert time.monotonic() < deadline, browser.run("document.body.innerText")
        has_focus = browser.run(f"({cell}?.focus(), !!{cell} && document.activeElement === {cell})")
        if has_focus and browser.run(f"{cell}?.innerText.trim()") == text:
            for kind in ("keyDown", "keyUp"):
                browser.ask(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key="Enter",
                    code="Enter",
                    modifiers=8,
                    windowsVirtualKeyCode=13,
                    text="\r",
                )
            time.sleep(1)
        elif has_focus:
            browser.run("document.execCommand('selectAll')")
            browser.ask("Input.insertText", text=text)
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.uses("chromium")
def test_a_kernel_answers_in_a_browser(coded: Runner, tmp_path: Path) -> None:
    """A kernel in the container answers 1+1, and the notebook is kept. The test prints how long it took."""
    need("chromium")
    missing = coded("open", "jupyter", "py", "--engine", "ce", code=1)
    assert "cannot add jupyterlab to the image's Python" in missing.stderr
    jupyterlab(coded.runs, "3.11")
    browser = Browser(tmp_path / "profile")
    try:
        began = time.monotonic()
        with opened(coded, "jupyter", "py", "--engine", "ce", "--time", "20") as found:
            browser.ask("Page.navigate", url=found.url)
            shown(browser, "!!document.querySelector('.jp-LauncherCard[data-category=Notebook]')")
            browser.run("document.querySelector('.jp-LauncherCard[data-category=Notebook]').click()")
            answered(browser, "1+1", "2")
            print(f"URL after {found.seconds:.1f} s, answer after {time.monotonic() - began:.1f} s")
            # read-only, beside the image
            folder = "'edf/opt/runner-packages/jupyterlab-"
            answered(browser, "__import__('os').environ['FROM_EDF'] + __import__('jupyterlab').__file__", folder)
            # the kernels have no ports that others could reach
            until(lambda: any(coded.project.glob("*.ipynb")), "the notebook")
            listening = subprocess.run(("ss", "-ltnpH"), capture_output=True, text=True).stdout
            assert "ipykernel" not in listening
            log = (coded.runs / "jupyter-0002/job.log").read_text()
            assert found.token not in log
            coded("cancel", "jupyter-0002")
    finally:
        browser.close()


# sshd, its helpers and their libraries, from this machine: the image is the same Debian
SSHD = ("/usr/sbin/sshd", "/usr/bin/ssh-keygen", "/usr/lib/openssh/sftp-server")


def with_sshd(runner: Runner, image: Path) -> None:
    """An environment with this machine's sshd, in an image that has none."""
    if not Path(SSHD[0]).exists():
        pytest.skip("openssh-server is not on this machine")
    found = subprocess.run(("ldd", *SSHD), capture_output=True, text=True).stdout
    libraries = sorted(set(re.findall(r"=> (/\S+)", found)))
    env = {"FROM_EDF": "edf", "PATH": "/usr/bin:/bin", "SPECIAL": "a 'b' $c"}
    # for root, sshd wants the user that its package makes
    mounts = [f"{path}:{path}:ro" for path in (*SSHD, *libraries, "/etc/passwd")]
    write(runner.project, {"edf/py.toml": environment(image, mounts, env)})


def ssh(
    runner: Runner, config: Path, *words: str, program: str = "ssh", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    argv = (program, "-F", str(config), "-o", "BatchMode=yes", *words)
    return subprocess.run(argv, capture_output=True, timeout=240, env=dict(runner.environ), **options)


def test_ssh_into_the_container_of_a_job(cluster: Runner, slurm: SlurmLab, python_sqsh: Path, tmp_path: Path) -> None:
    """Each byte arrives, files are copied, nothing listens on a port, and other keys are refused."""
    if not slurm.plugins:
        pytest.skip("this Slurm has no container plug-in")
    with_sshd(cluster, python_sqsh)
    block = cluster("open", "ssh", "py", "--engine", "ce", "--time", "20").stdout
    folder = cluster.runs / "ssh-0001"
    config, host = folder / "open/ssh/config", "runner-ssh-0001"
    assert block.startswith(f"Host {host}\n") and config.read_text().strip() == block.strip()
    done = ssh(cluster, config, host, 'echo $FROM_EDF; echo "$SPECIAL"; [ -e /etc/debian_version ] && pwd')
    assert (done.returncode, done.stdout.decode().splitlines()[:2]) == (0, ["edf", "a 'b' $c"]), done.stderr
    data = os.urandom(3_000_000) + bytes(range(256)) * 4
    assert ssh(cluster, config, host, "cat", input=data).stdout == data
    assert ssh(cluster, config, host, "exit 7").returncode == 7
    (tmp_path / "there").write_bytes(data)
    copied = ssh(cluster, config, str(tmp_path / "there"), f"{host}:{folder}/copied", program="scp")
    assert copied.returncode == 0 and (folder / "copied").read_bytes() == data, copied.stderr
    # again: the same run, key and block
    assert cluster("open", "ssh", "py", "--engine", "ce").stdout == block
    assert stat.S_IMODE((folder / "open/ssh/user").stat().st_mode) == 0o600
    other = tmp_path / "other"
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other), check=True)
    refused = config.read_text().replace(f"{folder}/open/ssh/user", str(other))
    (tmp_path / "config").write_text(refused)
    assert b"Permission denied" in ssh(cluster, tmp_path / "config", host, "true").stderr
    listening = subprocess.run(("ss", "-ltnpH"), capture_output=True, text=True).stdout
    assert "serve.py" not in listening
    job = cluster.status("ssh-0001")["job_id"]
    steps = slurm.run(("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i")).stdout.split()
    until(lambda: len(steps_of(slurm, job)) <= 2, f"the steps of the connections to end: {steps}")
    path = Path((folder / "open/ssh/server").read_text().split()[2])
    cluster("cancel", "ssh-0001")
    until(lambda: not path.exists(), "the private folder to go")


def steps_of(slurm: SlurmLab, job: str) -> list[str]:
    return slurm.run(("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i")).stdout.split()


@pytest.mark.slow
def test_ssh_ends_after_a_time_without_a_connection(local: Runner) -> None:
    """Without a scheduler and without a container. An editor that connects afterwards starts no job."""
    if not Path(SSHD[0]).exists():
        pytest.skip("openssh-server is not on this machine")
    local("open", "ssh", "plain", "--engine", "host", "--idle", "1")
    config = local.runs / "ssh-0001/open/ssh/config"
    assert ssh(local, config, "runner-ssh-0001", "echo $FROM_EDF").stdout == b"edf\n"
    local.wait("ssh-0001", lambda status: status["state"] == "COMPLETED", seconds=400)
    assert "no connection for 60 s: ending" in (local.runs / "ssh-0001/job.log").read_text()
    assert b"ssh-0001 has ended" in ssh(local, config, "runner-ssh-0001", "true").stderr and len(local.made()) == 1
    assert "--stdio is given without ssh" in local("open", "code", "--stdio", code=2).stderr
