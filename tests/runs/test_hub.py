"""A launch knows what its job names on the hub, and whether that is here, before anything is submitted."""

import importlib
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import hub, prefetch, shell
from runner.runs.hub import Repository
from runner.runs.job import Job
from runner.runs.plan import Request
from runner.site_files import load_site

ROOT = Path(__file__).resolve().parents[2]
MODEL, DATA = Repository("model", "org/m"), Repository("dataset", "org/d")
FILE = Repository("file", f"https://example.org/vocab.json#sha256={'0a' * 32}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ()),
        (("--model_name_or_path", "gpt2"), (Repository("model", "gpt2"),)),
        (("--model_name_or_path=org/m", "--model_revision=v1"), (Repository("model", "org/m", "v1"),)),
        (("--model-name-or-path", "org/m", "--dataset-name", "org/d"), (MODEL, DATA)),
        (("--dataset_name", "org/d", "--dataset_config", "en"), (Repository("dataset", "org/d", part="en"),)),
        (("--dataset_name", "org/d", "--dataset_config_name", "en"), (Repository("dataset", "org/d", part="en"),)),
        (("--tokenizer_name", "gpt2"), (Repository("model", "gpt2", part="tokenizer"),)),
        (("--model_name_or_path", "gpt2", "--tokenizer_name", "gpt2"), (Repository("model", "gpt2"),)),
        (("--model_name_or_path", "/models/m", "--dataset_name", "./data"), ()),
        (("--model_name_or_path", "~/m", "--dataset_name", "rows.jsonl"), ()),
        (("--dataset_name", "folder/here"), ()),
        (("--dataset_name", "a/b/c"), ()),
        (("--vocab-file", FILE.name, f"--merge-file={FILE.name}", "--input", "x", FILE.name), (FILE,)),
        (("--vocab-file", "https://example.org/vocab.json"), ()),
        (
            ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "org/m"),
            (MODEL._replace(part="tokenizer"),),
        ),
        (("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "tokenizer.model"), ()),
        (("--model_name_or_path",), ()),
        (("--model_name_or_path", "--packing"), ()),
        (("--config", "train.yaml"), (Repository("model", "org/y"), Repository("dataset", "org/d"))),
        (("--config", "train.yaml", "--model_name_or_path", "org/m"), (MODEL, DATA)),
    ],
)
def test_names_among_the_arguments(tmp_path: Path, arguments: tuple[str, ...], expected: tuple) -> None:
    """Names as the hub has them; not what is a path, a file, or here under that name."""
    (tmp_path / "folder/here").mkdir(parents=True)
    (tmp_path / "train.yaml").write_text('model_name_or_path: "org/y"  # ours\ndataset_name: org/d\npacking: true\n')
    assert hub.repositories(arguments, (tmp_path,)) == expected


def test_the_note_bears_the_name_that_the_script_gives_it() -> None:
    sys.path.insert(0, str(ROOT / "jobs"))
    try:
        payload = importlib.import_module("prefetch")
    finally:
        sys.path.remove(str(ROOT / "jobs"))
    for each in (
        MODEL,
        DATA,
        Repository("model", "gpt2", "refs/pr/1", "tokenizer"),
        Repository("dataset", "a/b", part="x/y"),
    ):
        assert payload.Wanted(**each._asdict()).note == each.note


def noted(home: Path, each: Repository, seen_at: Path | None = None) -> Path:
    """A repository as a prefetch leaves it; `seen_at`: where the home lay for it, in a container."""
    folder = f"hub/{each.kind}s--{each.name.replace('/', '--')}/snapshots/abc"
    (home / folder / "sub").mkdir(parents=True)
    (home / folder / "sub/file.json").write_text("{}\n")
    (home / hub.NOTES).mkdir(exist_ok=True)
    record = {**each._asdict(), "folder": str((seen_at or home) / folder), "files": {"sub/file.json": 3}}
    (home / hub.NOTES / each.note).write_text(json.dumps(record))
    return home / folder / "sub/file.json"


