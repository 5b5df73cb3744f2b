"""A real sshd on 127.0.0.1 with keys, configuration and a remote home of its own, and the ssh of a user beside it."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.lab.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]


class Sshd:
    """An sshd, between `with` and its end. `home` is the home folder on the other side, `local` the one on this side.

    All files are in a short folder of /tmp: a socket's path has room for 107 characters.
    """

    def __init__(
        self, environ: Mapping[str, str], config: str = "", shell: str = "/bin/sh", password: str = ""
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="on-"))
        self.home, self.local = self.folder / "there", self.folder / "here"
        self.environ, self.config, self.shell = environ, config, shell
        (self.port,) = free_ports(1)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.program = "/usr/sbin/sshd"

    def __enter__(self) -> Self:
        for path in (self.home / ".ssh", self.local / ".ssh", self.home / "bin"):
            path.mkdir(parents=True, mode=0o700)
        for name in ("host", "user"):
            subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name), check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        Path("/run/sshd").mkdir(exist_ok=True)
        # ForceCommand stands for the login shell of the account, whose home and variables are these
        start = self.folder / "login"
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.there().items())
        start.write_text(
            f"#!/bin/sh\ncd {self.home}\n"
            f'if [ -z "$SSH_ORIGINAL_COMMAND" ]; then exec env -i {variables} {self.shell}; fi\n'
            f'exec env -i {variables} TERM="$TERM" {self.shell} -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        start.chmod(0o755)
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nPermitRootLogin yes\n"
            f"{self.config}\nMatch all\nForceCommand {start}\n"
        )
        self.start()
        public = (self.folder / "host.pub").read_text()
        (self.folder / "known").write_text("".join(f"{name} {public}" for name in ("lab", f"[127.0.0.1]:{self.port}")))
        self.write_client()
        return self

    def write_client(self, extra: str = "", port: int | None = None) -> None:
        """The ssh configuration of this side: `Host lab`. A program `ssh` on PATH reads it: HOME does not count."""
        (self.folder / "config").write_text(
            f"Host lab\nHostName 127.0.0.1\nPort {port or self.port}\n"
            f"IdentityFile {self.folder}/user\nHostKeyAlias lab\n"
            f"UserKnownHostsFile {self.folder}/known\nIdentitiesOnly yes\n{extra}\n"
        )
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder}/config "$@"\n')
        (tools / "ssh").chmod(0o755)

    def start(self) -> None:
        """Start the daemon, and wait until it answers."""
        argv = (self.program, "-D", "-e", "-f", str(self.folder / "sshd_config"))
        with (self.folder / "sshd.log").open("ab") as log:
            self.daemon = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 20
        while b"Server listening" not in (self.folder / "sshd.log").read_bytes():
            assert time.monotonic() < deadline, (self.folder / "sshd.log").read_text()
            time.sleep(0.02)

    def drop(self) -> None:
        """Cut every connection, as a network that goes away; the daemon goes on."""
        assert self.daemon
        listed = subprocess.run(("pgrep", "-P", str(self.daemon.pid)), capture_output=True, text=True).stdout.split()
        for pid in listed:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(int(pid), signal.SIGKILL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(self.argv("connect", "lab", "--close"), env=self.here(), capture_output=True, check=False)
        if self.daemon:
            self.drop()
            self.daemon.kill()
            self.daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def there(self) -> dict[str, str]:
        kept = {name: self.environ[name] for name in ("SLURM_CONF", "PYTHONPATH") if name in self.environ}
        # the tests' own installation is not the other side's
        path = [folder for folder in self.environ["PATH"].split(":") if not Path(folder, "runner").exists()]
        return {**kept, "HOME": str(self.home), "PATH": ":".join((f"{self.home}/bin", *path)), "LANG": "C.UTF-8"}

    def install(self, version: str = "") -> None:
        """The user's own installation on the other side: `runner` on PATH, these sources."""
        program = self.home / "bin/runner"
        told = f'[ "$1" = --version ] && {{ echo runner {version}; exit; }}\n' if version else ""
        program.write_text(f'#!/bin/sh\n{told}PYTHONPATH={ROOT}/src exec {sys.executable} -m runner "$@"\n')
        program.chmod(0o755)

    def here(self) -> dict[str, str]:
        """The environment of this side: no Slurm, no settings of the developer."""
        return {
            "HOME": str(self.local), "PATH": f"{self.folder}/tools:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}/src",
            "XDG_RUNTIME_DIR": str(self.folder), "LANG": "C.UTF-8", "SLURM_CONF": "/nonexistent",
        }  # fmt: skip

    @staticmethod
    def argv(*words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "runner", *words)

    def __call__(self, *words: str, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command line on this side to its end; its exit code must be `code` (None: any)."""
        settings: dict[str, Any] = {"cwd": self.local, "stdin": subprocess.DEVNULL, "timeout": 120, **options}
        extra = settings.pop("extra_environ", {})
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self.argv(*words), env={**self.here(), **extra}, capture_output=True, text=True, check=False, **settings
        )
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done
