"""Secrets reach the step, and nothing else: neither a file, nor a command line, nor what the scheduler tells."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

TOKEN, KEY = "hf_" + "Ab3" * 11, "0123456789abcdef" * 2 + "-wandb"
ASKS = """\
printf %s "$HF_TOKEN" | sha256sum
printf %s "$WANDB_API_KEY" | sha256sum
touch "$RUNNER_RUN/up"
until [ -e "$RUNNER_RUN/go" ]; do sleep 0.2; done
"""


def command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def artefacts(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for path, _, names in os.walk(folder):
            yield from (Path(path) / name for name in names if (Path(path) / name).is_file())


@pytest.fixture
def safe(cluster: Runner, project: Path, busybox_sqsh: Path, tmp_path: Path) -> Runner:
    """A user with one secret in the file, another in the environment."""
    file = tmp_path / "home/.config/runner/secrets"
    write(file.parent, {file.name: f"# mine\nHF_TOKEN={TOKEN}\n"})
    file.chmod(0o600)
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/asks.sh": ASKS})
    return Runner(project, {**cluster.environ, "WANDB_API_KEY": KEY}, cluster.site)


@pytest.mark.uses("bubblewrap", "squashfuse")
@pytest.mark.parametrize("engine", ["ce", "sandbox"])
def test_secrets_reach_the_step_and_stand_nowhere(safe: Runner, slurm: SlurmLab, tmp_path: Path, engine: str) -> None:
    folder = safe.launch("--env", "box", "--engine", engine, "--script", "asks", "--tag", "x")
    until((folder / "up").exists, "the step")
    job_id = safe.status("last")["job_id"]
    told = slurm.run(("scontrol", "show", "job", "--details", job_id)).stdout
    told += slurm.run(("scontrol", "write", "batch_script", job_id, "-")).stdout + command_lines()
    (folder / "go").touch()
    safe.wait("last", lambda one: one["state"] == "COMPLETED")
    log = (folder / "job.log").read_text()
    assert [hashlib.sha256(value.encode()).hexdigest() in log for value in (TOKEN, KEY)] == [True, True]
    shown = [safe(*words).stdout for words in (("history", "--json"), ("logs",), ("why", "last"), ("diff", "last"))
             if words[0] != "diff"]  # fmt: skip
    assert not any(value in text for value in (TOKEN, KEY) for text in (told, *shown))
    secret_file = tmp_path / "home/.config/runner/secrets"
    seen = [path for path in artefacts(tmp_path) if path != secret_file]
    assert {"job.sbatch", "environment.toml", "lock.toml", "run.json", "environment.sh"} <= {path.name for path in seen}
    leaks = [path for path in seen if any(value.encode() in path.read_bytes() for value in (TOKEN, KEY))]
    assert not leaks
    # what came from the file is not in Slurm's own keeping either; what was exported at launch is, with all variables
    kept = [path for path in artefacts(slurm.folder) if path.name != "munge.socket.lock"]  # nobody may read that one
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]


@pytest.mark.uses("bubblewrap", "squashfuse")
@pytest.mark.parametrize("words", [("--env", "box", "--engine", "sandbox", "--script", "asks"), ("own.sbatch",)])
def test_no_word_of_env_is_a_secret(safe: Runner, project: Path, words: tuple[str, ...]) -> None:
    """`env NAME=VALUE` would show it to every user of the node, if only for a moment."""
    recorder = f'#!/bin/sh\nprintf "%s\\n" "$@" >>{project}/words\nexec /usr/bin/env "$@"\n'
    digest = ASKS.split("touch")[0]
    own = f"#!/bin/bash\n#SBATCH -N 1\n{digest}"
    write(project, {"bin/env": recorder, "own.sbatch": own, "jobs/asks.sh": digest})
    (project / "bin/env").chmod(0o755)
    path = {"PATH": f"{project}/bin:{safe.environ['PATH']}", "MINE": "a b"}
    _, log = Runner(project, {**safe.environ, **path}, safe.site).finished(*words)
    assert hashlib.sha256(KEY.encode()).hexdigest() in log
    assert "MINE=a b\n" in (project / "words").read_text() and KEY not in (project / "words").read_text()


@pytest.mark.uses("squashfuse")
@pytest.mark.parametrize("words", [(), ("--engine", "sandbox")])
def test_logins_in_the_home_folder_reach_the_container(
    cluster: Runner, project: Path, busybox_sqsh: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """After `hf auth login` and `wandb login` on the login node; the container does not see the home folder."""
    netrc = f"machine api.wandb.ai\n  login user\n  password {KEY}\n"
    write(tmp_path / "home", {".cache/huggingface/token": TOKEN, ".netrc": netrc})
    asks = f"#!/bin/sh\nls {tmp_path}/home/.netrc 2>&1\n{ASKS}"
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/asks.sh": asks.split("touch")[0]})
    folder, log = cluster.finished("--engine", "pyxis", *words, "--env", "box", "--script", "asks")
    assert "No such file" in log
    assert [hashlib.sha256(value.encode()).hexdigest() in log for value in (TOKEN, KEY)] == [True, True]
    assert not [
        path for path in artefacts(folder) if TOKEN.encode() in path.read_bytes() or KEY.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("words", [("--", "echo", f"--token={TOKEN}"), ("--", "sh", "-c", f": {KEY}")])
def test_a_launch_that_would_write_a_secret_down_is_refused(safe: Runner, words: tuple[str, ...]) -> None:
    done = safe("launch", "--env", "box", *words, code=1)
    assert "would contain the value of" in done.stderr and TOKEN not in done.stderr and KEY not in done.stderr
    assert not safe.made()


def test_code_that_holds_a_secret_is_not_copied(safe: Runner, project: Path) -> None:
    write(project, {"jobs/leak.sh": f"login {TOKEN}\n"})
    done = safe("launch", "--env", "box", "--script", "leak", code=1)
    assert "jobs/leak.sh" in done.stderr and TOKEN not in done.stderr
    assert not safe.made()


def test_a_file_of_secrets_that_others_can_read_stops_the_launch(safe: Runner, tmp_path: Path) -> None:
    (tmp_path / "home/.config/runner/secrets").chmod(0o644)
    assert "chmod 600" in safe("launch", "--env", "box", "--", "true", code=1).stderr