def test_states(tmp_path: Path) -> None:
    """Here, when every file has its size; wherever the one who fetched has seen the cache."""
    file = noted(tmp_path, MODEL, Path("/elsewhere"))
    assert hub.cache_state(tmp_path, MODEL) == hub.State(True)
    assert hub.cache_state(tmp_path, DATA) == hub.State(False)
    file.write_text("{")
    assert "has 1 bytes, not 3" in hub.cache_state(tmp_path, MODEL).fault
    file.unlink()
    assert "is missing" in hub.cache_state(tmp_path, MODEL).fault
    (tmp_path / hub.NOTES / MODEL.note).write_text("{")
    assert "cannot be read" in hub.cache_state(tmp_path, MODEL).fault


def settled(
    folder: Path,
    *arguments: str,
    command: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    site_env: Mapping[str, str] | None = None,
    strict: bool = True,
) -> tuple[Job, tuple[str, ...]]:
    environment = Environment("plain", None, "")
    script = None if command else "jobs/x.py"
    job = Job("train", environment, script=script, command=command, arguments=arguments, env=env or {})
    project, site = Project(None, folder, folder), replace(load_site("local"), env=site_env or {})
    return hub.choose_offline(job, environment, project, site, {"RUNNER_CACHE": str(folder)}, strict=strict)


NAMES = ("--model_name_or_path", "org/m", "--dataset_name", "org/d")


def test_a_job_whose_names_are_all_here_is_kept_offline(tmp_path: Path) -> None:
    for each in (MODEL, DATA):
        noted(tmp_path / hub.HOME, each)
    job, notes = settled(tmp_path, *NAMES)
    assert (job.env, notes) == ({"HF_HUB_OFFLINE": "1"}, ())
    assert settled(tmp_path, command=("python", "x.py", *NAMES))[0].env == {"HF_HUB_OFFLINE": "1"}, "a command too"
    assert settled(tmp_path, *NAMES, env={"HF_HUB_OFFLINE": "0"})[0].env == {"HF_HUB_OFFLINE": "0"}
    job, notes = settled(tmp_path, *NAMES, "--push_to_hub")
    assert not job.env and "pushes to the hub" in notes[0]


def test_an_offline_job_reads_the_cache_of_the_prefetch(tmp_path: Path) -> None:
    """The default of its library is in the home folder. HF_HOME of the job, the environment or the site stays."""
    for home in (tmp_path / hub.HOME, tmp_path / "own"):
        for each in (MODEL, DATA):
            noted(home, each)
    assert settled(tmp_path, *NAMES)[0].hub_in_cache
    assert settled(tmp_path, *NAMES, env={"HF_HUB_OFFLINE": "1"})[0].hub_in_cache
    assert not settled(tmp_path, *NAMES, env={"HF_HUB_OFFLINE": "0"})[0].hub_in_cache
    assert not settled(tmp_path, *NAMES, "--push_to_hub")[0].hub_in_cache
    own = {"HF_HOME": str(tmp_path / "own")}
    for job, _ in (settled(tmp_path, *NAMES, env=own), settled(tmp_path, *NAMES, site_env=own)):
        assert job.env["HF_HUB_OFFLINE"] == "1" and not job.hub_in_cache
    (tmp_path / "own" / hub.NOTES / DATA.note).unlink()
    assert "dataset 'org/d'" in settled(tmp_path, *NAMES, site_env=own)[1][0]


def test_what_was_not_fetched_is_a_warning_with_the_command(tmp_path: Path) -> None:
    noted(tmp_path / hub.HOME, MODEL)
    job, notes = settled(tmp_path, *NAMES)
    assert not job.env
    assert (
        "dataset 'org/d'" in notes[0] and "model" not in notes[0] and "`runner prefetch` with the same job" in notes[0]
    )
    assert settled(tmp_path) == (Job("train", job.environment, script="jobs/x.py"), ())


