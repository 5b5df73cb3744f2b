"""`runner cluster` in a project and a home folder of its own, with programs in place of those of the clouds.

Neither AWS nor Google Cloud is on PyPI, npm or in Debian: the programs here record how they are called, and
answer as the documentation of pcluster 3.16.1, of gcloud and of the Cluster Toolkit 1.95.0 says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# the pauses between two questions to a tool are 20 seconds; here, they are short
START = "import sys; from runner.commands import cluster; cluster._PAUSE_SECONDS = 0.02; from runner.cli import run; "
START += "sys.exit(run(sys.argv[1:]))"
STAND_IN = """\
#!{python}
import json, pathlib, sys, time
here = pathlib.Path({folder!r})
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
answers = json.loads((here / "answers.json").read_text())
line = " ".join([{name!r}, *sys.argv[1:]])
for word in answers:
    if word in line:
        queue = answers[word]
        code, text = queue[0] if len(queue) == 1 else queue.pop(0)
        (here / "answers.json").write_text(json.dumps(answers))
        if text == "SLEEP":
            print("google_filestore_instance.homefs: Still creating...", flush=True)
            time.sleep(60)
        print(text, end=chr(10) if text else '')
        sys.exit(code)
print("no answer for", line, file=sys.stderr)
sys.exit(9)
"""


@dataclass(frozen=True)
class Cloud:
    """A project, and programs whose answers are set with `answers`: a part of a command -> [(exit code, output)].

    The answers are given one after the other, and the last one for ever.
    """

    folder: Path
    environ: dict[str, str]

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def programs(self, *names: str) -> None:
        for name in names:
            path = self.folder / "bin" / name
            path.write_text(STAND_IN.format(python=sys.executable, folder=str(self.folder), name=name))
            path.chmod(0o755)

    def answers(self, **answers: Any) -> None:
        found = {word.replace("_", "-"): answer for word, answer in answers.items()}
        (self.folder / "answers.json").write_text(json.dumps(found))

    def file(self, name: str, text: str) -> Path:
        path = self.project / "clusters" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        argv = (sys.executable, "-c", START, *words)
        return subprocess.Popen(argv, cwd=self.project, env=self.environ, stdin=subprocess.DEVNULL, **settings)

    def __call__(self, *words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        argv, env = (sys.executable, "-c", START, *words), {**self.environ, **environ}
        done = subprocess.run(
            argv, cwd=self.project, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    """A project without any of the clouds' programs."""
    for name in ("project", "home", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "runner.toml").write_text("")
    environ = {key: text for key, text in os.environ.items()
               if not key.startswith(("AWS_", "PROJECT_ID", "GOOGLE_", "RUNNER_"))}  # fmt: skip
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return Cloud(tmp_path, {**environ, "PATH": path, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "src")})
