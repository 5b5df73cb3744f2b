"""A tunnel from a port of 127.0.0.1 to a UNIX socket on a node, through stdin and stdout of one program, such as srun.

The near end is a Tunnel. The far end is this file itself, `python3 tunnel.py SOCKET`, so it imports only the standard
library. A frame is the number of a connection, a size, that many bytes, and a line break, because srun passes on whole
lines. Size 0 ends the bytes of a connection. Size -1 says that a piece was passed on, so that a slow reader holds back
only its own connection, and never more than _WINDOW pieces. Size -2 opens a connection.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import IO

_READY = b"runner: the tunnel is ready\n"
_HEAD, _PIECE, _WINDOW = struct.Struct("!Ii"), 1 << 16, 16
_PAGE = b"""HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html; charset=utf-8\r\nConnection: close\r\n\r\n\
<!doctype html><title>no connection</title><h1>The tunnel to the server has ended</h1>\
<p>The terminal with <code>runner open</code> shows the reason. The same command connects again.</p>\n"""


class _Link:
    """The connections that share one pair of pipes."""

    def __init__(
        self, source: IO[bytes], sink: IO[bytes], connect: Callable[[], socket.socket] | None = None
    ) -> None:
        self._source, self._sink, self._connect = source, sink, connect
        self._lock = threading.Lock()
        self._ends: dict[int, tuple[socket.socket, SimpleQueue[bytes], threading.Semaphore]] = {}
        self._unanswered: set[int] = set()

    def open(self, number: int, end: socket.socket) -> None:
        """Open a connection at the other end, and pass on what both ends write."""
        self._register(number, end)  # before the other end can answer: a server may speak first
        self._send(number, -2)
        self._start(number)

    def _register(self, number: int, end: socket.socket) -> None:
        self._unanswered.add(number)
        self._ends[number] = end, SimpleQueue(), threading.Semaphore(_WINDOW)

    def _start(self, number: int) -> None:
        threading.Thread(target=self._read, args=(number, *self._ends[number]), daemon=True).start()

    def _send(self, number: int, size: int, data: bytes = b"") -> None:
        with self._lock, suppress(OSError, ValueError):  # `run` notices that the pipes have ended
            self._sink.write(_HEAD.pack(number, size) + data + b"\n")
            self._sink.flush()

    def _read(
        self, number: int, end: socket.socket, queued: SimpleQueue[bytes], room: threading.Semaphore
    ) -> None:
        writer = threading.Thread(target=self._write, args=(number, end, queued), daemon=True)
        writer.start()
        data = b"-"
        while data and room.acquire():
            data = b""
            with suppress(OSError):
                data = end.recv(_PIECE)
            self._send(number, len(data), data)
        writer.join()
        end.close()
        del self._ends[number]

    def _write(self, number: int, end: socket.socket, queued: SimpleQueue[bytes]) -> None:
        while data := queued.get():
            with suppress(OSError):
                end.sendall(data)
            self._send(number, -1)
        with suppress(OSError):
            end.shutdown(socket.SHUT_WR)

    def run(self) -> None:
        """Pass on frames until the other end has closed its pipe."""
        while True:
            head = self._source.read(_HEAD.size)
            if len(head) != _HEAD.size:
                break
            number, size = _HEAD.unpack(head)
            data = self._source.read(max(size, 0) + 1)[:-1]
            known = self._ends.get(number)
            if size == -2 and self._connect:
                self._register(number, self._connect())
                self._start(number)
            elif known and size == -1:
                known[2].release()
            elif known:
                self._unanswered.discard(number)
                known[1].put(data)
        for number in tuple(self._ends):
            self._finish(number)

    def _finish(self, number: int) -> None:
        """End a connection without the other end: with a page, if it has had no answer yet."""
        with suppress(KeyError):  # it has ended meanwhile
            _, queued, room = self._ends[number]
            for data in (_PAGE, b"") if number in self._unanswered else (b"",):
                queued.put(data)
            room.release()


def listener(port: int) -> tuple[socket.socket, int]:
    """(socket that listens on 127.0.0.1, its port): this port, or a free one if it is in use."""
    try:
        server = socket.create_server(("127.0.0.1", port))
    except OSError:
        server = socket.create_server(("127.0.0.1", 0))
    return server, int(server.getsockname()[1])


class Tunnel(_Link):
    """The near end: a port of 127.0.0.1, and the program that leads to the far end."""

    def __init__(
        self, argv: Sequence[str], port: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._server, self.port = listener(port)
        # in its own session, so that Ctrl-C in the terminal does not reach it
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            tuple(argv), stdin=pipe, stdout=pipe, env=env, start_new_session=True
        )
        assert self._child.stdin and self._child.stdout
        super().__init__(self._child.stdout, self._child.stdin)
        self.is_ready = any(line == _READY for line in iter(self._child.stdout.readline, b""))
        self._runs = threading.Thread(target=self.run, daemon=True)
        self._runs.start()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            for number in itertools.count():
                end = self._server.accept()[0]
                self.open(number, end)
                if not self._runs.is_alive():
                    self._finish(number)

    def wait(self, seconds: float) -> bool:
        """Whether the tunnel ends within this time."""
        self._runs.join(seconds)
        return not self._runs.is_alive()

    def close(self) -> int:
        """Close the port, end the program, and return its exit code."""
        self._server.close()
        self._child.terminate()
        return self._child.wait()


def pump(port: int) -> None:
    """Pass stdin on to a port of this machine, and its answers to stdout, until one of the two ends."""
    end = socket.create_connection(("127.0.0.1", port))

    def send() -> None:
        while data := os.read(0, 1 << 16):
            end.sendall(data)
        end.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while data := end.recv(1 << 16):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def _far_end(path: str) -> None:
    """The far end. Nothing else may write to its stdout, which belongs to the frames. A server that is gone ends it."""

    def connect() -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
        except OSError as error:
            sys.exit(f"runner: the server at {path} does not answer: {error}")
        return end

    connect().close()
    os.write(1, _READY)
    _Link(sys.stdin.buffer, os.fdopen(1, "wb"), connect).run()


if __name__ == "__main__":
    _far_end(sys.argv[1])
