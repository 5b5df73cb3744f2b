"""The helper process that puts an engine's layers together again (tar_split.py), and readers of what it writes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from runner.errors import RunnerError
from runner.images.oci import tar_split
from runner.images.reader import Reader
from runner.machine import process

# 1 MiB is what a user may have by default (fs.pipe-max-size)
_PIPE_BYTES = 1 << 20
_END_SECONDS = 5.0


class Rebuilder:
    """A running helper; it ends when we do, whatever ends us, since its socket is then closed."""

    def __init__(self, requests: socket.socket, words: IO[bytes], what: str) -> None:
        self.requests = requests
        self.words = words
        self.what = what

    @contextmanager
    def layer(self, split: Path, root: Path) -> Iterator[Reader]:
        """The tar of a layer. Raises RunnerError where it ends, when it could not be put together."""
        data, target = os.pipe2(os.O_CLOEXEC)
        verdict, status = os.pipe2(os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a machine with smaller pipes is slower, no more
                fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            message = json.dumps({"split": str(split), "root": str(root)}).encode()
            with suppress(OSError):  # a helper that has gone: the pipes end at once, and the reader says so
                socket.send_fds(self.requests, [message], [target, status])
        finally:
            os.close(target)
            os.close(status)
        with os.fdopen(data, "rb", 1 << 16) as stream, os.fdopen(verdict, "rb", 0) as said:
            yield _Tar(stream, said, self)

    def failure(self, said: str) -> RunnerError:
        """The error for a layer that could not be put together."""
        self.words.seek(0)
        last = self.words.read()[-2000:].decode(errors="replace").strip().splitlines()[-3:]
        why = said or "\n".join(("the process that reads the engine's storage has died", *last))
        return RunnerError(
            f"cannot read {self.what}",
            why,
            "images must stay while they are imported (podman rmi, prune, a new build); import again",
        )


class _Tar:
    """The tar as it comes through the pipe; its end is believed only when the helper says that it was the end."""

    def __init__(self, stream: IO[bytes], said: IO[bytes], owner: Rebuilder) -> None:
        self.stream = stream
        self.said = said
        self.owner = owner

    def read(self, size: int = -1, /) -> bytes:
        data = self.stream.read(size)
        if len(data) < size or size < 0:
            words = self.said.read() if not self.said.closed else b"ok"
            self.said.close()
            if words != b"ok":
                raise self.owner.failure(words.decode(errors="replace"))
        return data


@contextmanager
def rebuilder(env: Mapping[str, str], what: str, *, rootless: bool) -> Iterator[Rebuilder]:
    """A helper for the layers of one image; for an ordinary user within podman's user namespace."""
    inside = ("podman", "unshare") if rootless else ()
    process.need(inside[:1])
    argv = (*inside, sys.executable, "-I", "-S", str(Path(tar_split.__file__)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryFile() as words:
        with theirs:
            child = subprocess.Popen(
                argv,
                env=process.environment(env),
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
        try:
            yield Rebuilder(ours, words, what)
        finally:
            ours.close()
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.end_group(child.pid)
                child.wait()
