"""Start programs from tuples of arguments, never from shell text."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple, Protocol

from runner.errors import RunnerError

# Debian's package for each program, for error messages
PACKAGES = {
    "bwrap": "bubblewrap",
    "docker": "docker.io",
    "git": "git",
    "mksquashfs": "squashfs-tools",
    "mmdebstrap": "mmdebstrap",
    "podman": "podman",
    "sbatch": "slurm-client",
    "scancel": "slurm-client",
    "skopeo": "skopeo",
    "squashfuse": "squashfuse",
    "squeue": "slurm-client",
    "srun": "slurm-client",
    "unsquashfs": "squashfs-tools",
}


class Completed(NamedTuple):
    """A finished program: its argv, exit code and output."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


def which(program: str, env: Mapping[str, str] = os.environ) -> str | None:
    """The absolute path of a program on PATH (with /usr/sbin and /sbin, where daemons live), or None."""
    path = os.pathsep.join((env.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which(program, path=path)


def without(*prefixes: str) -> tuple[str, ...]:
    """The words before a command that remove the variables whose names begin so; empty if none is set."""
    names = sorted(name for name in os.environ if name.startswith(prefixes))
    return ("env", *(f"--unset={name}" for name in names)) if names else ()


def need(programs: Iterable[str]) -> None:
    """Raise one RunnerError that names all missing programs and their packages."""
    missing = [program for program in programs if which(program) is None]
    if missing:
        packages = sorted({PACKAGES[program] for program in missing if program in PACKAGES})
        debian = f"apt-get install --no-install-recommends {' '.join(packages)}   (or ask the admin for them)"
        raise RunnerError(
            f"these programs are missing on this machine: {', '.join(missing)}",
            "no folder on PATH contains them",
            debian if packages else "install them, or ask the admin for them",
        )


def environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment plus `extra`."""
    return {**os.environ, **(extra or {})}


def _found(program: str, env: Mapping[str, str]) -> str:
    """The path of `program`, from `which`, which finds more than execvp. Raises RunnerError for a missing program."""
    if os.sep in program:
        return program
    path = which(program, env)
    if path is None:
        need((program,))
    return path or program


def start(
    argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a program with `env` added to the environment, and without input unless `options`, of Popen, have one.

    Raises RunnerError if it is missing or cannot be started.
    """
    whole = environment(env)
    given = {"stdin": subprocess.DEVNULL, "executable": _found(argv[0], whole), **options}
    try:
        return subprocess.Popen(tuple(argv), env=whole, **given)
    except OSError as error:
        raise _cannot_start(argv[0], error) from error


_LONGEST_SHOWN = 300  # characters
_TEXT: dict[str, Any] = {"text": True, "errors": "replace"}


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text_input: str | None = None,
    stdin: Path | None = None,
    check: bool = True,
    timeout_seconds: float | None = None,
    own_session: bool = False,
) -> Completed:
    """Run a program and return its output. With `own_session`, Ctrl-C in the terminal does not reach it.

    Raises RunnerError if it is missing, hangs or (with `check`) fails; the error includes the program's output.
    """
    whole = environment(env)
    try:
        with open(stdin or os.devnull, "rb") as source:  # noqa: PTH123 (Path is slower)
            done = subprocess.run(
                tuple(argv),
                executable=_found(argv[0], whole),
                env=whole,
                cwd=cwd,
                input=text_input,
                stdin=source if text_input is None else None,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_seconds,
                start_new_session=own_session,
            )
    except subprocess.TimeoutExpired as error:
        name = _program(argv)
        raise TimedOut(
            f"{name} did not answer",
            f"it did not end within {timeout_seconds:.0f} s",
            f"run the same command again; if {name} contacts a server, check it",
        ) from error
    except OSError as error:
        raise _cannot_start(argv[0], error) from error
    completed = Completed(tuple(argv), done.returncode, done.stdout, done.stderr)
    if check and done.returncode != 0:
        raise failed(completed)
    return completed


class TimedOut(RunnerError):
    """A program did not end in time. It may have done its work."""


def _program(argv: Sequence[str]) -> str:
    """The program that a command starts, also behind `env --unset=NAME`."""
    words = list(argv)
    if words[0] == "env":
        words = [
            word for word in words[1:] if not word.startswith("-") and "=" not in word
        ] or words
    return words[0]


def _cannot_start(program: str, error: OSError) -> RunnerError:
    fix = "check that the file is executable and was built for this machine"
    return RunnerError(f"cannot start {program}", str(error), fix)


def python_with(module: str, candidates: Iterable[str | None], fix: str) -> str:
    """The first Python of the candidates that can import a module. Raises RunnerError if none can."""
    pythons = tuple(dict.fromkeys(python for python in candidates if python))
    for python in pythons:
        if run((python, "-c", f"import {module}"), check=False, timeout_seconds=60).exit_code == 0:
            return python
    raise RunnerError(f"no Python on this machine has {module}", f"tried {', '.join(pythons)}", fix)


class Started:
    """A program that runs in the background, without input; `finish` returns its output."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self._child = start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **_TEXT)

    def finish(self) -> Completed:
        """Wait until it has ended, and return its output."""
        stdout, stderr = self._child.communicate()
        return Completed(self.argv, self._child.returncode, stdout, stderr)


def failed(completed: Completed, fix: str = "") -> RunnerError:
    """The error for a program with a non-zero exit code; `why` has its last output."""
    words = (
        completed.stderr.strip() or completed.stdout.strip() or "it printed nothing"
    ).splitlines()
    return RunnerError(
        f"{Path(completed.argv[0]).name} failed with exit code {completed.exit_code}",
        "\n".join(words[-12:]),
        fix or f"run the command by hand: {_short(completed.argv)}",
    )


def _short(argv: Sequence[str]) -> str:
    """The command as a shell reads it; only its beginning if it is long, such as one with a whole script in it."""
    whole = shlex.join(argv)
    return whole if len(whole) <= _LONGEST_SHOWN else f"{whole[:_LONGEST_SHOWN]} …"


def follow(
    argv: Sequence[str],
    line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace_seconds: float = 5.0,
) -> int:
    """Run a program, pass on each line of its stdout and stderr as it arrives, and return the exit code.

    On an exception, including Ctrl-C, the process group is ended before it propagates, after the grace period by force.
    """
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **_TEXT}
    child = start(argv, env, cwd=cwd, start_new_session=True, **outputs)
    assert child.stdout is not None
    try:
        with child.stdout as output:
            for raw in output:
                line(raw.rstrip("\n"))
        return child.wait()
    except BaseException:
        end_group(child.pid, grace_seconds)
        child.wait()
        raise


def end_group(pid: int, grace_seconds: float = 5.0) -> None:
    """End a process group that this process started: SIGTERM, then SIGKILL after the grace period.

    Also kill descendants in other groups: podman 4.3 leaves the process of a build's RUN step running.
    """
    from runner.machine import sessions

    descendants = sessions.descendants(pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    break
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)
    sessions.kill(descendants)


def attached(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> int:
    """Run a program on this terminal (inherited stdin, stdout, stderr), and return its exit code.

    The exit code is 128 + N for a program that was ended by signal N, as in shells.
    """
    child = start(argv, env, cwd=cwd, stdin=None)
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the terminal sent Ctrl-C to the program too, which decides what to do


def detached(
    argv: Sequence[str], log: Path, *, cwd: Path, env: Mapping[str, str] | None = None
) -> int:
    """Start a program that outlives this process, append its output to `log`, and return its process id."""
    with log.open("ab") as output:
        return start(
            argv, env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ).pid


class Output(Protocol):
    """Where output goes, such as sys.stdout.buffer."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class Marked:
    """A program whose output counts only after a mark: `head` is what follows the mark on its line of stdout.

    With `terminal`, it gets this terminal as input, and Ctrl-C with it. Otherwise it reads nothing, unless `reads`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        mark: bytes,
        outputs: tuple[Output, Output],
        *,
        terminal: bool,
        reads: bool,
    ) -> None:
        self.mark, self.head, self.noise = mark, "", ""
        self._failure: Exception | None = None
        stdin = None if terminal or reads else subprocess.DEVNULL
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            argv, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=not terminal
        )
        ends = zip((self._child.stdout, self._child.stderr), outputs, strict=True)
        self._pumps = [Thread(target=self._pump, args=each, daemon=True) for each in ends]
        for pump in self._pumps:
            pump.start()

    def _pump(self, source: IO[bytes], output: Output) -> None:
        before, begun = b"", False
        try:
            while piece := os.read(source.fileno(), 1 << 16):
                if not begun:
                    before += piece
                    _, begun_here, after = before.partition(self.mark)
                    head, end, piece = after.partition(b"\n")
                    if not (begun_here and end):
                        continue
                    begun = True
                    if head.strip():
                        self.head = head.decode(errors="replace").strip()
                output.write(piece)
                output.flush()
            self.noise += "" if begun else before.decode(errors="replace").strip()
        except OSError:  # the reader of our output has gone
            self._child.terminate()
        except Exception as error:  # of the output: this is a thread, so `wait` raises it
            self._failure = error
            self._child.terminate()

    def wait(self, interrupt: Callable[[int], object]) -> int:
        """Wait for the end, and return the exit code. The first Ctrl-C calls `interrupt` with the process id.

        An error of an output, except OSError, does the same, and is raised.
        """
        asked = False
        while True:
            try:
                code = self._child.wait()
                for pump in self._pumps:
                    pump.join()
                if self._failure is not None:
                    pid = self.head.rpartition(" ")[2]
                    if pid.isdecimal():
                        interrupt(int(pid))
                    raise self._failure
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                pid = self.head.rpartition(" ")[2]
                if asked or not pid.isdecimal():
                    self._child.terminate()
                    raise
                asked = True
                interrupt(int(pid))
