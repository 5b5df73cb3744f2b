"""A web server that misbehaves as a test tells it: real sockets, one thread per connection."""

from __future__ import annotations

import http.server
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Seen:
    """What a request asked for."""

    path: str
    headers: dict[str, str]
    span: tuple[int, int] | None
    form: str
    method: str


class Request(http.server.BaseHTTPRequestHandler):
    """One request, with ways to answer it rightly and wrongly."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self, form: str = "") -> None:
        self.server.hostile.requests.append(Seen(self.path, dict(self.headers.items()), self.span, form, self.command))
        self.server.hostile.behave(self)

    def do_POST(self) -> None:
        self.do_GET(self.rfile.read(int(self.headers["Content-Length"])).decode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_CONNECT(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def span(self) -> tuple[int, int] | None:
        """Start and end (exclusive) of the range that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole, right answer; `Content_Type="x"` makes the header Content-Type."""
        self.head(status, {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}})
        self.wfile.write(body if self.command != "HEAD" else b"")

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def blob(self, data: bytes, *, ranges: bool = True, only: int | None = None) -> None:
        """The blob or the range that is asked for; with `only`, the connection ends after so many bytes of it."""
        start, end = self.span if self.span and ranges else (0, len(data))
        part = data[start:end]
        head = {"Content-Length": str(len(part))}
        if self.span and ranges:
            head["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.head(206 if self.span and ranges else 200, head)
        self.wfile.write(part[:only])
        if only is not None and only < len(part):
            self.hang_up()

    def hang_up(self, *, reset: bool = False) -> None:
        """End the connection now, with a reset where asked."""
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def stall(self) -> None:
        """Send nothing more until the client leaves or the test ends."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.server.hostile.ended.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


def download_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("download-")]


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    hostile: Hostile

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are what is tested


class Hostile:
    """The server inside `with`; `behave` answers each request, `requests` keeps them in order."""

    def __init__(self, behave: Callable[[Request], None], *, certificate: str = "", host: str = "127.0.0.1") -> None:
        self.behave = behave
        self.requests: list[Seen] = []
        self.ended = threading.Event()
        self._server = Server((host, 0), Request)
        self._server.hostile = self
        self.port = self._server.server_address[1]
        self.address = f"{host}:{self.port}"
        self.url = f"{'https' if certificate else 'http'}://{self.address}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def asked(self, path: str) -> list[Seen]:
        """The requests whose path begins so."""
        return [request for request in self.requests if request.path.startswith(path)]
