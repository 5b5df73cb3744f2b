"""`runner prefetch`, then a launch that needs no network: by the command line alone, against a server for the hub."""

import os
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.jobs.hub import serving
from tests.schemas import check

pytest.importorskip("huggingface_hub")
HOST = ("--engine", "host", "--env", "plain")
JOB = 'script = "jobs/look.py"\nlauncher = "none"\narguments = ["--model_name_or_path", "org/small"]\n'
LOOK = "import os\nprint('offline', os.environ.get('HF_HUB_OFFLINE'), 'in', os.environ.get('HF_HOME'))\n"


def test_a_prefetched_job_runs_offline_and_a_damaged_one_is_not_submitted(local: Runner, tmp_path: Path) -> None:
    other = "raise SystemExit('a script of the project, which only has the same name')\n"
    write(local.project, {"jobs/look.py": LOOK, "jobs/look.toml": JOB, "jobs/prefetch.py": other})
    with serving(tmp_path / "repositories") as hub:
        hub.put("model", "org/small", {"config.json": "{}", "model.safetensors": b"x" * 5000})
        before = local("launch", "--dry-run", *HOST, "look")
        assert "not prefetched: model 'org/small'" in before.stderr
        assert "HF_HUB_OFFLINE" not in before.stdout
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "RUNNER_RETRY_SECONDS": "0.01"}
        done = local("prefetch", *HOST, "look", extra_environ=variables)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(local.runs / ".cache/huggingface/hub/models--org--small")
    _, log = local.finished(*HOST, "look")
    assert f"offline 1 in {local.runs}/.cache/huggingface\n" in log
    os.truncate((folder / "model.safetensors").resolve(), 10)
    refused = local("launch", *HOST, "look", code=1)
    assert f"{folder / 'model.safetensors'} has 10 bytes, not 5000" in refused.stderr
    assert "`runner prefetch` with the same job" in refused.stderr


def test_a_job_that_names_nothing_needs_nothing(local: Runner) -> None:
    write(local.project, {"jobs/look.py": LOOK})
    done = local("prefetch", *HOST, "--script", "look", "--", "--model_name_or_path", "./here")
    assert done.stdout == ""
    assert "nothing to download" in done.stderr


def test_a_machine_without_huggingface_hub_is_told_what_to_do(local: Runner, tmp_path: Path) -> None:
    """Each Python that was tried is named."""
    write(tmp_path, {"bin/python3": "#!/bin/sh\nexit 1\n", "bin/python": "#!/bin/sh\nexit 1\n"})
    for name in ("python3", "python"):
        (tmp_path / "bin" / name).chmod(0o755)
    blocked = tmp_path / "blocked" / "huggingface_hub.py"
    write(tmp_path, {"blocked/huggingface_hub.py": "raise ImportError('not here')\n"})
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    python_path = os.pathsep.join((str(blocked.parent), local.environ["PYTHONPATH"]))
    words = ("prefetch", *HOST, "--", "sh", "--model_name_or_path", "org/m")
    done = local(*words, code=1, extra_environ={**path, "PYTHONPATH": python_path})
    assert "no Python on this machine has huggingface_hub" in done.stderr
    assert str(tmp_path / "bin/python3") in done.stderr and "pip install huggingface_hub" in done.stderr


def test_json(local: Runner, tmp_path: Path) -> None:
    with serving(tmp_path / "repositories") as hub:
        hub.put("dataset", "org/words", {"a.jsonl": "{}\n"})
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        words = ("prefetch", *HOST, "--json", "--", "sh", "--dataset_name", "org/words")
        found = check("prefetch", local(*words, extra_environ=variables).stdout)
    assert (found["kind"], found["name"], found["files"]) == ("dataset", "org/words", {"a.jsonl": 3})


@pytest.mark.parametrize("engine", ["ce", "sandbox"])
def test_the_container_gets_the_whole_program(cluster: Runner, project: Path, python_sqsh: Path, engine: str) -> None:
    """Its image has Python and nothing else: what is missing is the library, not a file of the program."""
    write(project, {"edf/box.toml": environment(python_sqsh)})
    words = ("--env", "box", "--engine", engine, "--", "python3", "train.py", "--model_name_or_path", "a/b")
    done = cluster("prefetch", *words, code=None)
    assert "has no huggingface_hub" in done.stderr and "internal error" not in done.stderr
