"""runner images and runner gc: what a run names stays; what a queued or running job uses cannot be taken away."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportRequest
from runner.machine import files, sessions
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs.run import SUBMITTED, Run, save
from tests.images.handmade import file, layout, tar


class Place:
    """A project with an image folder of three versions of one image, the last one linked, and its runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.images, self.runs = root, root / "images", root / "runs"
        (root / "runner.toml").touch()
        self.paths: list[Path] = []
        for number in range(3):
            image = root / f"{number}/app"
            image.parent.mkdir()
            layout(image, [tar([file("version", str(number).encode())])])
            project = Project(root, root, root)
            made = import_image(ImportRequest(f"oci:{image}", self.images, project, {}), Quiet())
            self.paths.append(made.squashfs.path)

    def run(self, name: str, image: Path, pid: int) -> None:
        """A run without a scheduler whose process is `pid`."""
        (self.runs / name).mkdir(parents=True)
        save(
            Run(name, self.runs / name, "app", "local", "local", f"2026-01-01T00:00:0{name[-1]}+00:00", SUBMITTED,
                (f"local-{pid}",), image=str(image), host=platform.node(), process=sessions.identity(pid))
        )  # fmt: skip

    def __call__(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "RUNNER_IMAGES": str(self.images), "RUNNER_RUNS": str(self.runs)}
        argv = (sys.executable, "-m", "runner", *words, "--site", "local")
        done = subprocess.run(argv, cwd=self.root, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done

    def left(self) -> list[str]:
        return sorted(path.name for path in self.images.iterdir() if not path.name.startswith("."))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The process id of a session that lives."""
    child = subprocess.Popen(("sleep", "600"), start_new_session=True)
    yield child.pid
    child.kill()
    child.wait()


def ended() -> int:
    """The process id of a process that has ended."""
    child = subprocess.Popen(("true",), start_new_session=True)
    child.wait()
    return child.pid


def test_images_tells_who_names_a_file(place: Place, sleeper: int) -> None:
    place.run("app-0001", place.paths[0], sleeper)
    rows = {row["path"]: row for row in json.loads(place("images", "--json").stdout)}
    assert rows[str(place.paths[0])]["runs"] == ["app-0001"]
    assert rows[str(place.paths[2])]["links"] == ["app.sqsh"]
    assert datetime.fromisoformat(rows[str(place.paths[2])]["created"]).tzinfo is not None
    assert place("images").stdout.splitlines()[0].split() == ["FILE", "SIZE", "AGE", "LINKS", "RUNS", "SOURCE"]


def test_gc_takes_what_nothing_names(place: Place) -> None:
    place.run("app-0001", place.paths[0], ended())
    before = place.left()
    assert place("gc", "--dry-run").stdout == f"{place.paths[1]}\n"
    assert place.left() == before
    assert place("gc").stdout == f"{place.paths[1]}\n"
    assert not [name for name in place.left() if name.startswith(place.paths[1].stem)]
    assert place.paths[0].exists() and place.paths[2].exists()
    assert place("gc", "--ended").stdout == f"{place.paths[0]}\n"
    assert place("gc", "--ended").stdout == ""
    assert (place.images / "app.sqsh").resolve() == place.paths[2]


def test_gc_sees_the_users_own_links_whatever_their_suffix(place: Place) -> None:
    (place.images / "stable.squashfs").symlink_to(place.paths[0].name)
    (place.images / "loop").symlink_to("loop")
    elsewhere = place.root / place.paths[1].name
    elsewhere.touch()
    (place.images / "other.sqsh").symlink_to(elsewhere)
    assert place("gc").stdout == f"{place.paths[1]}\n"
    assert place("gc", place.paths[0].name).stdout == f"{place.paths[0]}\n"
    assert (place.images / "stable.squashfs").is_symlink()


def test_what_gc_cannot_remove_keeps_no_other_file_and_is_the_error(place: Place) -> None:
    first, second = place.paths[:2]
    with files.locked(second):  # as an import does; it comes first, because it is newer
        done = place("gc", code=1)
    assert (done.stdout, first.exists(), second.exists()) == (f"{first}\n", False, True)
    assert "1 of 3 files" in done.stderr and "another process has locked" in done.stderr


def test_gc_refuses_what_a_running_job_uses(place: Place, sleeper: int) -> None:
    place.run("app-0001", place.paths[2], sleeper)
    place.run("app-0002", place.paths[0], sleeper)
    refused = place("gc", "app.sqsh", code=1)
    assert "is in use" in refused.stderr and "runner cancel app-0001" in refused.stderr
    assert place("gc", "--ended").stdout == f"{place.paths[1]}\n"
    assert place.paths[0].exists() and place.paths[2].exists()


def test_gc_of_a_named_file_takes_its_link_too(place: Place) -> None:
    assert place("gc", "app.sqsh").stdout == f"{place.paths[2]}\n"
    assert not (place.images / "app.sqsh").is_symlink()
    wrong = place("gc", "ap.sqsh", code=1)
    assert "ap.sqsh" in wrong.stderr


def test_gc_touches_no_file_of_others(place: Place) -> None:
    (place.images / "theirs.sqsh").write_text("precious")
    place("gc", "theirs.sqsh", code=1)
    place("gc", "--ended")
    assert (place.images / "theirs.sqsh").read_text() == "precious"
