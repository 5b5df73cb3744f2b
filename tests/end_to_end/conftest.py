"""What the end-to-end tests stand on: the command line as a user calls it, in a project of its own, on the lab."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.slurm import SlurmLab
from tests.waiting import SECONDS

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Runner:
    """`runner` in a project folder, with an environment in which it finds a cluster, or none."""

    project: Path
    environ: Mapping[str, str]
    site: str

    @property
    def runs(self) -> Path:
        return self.project / "runs"

    def made(self) -> list[Path]:
        """What launches have left in the folder of runs, their numbers and cache apart."""
        entries = self.runs.iterdir() if self.runs.exists() else ()
        return [path for path in entries if not path.name.startswith((".numbers", ".cache", ".code"))]

    def __call__(self, *words: str, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end; its exit code must be `code` (None: any)."""
        settings: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 240,
            "cwd": self.project,
            **options,
        }
        extra: Mapping[str, str] = settings.pop("extra_environ", {})
        done: subprocess.CompletedProcess[str]
        try:
            done = subprocess.run(
                self.argv(*words), env={**self.environ, **extra}, stdin=subprocess.DEVNULL, **settings
            )
        except subprocess.TimeoutExpired as error:
            logs = [path.read_text(errors="replace") for path in sorted(self.runs.glob("*/job.log"))]
            raise AssertionError("\n".join((str(error), str(error.stdout), str(error.stderr), *logs))) from None
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def argv(self, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "runner", words[0], "--site", self.site, *words[1:])

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a command line that is watched while it runs."""
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.project, **options}
        return subprocess.Popen(self.argv(*words), env=dict(self.environ), stdin=subprocess.DEVNULL, **settings)

    def launch(self, *words: str, **options: Any) -> Path:
        """Launch and return the run folder."""
        return self.runs / self("launch", *words, **options).stdout.strip()

    def finished(self, *words: str, code: int = 0, **options: Any) -> tuple[Path, str]:
        """Launch, wait for the end; returns the run folder and job.log."""
        folder = self.runs / self("launch", "--wait", *words, code=code, **options).stdout.strip()
        return folder, (folder / "job.log").read_text()

    def status(self, run: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self("status", "--json", run).stdout)
        return found[0]

    def wait(self, run: str, until: Callable[[dict[str, Any]], bool], seconds: float = SECONDS) -> dict[str, Any]:
        """The status as soon as it is as wanted."""
        deadline = time.monotonic() + seconds
        while not until(status := self.status(run)):
            assert time.monotonic() < deadline, status
            time.sleep(0.2)
        return status


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def quoted(text: str) -> str:
    """A text as TOML's basic string, which takes JSON's escapes but no surrogate pairs, and escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def environment(image: Path | None, mounts: Sequence[str] = (), env: Mapping[str, str] | None = None) -> str:
    """The text of an EDF."""
    lines = [f"image = {quoted(str(image))}"] if image else []
    lines += [f"mounts = [{', '.join(map(quoted, mounts))}]"] if mounts else []
    lines += ["[env]", *(f"{name} = {quoted(value)}" for name, value in (env or {}).items())]
    return "\n".join(lines) + "\n"


def clean_environ(home: Path, base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which nothing of the developer's own settings counts."""
    kept = {name: value for name, value in base.items() if not name.startswith(("RUNNER_", "EDF_", "XDG_", "GIT_"))}
    kept["PYTHONPATH"] = os.pathsep.join((str(SOURCE), *filter(None, (base.get("PYTHONPATH"),))))
    return {**kept, "HOME": str(home)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script, a data folder and an environment without an image."""
    root = tmp_path / "project"
    write(
        root,
        {
            "runner.toml": 'environment = "plain"\n',
            "edf/plain.toml": environment(None, env={"FROM_EDF": "edf"}),
            "jobs/where.sh": 'echo "script $0"; echo "here $PWD"; for word; do printf "<%s>\\n" "$word"; done\n',
            "data/note.txt": "from the mount\n",
        },
    )
    (tmp_path / "home").mkdir()
    return root


@pytest.fixture
def local(project: Path, tmp_path: Path) -> Runner:
    """`runner --site local`, with no Slurm in sight."""
    environ = clean_environ(tmp_path / "home", os.environ)
    return Runner(project, {**environ, "SLURM_CONF": "/nonexistent"}, "local")


@pytest.fixture
def cluster(project: Path, tmp_path: Path, slurm: SlurmLab) -> Runner:
    """`runner --site generic-slurm` on the private cluster, whose srun has --environment."""
    return Runner(project, clean_environ(tmp_path / "home", slurm.environ), "generic-slurm")


@pytest.fixture
def pyxis_cluster(project: Path, tmp_path: Path, slurm: SlurmLab) -> Runner:
    """`runner --site generic-pyxis` on the same cluster."""
    return Runner(project, clean_environ(tmp_path / "home", slurm.environ), "generic-pyxis")
