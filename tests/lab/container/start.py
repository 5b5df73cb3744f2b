"""Run the image's own start as enroot and pyxis do, and learn what it makes of environment and working directory."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lab.container.request import Refusal

STARTED = Path("/run/lab-started")
# The stand-in for the command: its environment is what the tasks get. pyxis' own is `sh -c "kill -STOP $$ ; exit 0"`.
LAST = ("/bin/sh", "-c", f"echo > {STARTED}; read -r line")
SHELLS_OWN = ("OLDPWD", "PWD", "SHLVL", "_")


def run_start(environ: Mapping[str, str], entrypoint: bool, become: Callable[[], None]) -> tuple[dict[str, str], str]:
    """Run /etc/rc with the ids that `become` gives it; the environment and the folder that the command would get.

    As under enroot the shell is a login shell, but for ENROOT_LOGIN_SHELL=n.

    Without the entrypoint pyxis writes `exec "$@"` into /etc/rc.local, so that /etc/rc goes no further.
    """
    has_rc = Path("/etc/rc").exists()
    if has_rc and not entrypoint:
        Path("/etc/rc.local").write_text('exec "$@"\n')
    login = () if environ.get("ENROOT_LOGIN_SHELL", "y") in ("", "n", "no", "f", "false") else ("-l",)
    argv = ("/bin/sh", *login, "/etc/rc", *LAST) if has_rc else ("/bin/sh", *login, "-c", 'exec "$@"', "sh", *LAST)
    pipe = subprocess.PIPE
    try:
        shell = subprocess.Popen(
            argv, env=environ, cwd="/", preexec_fn=become, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise Refusal(f"the image has no usable /bin/sh: {error.strerror}") from error
    while not STARTED.exists():
        if shell.poll() is not None:
            said = shell.stdout.read() if shell.stdout else b""
            raise Refusal(f"the container did not start (exit {shell.returncode}): {said.decode().strip()}")
        time.sleep(0.002)
    raw = Path(f"/proc/{shell.pid}/environ").read_bytes().decode(errors="surrogateescape")
    where = str(Path(f"/proc/{shell.pid}/cwd").readlink())
    shell.communicate(b"\n")
    STARTED.unlink()
    pairs = (entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
    return {name: value for name, value in pairs if name not in SHELLS_OWN}, where