def test_a_file_that_is_missing_is_found_before_submission(tmp_path: Path) -> None:
    file = noted(tmp_path / hub.HOME, MODEL)
    file.unlink()
    with pytest.raises(RunnerError, match="incomplete in the cache") as caught:
        settled(tmp_path, *NAMES)
    assert str(file) in caught.value.why and "`runner prefetch` with the same job" in caught.value.fix
    assert "incomplete" in settled(tmp_path, *NAMES, strict=False)[1][0], "a dry run warns"


def test_a_file_by_url_must_be_prefetched(tmp_path: Path) -> None:
    """The job does not download it, with the network or without."""
    words = ("--vocab-file", FILE.name)
    with pytest.raises(RunnerError, match="cannot find the file 'https://example") as caught:
        settled(tmp_path, *words)
    assert caught.value.fix.endswith("`runner prefetch` with the same job, environment and arguments")
    assert settled(tmp_path, command=("pip", "install", FILE.name))[1] == (), "pip downloads it itself"
    noted(tmp_path / hub.HOME, FILE)
    assert settled(tmp_path, *words)[0].env == {"HF_HUB_OFFLINE": "1"}
    url, _, checksum = FILE.name.rpartition("=")
    capitals = settled(tmp_path, "--vocab-file", f"{url}={checksum.upper()}")
    assert capitals[0].env == {"HF_HUB_OFFLINE": "1"}, "a checksum may have capital letters"


def test_a_job_that_is_offline_and_lacks_something_is_refused(tmp_path: Path) -> None:
    """Unless the hub's own cache has some commit of it, fetched by hand."""
    home, words = tmp_path / "own", ("--model_name_or_path", "org/m")
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": "${RUNNER_CACHE}/own"}
    with pytest.raises(RunnerError, match="cannot find the model 'org/m'"):
        settled(tmp_path, *words, env=env)
    (home / "hub/models--org--m/snapshots/abc").mkdir(parents=True)
    assert settled(tmp_path, *words, env=env)[1] == ()


@pytest.mark.parametrize(
    ("job", "script", "words"),
    [
        (None, None, ("python", "x.py", *NAMES)),
        ("command", None, NAMES[2:]),
        ("script", None, NAMES[2:]),
        (None, "x", NAMES),
    ],
)
def test_a_prefetch_reads_the_words_that_a_launch_gets(
    tmp_path: Path, job: str | None, script: str | None, words: tuple[str, ...]
) -> None:
    """The words after -- are the command, or else they follow the arguments of the job file."""
    texts = {
        "edf/plain.toml": 'image = ""\n',
        "jobs/x.py": "",
        "jobs/command.toml": f'command = ["python", "x.py"]\narguments = {json.dumps(NAMES[:2])}\n',
        "jobs/script.toml": f'script = "jobs/x.py"\narguments = {json.dumps(NAMES[:2])}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    request = Request(job=job, script=script, words=words, env="plain", site="local", engine="host")
    project = Project(tmp_path, tmp_path / "shipped", tmp_path)
    assert prefetch.plan(request, project, {"RUNNER_CACHE": "/c"}, Quiet()).wanted == (MODEL, DATA)


@pytest.mark.parametrize("engine", ["host", "podman"])
def test_a_prefetch_has_the_login_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A container may not see the home folder. The value is in no command line."""
    pytest.importorskip("huggingface_hub")
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text("hf_of-the-login-123\n")
    started = shell.Call(("sh",), {"RUNNER_CACHE": "/c"}, tmp_path)
    monkeypatch.setattr(shell, "prepared", lambda *words: nullcontext(started))  # starting podman is not the point here
    wanted = prefetch.Prefetch((MODEL,), tmp_path / "hub", engine, None, {}, load_site("local"))
    environ, project = {"HOME": str(tmp_path)}, Project(None, ROOT, tmp_path)
    with prefetch.prepared(wanted, project, environ, Quiet(), ()) as call:
        assert call.env["HF_TOKEN"] == "hf_of-the-login-123" and "hf_of" not in " ".join(call.argv)
    with prefetch.prepared(wanted, project, {**environ, "HF_TOKEN": ""}, Quiet(), ()) as call:
        assert "HF_TOKEN" not in call.env
