"""What a job names on the hub is brought whole or not at all, and is then read without network."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.training

import prefetch  # noqa: E402
from tests.jobs.hub import Hub, commit_of, serving  # noqa: E402

JOBS = Path(__file__).resolve().parents[2] / "jobs"
MODEL = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "model.safetensors": b"\x00" * 300_000,
    "pytorch_model.bin": b"\x01" * 300_000,
    "original/consolidated.00.pth": b"\x02" * 10,
    ".gitattributes": "x",
}
CARD = {"configs": [{"config_name": "en", "data_files": "en/*.jsonl"}, {"config_name": "de", "data_files": "de/*"}]}
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "three"))
README = (
    "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n- config_name: de\n  data_files: de/*.jsonl\n---\n"
)
DATA = {".card.json": json.dumps(CARD), "README.md": README, "en/a.jsonl": ROWS, "de/a.jsonl": ROWS[:15] + "\n"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving(tmp_path / "repositories") as found:
        found.put("model", "org/small", MODEL)
        found.put("dataset", "org/words", DATA)
        yield found


def environ(hub: Hub, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RUNNER_"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "RUNNER_RETRY_SECONDS": "0.01", **variables}


def words(home: Path, *wanted: dict[str, str], options: tuple[str, ...] = ()) -> tuple[str, ...]:
    named = [word for each in wanted for word in ("--wanted", json.dumps(each))]
    return (sys.executable, str(JOBS / "prefetch.py"), "--home", str(home), *options, *named)


def fetch(hub: Hub, home: Path, *wanted: dict[str, str], code: int = 0, options: tuple[str, ...] = ()) -> Any:
    call = words(home, *wanted, options=options)
    done = subprocess.run(call, env=environ(hub), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done


SMALL = {"kind": "model", "name": "org/small"}
WORDS = {"kind": "dataset", "name": "org/words"}


def note(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "prefetched" / name).read_text())
    return found


def test_what_is_named_is_fetched_and_noted(hub: Hub, tmp_path: Path) -> None:
    """The safetensors and not the same weights again in other formats; the note has every file with its size."""
    folder = Path(fetch(hub, tmp_path / "home", SMALL).stdout.strip())
    commit = commit_of(hub.files("model", "org/small"))
    assert folder == tmp_path / "home/hub/models--org--small/snapshots" / commit
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    record = note(tmp_path / "home", "models--org--small--main.json")
    assert record["files"] == {name: len(MODEL[name]) for name in sorted(names)}
    assert (folder.parents[1] / "refs/main").read_text() == commit


def test_a_second_time_asks_for_no_file(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path / "home", SMALL)
    hub.requests.clear()
    assert "0 B to download" in fetch(hub, tmp_path / "home", SMALL).stderr
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_a_dry_run_tells_sizes_and_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "home", SMALL, options=("--dry-run", "--json"))
    assert "300 kB to download" in done.stderr
    assert json.loads(done.stdout)["files"]["model.safetensors"] == 300_000
    assert not (tmp_path / "home/prefetched").exists()
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_parts(hub: Hub, tmp_path: Path) -> None:
    """A tokenizer brings no weights; a dataset's configuration no other one's data."""
    home = tmp_path / "home"
    fetch(hub, home, {**SMALL, "part": "tokenizer"}, {**WORDS, "part": "en"})
    assert set(note(home, "models--org--small--main--tokenizer.json")["files"]) == {
        "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert set(note(home, "datasets--org--words--main--en.json")["files"]) == {"README.md", "en/a.jsonl"}


def test_a_connection_that_breaks_is_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 200_000
    folder = Path(fetch(hub, tmp_path / "home", SMALL).stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize(("answer", "asked"), [(None, 3), (503, 3), (403, 1)])
def test_a_hub_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, answer: int | None, asked: int
) -> None:
    """The library then says that the file is not in the cache; older ones do not try again themselves."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setenv("RUNNER_RETRY_SECONDS", "0")
    calls = []

    def download() -> str:
        calls.append(answer)
        if len(calls) == 3:
            return "file"
        cause: Any = ConnectionError("refused")
        if answer:
            cause.response = SimpleNamespace(status_code=answer)
        raise LocalEntryNotFoundError("cannot find the file in the local cache") from cause

    with contextlib.suppress(LocalEntryNotFoundError):
        assert prefetch.patiently(download) == "file"
    assert len(calls) == asked


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", ""])
def test_the_stored_token_is_where_the_library_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folders = {"HF_HOME": tmp_path / "hub", "XDG_CACHE_HOME": tmp_path / "cache/huggingface"}
    token = folders.get(variable, tmp_path / "home/.cache/huggingface") / "token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_token")
    with monkeypatch.context() as patched:
        for name in ("HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN_PATH"):
            patched.delenv(name, raising=False)
        patched.setenv("HOME", str(tmp_path / "home"))
        if variable:
            patched.setenv(variable, str(tmp_path / {"HF_HOME": "hub", "XDG_CACHE_HOME": "cache"}[variable]))
        patched.setattr(os, "environ", dict(os.environ))  # `prepare` sets more than is restored
        prefetch.prepare(tmp_path / "new")
        assert os.environ["HF_TOKEN_PATH"] == str(token)


