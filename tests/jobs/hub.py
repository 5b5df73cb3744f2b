"""A server that speaks the part of the Hugging Face hub's API which a download needs. It stands in for the hub.

Repositories are folders: ROOT/models/ORG/NAME/..., ROOT/datasets/ORG/NAME/... Each has one commit, by its content.
`cut` ends each answer of a file after so many bytes, once per file, as a network does that breaks.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """The server's address, what it holds, and what it was asked."""

    url: str
    root: Path
    requests: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    slow: bool = False
    gated: set[str] = field(default_factory=set)
    wrong_size: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)
    """old name -> name, as `wikitext` -> `Salesforce/wikitext`"""

    def put(self, kind: str, name: str, files: dict[str, bytes | str]) -> None:
        for path, content in files.items():
            target = self.root / f"{kind}s" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)

    def files(self, kind: str, name: str) -> dict[str, bytes]:
        folder = self.root / f"{kind}s" / name
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def commit_of(files: dict[str, bytes]) -> str:
    listing = "".join(f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in files.items())
    return hashlib.sha1(listing.encode()).hexdigest()


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub("", root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            if found := re.fullmatch(r"/api/(model|dataset)s/(.+?)/(revision|tree)/([^/]+)(/.*)?", path):
                self.information(found[1], found[2], found[3], found[4], (found[5] or "/").strip("/"))
            elif found := re.fullmatch(r"/api/(model|dataset)s/(.+)", path):
                if found[2] in hub.moved:
                    return self.redirect(f"/api/{found[1]}s/{hub.moved[found[2]]}")
                self.information(found[1], found[2], "", "main")
            elif found := re.fullmatch(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)", path):
                self.file("dataset" if found[1] else "model", found[2], found[4], body=body)
            else:
                self.refuse(404, "EntryNotFound")

        def redirect(self, where: str) -> None:
            self.send_response(307)
            self.send_header("Location", where)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def refuse(self, status: int, code: str) -> None:
            text = json.dumps({"error": code}).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(text)

        def information(self, kind: str, name: str, what: str, revision: str, folder: str = "") -> None:
            files = hub.files(kind, name)
            commit = commit_of(files)
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            if not files:
                return self.refuse(404, "RepoNotFound")
            if revision not in ("main", commit):
                return self.refuse(404, "RevisionNotFound")
            sizes = {path: len(data) + (path in hub.wrong_size) for path, data in files.items()}
            below = {path: data for path, data in files.items() if path.startswith(f"{folder}/" if folder else "")}
            deep = "recursive=True" in self.path
            tree = [
                {"type": "file", "path": path, "size": sizes[path], "oid": hashlib.sha1(data).hexdigest()}
                for path, data in below.items()
                if deep or path.rpartition("/")[0] == folder
            ]
            folders = {path.rpartition("/")[0] for path in below} - {"", folder}
            tree += [{"type": "directory", "path": path, "size": 0, "oid": commit} for path in sorted(folders)]
            siblings = [{"rfilename": path, "size": sizes[path], "blobId": "0"} for path in files]
            card = json.loads(files.get(".card.json", b"{}"))
            about = {"id": name, "sha": commit, "siblings": siblings, "cardData": card, "private": False}
            self.document(tree if what == "tree" else about)

        def document(self, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def file(self, kind: str, name: str, path: str, *, body: bool) -> None:
            files = hub.files(kind, name)
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            if path not in files:
                return self.refuse(404, "EntryNotFound")
            data = files[path]
            start = int(re.fullmatch(r"bytes=(\d+)-.*", self.headers["Range"])[1]) if "Range" in self.headers else 0  # type: ignore[index]
            self.send_response(206 if "Range" in self.headers else 200)
            digest = (
                hashlib.sha256 if path.endswith(".safetensors") else hashlib.sha1
            )  # as for files in LFS, and others
            self.send_header("ETag", f'"{digest(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit_of(files))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - start))
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if body:
                self.send_body(path, data, start)

        def send_body(self, path: str, data: bytes, start: int) -> None:
            stop = hub.cut.pop(path, None)
            if stop is not None:
                self.wfile.write(data[start:stop])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            try:
                for at in range(start, len(data), 1 << 16):
                    self.wfile.write(data[at : at + (1 << 16)])
                    if hub.slow:
                        threading.Event().wait(0.05)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    return Handler
