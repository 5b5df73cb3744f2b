"""From a Containerfile to a finished run in one command: `launch --build`; and what the run keeps of its image."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, clean_environ, write
from tests.images.bench import TINY
from tests.lab.podman import Podman
from tests.lab.slurm import SlurmLab

RECIPE = 'containerfile = "Containerfile.tiny"\ncontext = ["containers/busybox"]\n'


@pytest.fixture
def line(project: Path, tmp_path: Path, slurm: SlurmLab, podman: Podman) -> Runner:
    """A project with a recipe and an environment on its image; the lab's podman and Slurm."""
    write(
        project,
        {
            "Containerfile.tiny": TINY,
            "containers/tiny.toml": RECIPE,
            "edf/tiny.toml": 'image = "${RUNNER_IMAGES}/tiny.sqsh"\n',
        },
    )
    shutil.copy("/bin/busybox", project / "containers/busybox")
    engines = {name: value for name, value in podman.environ.items() if name.startswith(("CONTAINERS_", "REGISTRY_"))}
    more = {
        **engines,
        "XDG_RUNTIME_DIR": podman.environ["XDG_RUNTIME_DIR"],
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "RUNNER_IMAGES": str(tmp_path / "images"),
    }
    return Runner(project, {**clean_environ(tmp_path / "home", slurm.environ), **more}, "local")


@pytest.mark.uses("podman", "tar2sqfs", "squashfuse", "bubblewrap")
def test_from_a_containerfile_to_runs_on_every_site(line: Runner, tmp_path: Path) -> None:
    """One command builds, imports and runs; the next ones use the same file, without a scheduler and on Slurm."""
    say = ("--", "sh", "-c", "echo $GREETING from inside; cat $RUNNER_CACHE/note")
    missing = line("launch", "--env", "tiny", *say, code=1)
    assert "runner build tiny\n" in missing.stderr and "runner import tiny\n" in missing.stderr
    keep = ("--", "sh", "-c", "echo $GREETING from inside; echo kept >$RUNNER_CACHE/note")
    first, log = line.finished("--build", "--env", "tiny", "--engine", "sandbox", *keep)
    assert "hello there from inside\n" in log
    (known,) = (json.loads(path.read_text()) for path in (tmp_path / "images").glob("*.json"))
    sidecar = tmp_path / "images" / known["path"].replace(".sqsh", ".json")
    sidecar.write_text(json.dumps({**known, "sha256": ""}))  # as after a large import on an old processor
    for site, engine in (("generic-slurm", "ce"), ("generic-pyxis", "pyxis")):
        runner = Runner(line.project, line.environ, site)
        folder, log = runner.finished("--env", "tiny", "--engine", engine, *say)
        assert "hello there from inside\nkept\n" in log  # what one run keeps, all others see
    lock = tomllib.loads((first / "lock.toml").read_text())
    image, recipe = lock["image"], lock["recipe"]
    assert recipe["name"] == "tiny" and len(recipe["content"]) == 12 and len(recipe["files_sha256"]) == 64
    path = Path(image["reference"])
    assert path.parent == tmp_path / "images" and path == (tmp_path / "images/tiny.sqsh").resolve()
    assert len(image["sha256"]) == 64 and image["digest"]
    assert tomllib.loads((folder / "environment.toml").read_text())["image"] == str(path)
    later = tomllib.loads((folder / "lock.toml").read_text())["image"]
    assert json.loads(sidecar.read_text()) == known and later["sha256"] == known["sha256"] == image["sha256"]


@pytest.mark.uses("podman", "tar2sqfs", "squashfuse", "bubblewrap")
def test_a_newer_image_does_not_reach_an_older_run(line: Runner) -> None:
    """The stable symlink moves on; a shell in the older run still sees its own image."""
    older, _ = line.finished("--build", "--env", "tiny", "--engine", "sandbox", "--", "true")
    write(line.project, {"Containerfile.tiny": TINY.replace("hello there", "something new")})
    line("build", "tiny")
    line("import", "tiny")
    done = line("shell", older.name, "--", "sh", "-c", "echo $GREETING")
    assert done.stdout == "hello there\n"
    done = line("shell", "tiny", "--engine", "sandbox", "--", "sh", "-c", "echo $GREETING")
    assert done.stdout == "something new\n"


@pytest.mark.uses("podman", "unsquashfs", "squashfuse", "bubblewrap")
def test_what_a_command_reads_is_recorded_and_stored_together(line: Runner) -> None:
    """On Slurm; the trace beside the recipe is used by the next import. A command outside of a container has none."""
    line("build", "tiny", "--import")
    on_slurm = Runner(line.project, line.environ, "generic-slurm")
    words = ("--", "sh", "-c", "cat /etc/environment; exit 3")
    done = on_slurm("shell", "tiny", "--trace", "containers/tiny.trace", *words, code=3)
    assert "GREETING=hello there\n" in done.stdout
    trace = (line.project / "containers/tiny.trace").read_text()
    assert "/bin/busybox\n" in trace and "/etc/environment\n" in trace
    done = line("import", "tiny")
    count = len(trace.splitlines())
    assert f"{count} of the {count} files of the trace are stored together" in done.stderr
    done = line("shell", "tiny", "--engine", "sandbox", "--", "cat", "/etc/environment")
    assert "GREETING=hello there\n" in done.stdout
    done = line("shell", "tiny", "--engine", "host", "--trace", "other", "--", "true", code=1)
    assert "only the engine 'sandbox'" in done.stderr and not (line.project / "other").exists()
