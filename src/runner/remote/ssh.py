"""Verbs on another machine: one OpenSSH command over a master connection, whatever the login shell there is.

A start-up file may print before the verb does. The remote script therefore prints a random mark first, on stdout and on
stderr, and what comes before it is dropped.
"""

import base64
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.machine import files, folders, process
from runner.machine.tunnel import listener
from runner.quoting import live
from runner.remote.host import Host

_LONGEST = 90_000
"""bytes of the words: with the script and as base64, they are a single argument, which Linux limits to 128 KiB"""
# how long an unused connection is kept: opened by `connect`, or by a verb
_IDLE = {
    True: "12h",
    False: "10m",
}


class Connection:
    """The master connection to a host: the user's own if ~/.ssh/config sets ControlPath, otherwise runner's."""

    def __init__(self, host: Host, environ: Mapping[str, str]) -> None:
        self.host = host
        folder = Path(environ.get("HOME", "~")).expanduser() / ".ssh"
        runtime = environ.get("XDG_RUNTIME_DIR")
        # that folder goes at the logout, also under a tmux that stays
        if runtime and Path(runtime).is_dir():
            folder = Path(runtime)
        key = ("-o", f'IdentityFile="{host.key}"') if host.key else ()
        self._resolved = process.run(("ssh", *key, "-G", host.target)).stdout
        own = re.search("^controlpath (?!none)", self._resolved, re.M)
        path = () if own else ("-o", f"ControlPath={folder}/runner-%C")
        self.options = (
            *path,
            *key,
            "-o",
            "ControlMaster=auto",
            "-o",
            "ServerAliveInterval=15",
            "-o",
            "ConnectTimeout=20",
        )

    def argv(self, *words: str) -> tuple[str, ...]:
        """An ssh command over the open connection."""
        quiet = ("-o", "BatchMode=yes", "-o", "LogLevel=ERROR")
        return ("ssh", *self.options, *quiet, *words[:-1], "--", self.host.target, words[-1])

    def _master(self, *words: str) -> process.Completed:
        return process.run(("ssh", *self.options, "-O", *words, self.host.target), check=False)

    def is_open(self) -> bool:
        return self._master("check").exit_code == 0

    def close(self) -> None:
        """Close the connection at once, with all that runs over it."""
        self._master("exit")

    def leave(self) -> None:
        """Let the next command open another connection. What runs over this one goes on, and it ends with the last."""
        self._master("stop")

    def forward(self, port: int) -> str:
        """Forward a port of this machine, the same if it is free, to this port of the host: the words of ssh -L."""
        said = ""
        for wanted in (port, 0, 0):
            server, near = listener(wanted)
            server.close()  # another program may take the port before ssh does
            forward = f"127.0.0.1:{near}:127.0.0.1:{port}"
            done = self._master("forward", "-L", forward)
            if done.exit_code == 0:
                return forward
            said = done.stderr
        raise RunnerError(
            f"cannot forward port {port} of {self.host.name}",
            said,
            f"run the same command again; if it fails again: runner connect {self.host.name}",
        )

    def cancel(self, forward: str) -> None:
        self._master("cancel", "-L", forward)

    def open(self, *, terminal: bool, kept: bool = False) -> None:
        """Open the connection. ssh asks for passwords and codes itself, on the terminal; without one, it asks nothing.

        Raises RunnerError if that fails.
        """
        log = files.write_new("runner-ssh-", ".log", "")
        # a log, because old versions of ssh keep a pipe open for as long as the connection lasts
        quiet = () if terminal else ("-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-E", str(log))
        argv = (
            "ssh",
            *self.options,
            "-o",
            f"ControlPersist={_IDLE[kept]}",
            *quiet,
            "-fN",
            "--",
            self.host.target,
        )
        code, said = process.attached(argv), files.text_of(log)
        folders.discard(Path(log))
        if code == 0:
            return
        if expired := self._expired():
            fix = self.host.renew or f"get a new certificate, then: runner connect {self.host.name}"
            raise RunnerError(
                f"cannot connect to {self.host.name}: {expired}", said or "see above", fix
            )
        if re.search("Permission denied|verification failed|Too many authentication", said):
            what = f"{self.host.name} refuses the login, or asks for a password, a code or a confirmation"
            raise RunnerError(what, said, f"in a terminal: runner connect {self.host.name}")
        raise RunnerError(
            f"cannot connect to {self.host.name}", said or "see above", f"ssh {self.host.target}"
        )

    def _expired(self) -> str:
        """`the certificate FILE has expired 3 h ago`, of the newest certificate that ssh would use; empty if none has.

        ssh itself says only that permission is denied. Source of the format: ssh-keygen -L of OpenSSH 9.2.
        """
        paths = re.findall("^certificatefile (.+)$", self._resolved, re.M)
        paths += [
            f"{path}-cert.pub" for path in re.findall("^identityfile (.+)$", self._resolved, re.M)
        ]
        ends = dict[str, datetime]()
        for path in (self.host.certificate,) if self.host.certificate else paths:
            file = Path(path).expanduser()
            if not file.is_file():
                continue
            shown = process.run(("ssh-keygen", "-L", "-f", str(file)), check=False).stdout
            if found := re.search(r"Valid: from \S+ to (\S+)", shown):
                ends[path] = datetime.fromisoformat(found[1])
        newest = max(ends, key=ends.__getitem__, default="")
        ago = (datetime.now() - ends[newest]).total_seconds() if newest else 0
        if ago <= 0:
            return ""
        shown = f"{ago // 60:.0f} min" if ago < 3600 else f"{ago // 3600:.0f} h"
        return f"the certificate {newest} expired {shown} ago"

    def verb(self, words: str, mark: str, *, terminal: bool, **values: str) -> tuple[str, ...]:
        """The ssh command for a verb, whose words are quoted for sh. On stdout, a line `MARK STATE PID` comes first.

        The values are those of verb.sh.
        """
        if len(os.fsencode(words)) > _LONGEST:
            why = f"with --on, all arguments together may have at most {_LONGEST} bytes"
            raise RunnerError(
                "the command line is too long",
                why,
                "write the longest argument to a file, and pass the file's name",
            )
        values = {"mark": mark, "version": __version__, "site": self.host.site, **values}
        return self.argv("-t" if terminal else "-T", self._command("verb.sh", words, values))

    def ask(
        self, script: str, words: Sequence[str] = (), *, stdin: Path | None = None, **values: str
    ) -> str:
        """Run a script of this folder on the host, and return its output. Raises RunnerError if it fails."""
        mark = f"runner-{secrets.token_hex(8)}"
        argv = self.argv("-T", self._command(script, shlex.join(words), {**values, "mark": mark}))
        done = process.run(argv, stdin=stdin, check=False, own_session=True)
        if done.exit_code:
            why = done.stderr.rpartition(f"{mark}\n")[2].strip() or "the connection was lost"
            fix, code = "correct what the message names, and try again", done.exit_code
            raise RunnerError(
                f"cannot exchange files with {self.host.name}", why, fix, exit_code=code
            )
        return done.stdout.rpartition(f"{mark}\n")[2]

    def _command(self, script: str, words: str, values: Mapping[str, str]) -> str:
        text = (Path(__file__).parent / script).read_text(encoding="utf-8")
        set_values = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        code = f"$d/code/{shlex.quote(os.uname().nodename)}"
        folder = live(self.host.folder, "`folder` of the host file")
        first = f"d={folder} {set_values}\nc={code}\nset -- {words}\n"
        return remote_command(first + text)


def remote_command(script: str) -> str:
    """The command that runs a script with /bin/sh, in characters that sh, csh, fish and others read alike."""
    text = base64.b64encode(os.fsencode(script)).decode()
    return f"exec /bin/sh -c 'eval \"$(printf %s {text} | base64 -d)\"'"