def test_a_fetch_that_is_killed_leaves_no_half_file(hub: Hub, tmp_path: Path) -> None:
    """kill -9 in the middle: neither note nor file is seen, and the next start fetches what is missing."""
    home = tmp_path / "home"
    hub.slow = True
    process = subprocess.Popen(words(home, SMALL), env=environ(hub), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any("model.safetensors" in request for request in hub.requests if request.startswith("GET")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (home / "prefetched").exists()
    assert not list(home.glob("hub/*/snapshots/*/model.safetensors"))
    hub.slow = False
    folder = Path(fetch(hub, home, SMALL).stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_a_damaged_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = Path(fetch(hub, home, SMALL).stdout.strip())
    os.truncate((folder / "model.safetensors").resolve(), 1000)
    assert "300 kB to download" in fetch(hub, home, SMALL).stderr
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"kind": "model", "name": "org/none"}, "the hub has no repository of that name"),
        ({**SMALL, "revision": "v9"}, "no revision 'v9'"),
        ({"kind": "model", "name": "org/gated"}, "grants access only on request"),
        ({"kind": "model", "name": "org/wrong"}, "should have 5 bytes"),
    ],
)
def test_what_cannot_be_had_is_one_clear_error(hub: Hub, tmp_path: Path, wanted: dict[str, str], expected: str) -> None:
    for name in ("org/gated", "org/wrong"):
        hub.put("model", name, {"odd.txt": "text"})
    hub.gated.add("org/gated")
    hub.wrong_size.add("odd.txt")
    done = fetch(hub, tmp_path / "home", wanted, code=1)
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "home/prefetched").exists()


def test_a_hub_that_is_not_reached_is_named(tmp_path: Path) -> None:
    with serving(tmp_path / "repositories") as gone:
        pass
    done = fetch(gone, tmp_path / "home", SMALL, code=1)
    assert f"check that {gone.url} can be reached" in done.stderr


def test_a_dry_run_asks_once(tmp_path: Path) -> None:
    """Where the hub is not reached, it ends at once: without the pauses of a fetch, which can wait for a network."""
    with serving(tmp_path / "repositories") as gone:
        pass
    call = words(tmp_path / "home", SMALL, options=("--dry-run",))
    slow = environ(gone, RUNNER_RETRY_SECONDS="1000")
    done = subprocess.run(call, env=slow, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"check that {gone.url} can be reached" in done.stderr


LOAD = """
import os, sys
from pathlib import Path
sys.path.insert(0, {jobs!r})
from training import run as run_folder
run = run_folder.from_environment(os.environ, "x")
run_folder.point_caches(run, os.environ)
from training import dataset as reading
print(reading.load("org/words", "en", "train", False)["text"][:])
"""


def test_a_job_without_network_reads_what_was_fetched(hub: Hub, tmp_path: Path) -> None:
    """By the hub's own name, in the cache that runs share, with nobody to ask."""
    fetch(hub, tmp_path / "huggingface", {**WORDS, "part": "en"})
    hub.requests.clear()
    variables = {"HF_HUB_OFFLINE": "1", "RUNNER_CACHE": str(tmp_path), "RUNNER_RUN": str(tmp_path / "run")}
    done = subprocess.run(
        (sys.executable, "-c", LOAD.format(jobs=str(JOBS))),
        env=environ(hub, **variables), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['one', 'two', 'three']", done.stderr
    assert not hub.requests


def test_files_by_url_are_kept_if_their_checksum_is_right_and_read_without_network(hub: Hub, tmp_path: Path) -> None:
    """A connection that breaks is tried again; other content is refused and leaves nothing; the job reads the copy."""
    files = {
        "words.jsonl": ROWS,
        "vocab.json": json.dumps({letter: number for number, letter in enumerate('"abcdefghijklmnopqrstuvwxyz')}),
        "merges.txt": "#version: 0.2\n",
    }
    hub.put("dataset", "any/files", files)
    urls = {
        name: f"{hub.url}/datasets/any/files/resolve/main/{name}#sha256={hashlib.sha256(text.encode()).hexdigest()}"
        for name, text in files.items()
    }
    url, _, checksum = urls["merges.txt"].rpartition("=")
    urls["merges.txt"] = f"{url}={checksum.upper()}"
    hub.cut["words.jsonl"] = 10
    home = tmp_path / "huggingface"
    wanted = [{"kind": "file", "name": url} for url in urls.values()]
    folder = Path(fetch(hub, home, *wanted).stdout.splitlines()[0])
    assert (folder / "words.jsonl").read_text() == ROWS
    assert note(home, f"files--{folder.name}.json")["files"] == {"words.jsonl": len(ROWS)}
    hub.requests.clear()
    fetch(hub, home, *wanted)
    assert not hub.requests, "a complete file is not downloaded again"
    (folder / "words.jsonl").write_text("damaged")
    fetch(hub, home, *wanted)
    assert (folder / "words.jsonl").read_text() == ROWS

    other = {"kind": "file", "name": urls["words.jsonl"][:-64] + "0" * 64}
    assert (
        f"is not the expected file\n  because: its SHA-256 is {folder.name}" in fetch(hub, home, other, code=1).stderr
    )
    assert not list(home.glob(f"*/*/*/{'0' * 64}/*")) + list(home.glob("*/*000.json"))

    hub.requests.clear()
    script = (sys.executable, str(JOBS / "megatron_data.py"), "--output-prefix", str(tmp_path / "x"), "--workers=1")
    flags = ("--input", urls["words.jsonl"], "--vocab-file", urls["vocab.json"], "--merge-file", urls["merges.txt"])
    variables = {"HF_HUB_OFFLINE": "1", "RUNNER_CACHE": str(tmp_path), "RUNNER_RUN": str(tmp_path / "run")}
    command = (*script, *flags, "--tokenizer-type=GPT2BPETokenizer")
    done = subprocess.run(command, env=environ(hub, **variables), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ids = [15, 14, 5, 20, 23, 15, 20, 8, 18, 5, 5]
    assert (tmp_path / "x_text_document.bin").read_bytes() == b"".join(each.to_bytes(2, "little") for each in ids)
    assert not hub.requests
