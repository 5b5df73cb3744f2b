"""The tunnel of `runner open`: what a server says at once, before its client, arrives."""

import socket
import threading
from queue import SimpleQueue

from runner.machine.tunnel import _HEAD, _Link

HELLO = b"SSH-2.0-OpenSSH\r\n"


class FarEnd:
    """Both pipes to a far end whose server answers while the near end still opens the connection."""

    def __init__(self) -> None:
        self.frames = SimpleQueue[bytes]()
        self.asked = 0
        self.handled = threading.Event()

    def read(self, _size: int) -> bytes:
        self.asked += 1
        if self.asked == 3:  # the head and the data of the answer were read, and it was passed on or dropped
            self.handled.set()
        return self.frames.get()

    def write(self, frame: bytes) -> int:
        number, size = _HEAD.unpack(frame[: _HEAD.size])
        if size == -2:
            self.frames.put(_HEAD.pack(number, len(HELLO)))
            self.frames.put(HELLO + b"\n")
            assert self.handled.wait(60)
        return len(frame)

    def flush(self) -> None: ...


def test_a_server_that_speaks_first_is_heard() -> None:
    far = FarEnd()
    link = _Link(far, far)  # type: ignore[arg-type]
    runs = threading.Thread(target=link.run, daemon=True)
    runs.start()
    client, end = socket.socketpair()
    client.settimeout(60)
    link.open(0, end)
    assert client.recv(100) == HELLO
    far.frames.put(b"")
    runs.join(60)
    assert not runs.is_alive() and client.recv(100) == b""
