"""Layers of an engine's storage as the tars they came from, bit by bit: a program of its own, with stdlib alone.

containers/storage unpacks a layer into a folder and keeps the rest of its tar - headers, padding, and whatever
follows the end - in `DRIVER-layers/ID.tar-split.gz`: one JSON object per line, in the order of the tar.
    {"type": 2, "payload": BASE64, "position": 0}            bytes as they are: headers, padding; may be empty
    {"type": 1, "name": "etc/x", "size": 7, "payload": BASE64 of the CRC-64, "position": 1}     a file's content
    {"type": 1, "name": "etc/", "payload": null, "position": 3}      a folder, link, whiteout or empty file: no bytes
A name that is not UTF-8 stands as BASE64 in `name_raw`.
Source: vbatts/tar-split 0.11, tar/storage/entry.go; what podman 4.3.1 writes, read.

Usage: `python -I tar_split.py` with a socket (SOCK_SEQPACKET) as stdin. Each message is JSON {"split": FILE, "root":
FOLDER} with two descriptors: the tar is written to the first; then "ok" to the second, or why it cannot be. It ends
when the other end of the socket is closed. It runs apart because a user's storage holds files of other ids, which
only a process in podman's user namespace may read; and so that this work has a processor of its own.
"""

import binascii
import gzip
import json
import os
import posixpath
import signal
import socket
from collections.abc import Iterator
from typing import Any

_BUFFER = 1 << 18
# files up to this size are gathered with the headers around them; longer ones go from the page cache to the pipe
_SMALL = 1 << 16
_SEGMENT = 2
_SYS_OPENAT2 = 437  # the same on every processor
_RESOLVE_IN_ROOT = 0x10  # Source: linux/openat2.h


class Damaged(Exception):
    """The tar cannot be put together again."""


class Folder:
    """The files below a folder; no name and no link leads out of it."""

    def __init__(self, root: str) -> None:
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.parent = b""
        self.inside = os.dup(self.root)

    def open(self, name: bytes) -> int:
        """A descriptor of a file. Raises OSError."""
        # unpacking has made a/../b to b before it looked at any link
        if b".." in name or name.endswith(b"."):
            name = posixpath.normpath(b"/" + name)
        parent, _, last = name.rpartition(b"/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            # files come in the order of the tar, most from the same folder
            if parent != self.parent:
                self._enter(parent)
        except NotADirectoryError:
            # a link to a folder, as O_NOFOLLOW and O_DIRECTORY together say it
            return open_in_root(self.root, name, flags)
        return os.open(last, flags, dir_fd=self.inside)

    def _enter(self, parent: bytes) -> None:
        """Make `inside` the folder `parent`."""
        here = os.dup(self.root)
        for part in parent.split(b"/"):
            if part in (b"", b"."):
                continue
            try:
                inner = os.open(
                    part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here
                )
            finally:
                os.close(here)
            here = inner
        os.close(self.inside)
        self.inside, self.parent = here, parent


def open_in_root(root: int, name: bytes, flags: int) -> int:
    """A file whose path goes through links, each of them read as if `root` were /."""
    import ctypes

    class How(ctypes.Structure):
        _fields_ = (
            ("flags", ctypes.c_uint64),
            ("mode", ctypes.c_uint64),
            ("resolve", ctypes.c_uint64),
        )

    how = How(flags, 0, _RESOLVE_IN_ROOT)
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(_SYS_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how))
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), os.fsdecode(name))
    return found


class Writer:
    """Bytes on their way into a pipe."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.waiting = bytearray()

    def add(self, data: bytes) -> None:
        self.waiting += data
        if len(self.waiting) >= _BUFFER:
            self.flush()

    def add_file(self, source: int, size: int, name: bytes) -> None:
        """A file's content, which must have exactly `size` bytes."""
        if size <= _SMALL:
            data = os.read(source, size + 1)
            if len(data) != size:
                raise Damaged(f"the length of {os.fsdecode(name)!r} has changed")
            self.add(data)
            return
        self.flush()
        done = 0
        while done < size:
            count = os.sendfile(self.target, source, done, size - done)
            if not count:
                raise Damaged(f"{os.fsdecode(name)!r} has become shorter")
            done += count

    def flush(self) -> None:
        left = memoryview(self.waiting)
        while left:
            left = left[os.write(self.target, left) :]
        left.release()
        self.waiting = bytearray()


def rebuild(split: str, root: str, target: int) -> None:
    """Write the tar of a layer. Raises Damaged or OSError."""
    folder, writer = Folder(root), Writer(target)
    for entry in entries(split):
        if entry.get("type") == _SEGMENT:
            writer.add(binascii.a2b_base64(entry.get("payload") or ""))
        elif size := entry.get("size"):
            raw = entry.get("name_raw")
            name = binascii.a2b_base64(raw) if raw else os.fsencode(entry["name"])
            source = folder.open(name)
            try:
                writer.add_file(source, size, name)
            finally:
                os.close(source)
    writer.flush()


def entries(split: str) -> Iterator[dict[str, Any]]:
    """What a tar-split file says, in order."""
    with gzip.open(split) as lines:
        while some := lines.readlines(_BUFFER):  # many at once: three times as fast as line by line
            yield from json.loads(b"[" + b",".join(some) + b"]")


def serve(requests: socket.socket) -> None:
    """Answer until the other end is closed; each layer by a child of its own, so that one left half-read disturbs
    no other."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            answer(message, descriptors[0], descriptors[1])
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def answer(message: bytes, target: int, status: int) -> None:
    """One layer, and how it went."""
    said = "ok"
    try:
        asked = json.loads(message)
        rebuild(asked["split"], asked["root"], target)
    except BrokenPipeError:
        return  # who asked has what it wanted
    except OSError as error:
        said = f"{error.strerror or error}: {os.fsdecode(error.filename or '')}"
    except (
        Damaged,
        EOFError,
        binascii.Error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        said = f"{type(error).__name__}: {error}"
    os.write(status, said.encode(errors="replace")[:4000])


if __name__ == "__main__":
    with socket.socket(fileno=0) as stdin:
        serve(stdin)
