"""A model is pushed as a step of its own: whole, in one commit, and never without a token.

A small HTTP server stands in for the hub: it speaks the few calls that huggingface_hub makes to create a repository and
commit a folder, and keeps what it is given. What the real hub refuses otherwise is not shown here.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.training

from tests.jobs.conftest import JOBS  # noqa: E402


class Hub(BaseHTTPRequestHandler):
    """Creates repositories, takes large files by PUT and the rest in the commit itself."""

    def do_GET(self) -> None:
        self.answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def do_HEAD(self) -> None:
        self.answer({})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.large[hashlib.sha256(data).hexdigest()] = data  # type: ignore[attr-defined]
        self.answer({})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self.chunks()
        server = self.server
        server.calls.append(self.path)  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != "Bearer hf_good":
            self.answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            server.created = json.loads(body)  # type: ignore[attr-defined]
            self.answer({"url": f"{server.address}/me/model", "name": "me/model"})  # type: ignore[attr-defined]
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            self.answer(
                {
                    "files": [
                        {**each, "shouldIgnore": False, "uploadMode": mode[each["path"].endswith(".safetensors")]}
                        for each in files
                    ]
                }
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{server.address}/put/{each['oid']}"}}}  # type: ignore[attr-defined]
                for each in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            server.commits.append([json.loads(line) for line in body.splitlines() if line])  # type: ignore[attr-defined]
            url = f"{server.address}/me/model/commit/1"  # type: ignore[attr-defined]
            self.answer({"commitUrl": url, "commitOid": "1" * 40, "success": True})
        else:
            self.answer({})

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, value: object, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.large, server.calls, server.commits, server.created = {}, [], [], None  # type: ignore[attr-defined]
    server.address = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "tokenizer.json").write_text("{}")
    for training_state in ("optimizer.pt", "trainer_state.json", "complete.json", "converted.json", ".hidden"):
        (folder / training_state).write_text("not for the world")
    return folder


def push(model: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bare = {"PATH": os.environ["PATH"], "HOME": str(model.parent), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        (sys.executable, str(JOBS / "push.py"), str(model), "--repo=me/model", *words),
        env={**bare, **variables}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_the_folder_arrives_whole_and_nothing_of_the_training_with_it(hub: ThreadingHTTPServer, model: Path) -> None:
    done = push(model, "--private", HF_TOKEN="hf_good", HF_ENDPOINT=hub.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.address}/me/model/commit/1\n"
    # by the version of huggingface_hub
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    (lines,) = hub.commits
    given = {each["value"]["path"]: each["value"] for each in lines if each["key"] in ("file", "lfsFile")}
    assert set(given) == {"config.json", "model.safetensors", "tokenizer.json"}
    weights = (model / "model.safetensors").read_bytes()
    assert hub.large[given["model.safetensors"]["oid"]] == weights
    assert base64.b64decode(given["config.json"]["content"]) == (model / "config.json").read_bytes()


def test_without_a_token_nothing_is_asked_of_the_hub(hub: ThreadingHTTPServer, model: Path) -> None:
    done = push(model, HF_ENDPOINT=hub.address)
    assert done.returncode == 1
    assert "push: cannot log in to the hub" in done.stderr
    assert "HF_TOKEN=" in done.stderr
    assert hub.calls == []
    offline = push(model, HF_ENDPOINT=hub.address, HF_TOKEN="hf_good", HF_HUB_OFFLINE="1")
    assert (offline.returncode, hub.calls) == (1, [])
    assert "HF_HUB_OFFLINE is set" in offline.stderr


def test_a_wrong_token_and_a_hub_out_of_reach_are_errors_with_a_way_out(hub: ThreadingHTTPServer, model: Path) -> None:
    wrong = push(model, HF_TOKEN="hf_bad", HF_ENDPOINT=hub.address)
    assert wrong.returncode == 1
    assert "401" in wrong.stderr and "write access" in wrong.stderr and "Traceback" not in wrong.stderr
    away = push(model, HF_TOKEN="hf_good", HF_ENDPOINT="http://127.0.0.1:9")
    assert away.returncode == 1
    assert "push again" in away.stderr and "Traceback" not in away.stderr


def test_what_is_not_whole_is_not_sent(hub: ThreadingHTTPServer, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}})
    )
    done = push(model, HF_TOKEN="hf_good", HF_ENDPOINT=hub.address)
    assert done.returncode == 1
    assert "model-00002-of-00002.safetensors is missing" in done.stderr
    assert hub.calls == []


def test_it_needs_no_torch(model: Path) -> None:
    """A login node has huggingface_hub at best."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import push; from training.converting import hub; hub.push; "
        "import huggingface_hub; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run((sys.executable, "-c", code, str(JOBS)), capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr
