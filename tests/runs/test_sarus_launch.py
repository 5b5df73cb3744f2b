"""A launch with Sarus Suite: one EDF for both engines, a missing image is found before the queue, the lock has digests.

`sarusctl` is a stand-in that follows the documentation (tests/lab/sarusctl.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images import sarus_store
from runner.images.sarus_store import Stored
from runner.machine import probe
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import lock, rerun, shell
from runner.runs.image import LaunchImage
from runner.runs.launch import prepare
from runner.runs.plan import EDF, Request, RunPlan
from runner.runs.run import SUBMITTED, Run, save
from runner.runs.shell import ShellRequest
from tests.lab.sarus import Sarus
from tests.schemas import check

SHIPPED = Path(__file__).resolve().parents[2]
REFERENCE = "localhost/runner/ngc-deepspeed:0123456789ab"


@pytest.fixture
def sarus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sarus:
    """A site with Sarus Suite, whose programs of Slurm do nothing."""
    site = Sarus(tmp_path / "sarus")
    site.write_site(tmp_path)
    (tmp_path / "scratch").mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo"):
        (site.folder / "bin" / name).write_text("#!/bin/sh\n")
        (site.folder / "bin" / name).chmod(0o755)
    variables = {**site.environ, "HOME": str(tmp_path), "SCRATCH": str(tmp_path / "scratch"), "USER": "somebody"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("RUNNER_IMAGES", "RUNNER_RUNS", "XDG_CONFIG_HOME", "EDF_PATH"):
        monkeypatch.delenv(name, raising=False)
    return site


@pytest.fixture
def project(tmp_path: Path, sarus: Sarus) -> Project:
    root = tmp_path / "project"
    (root / "edf").mkdir(parents=True)
    (root / "runner.toml").touch()
    (root / "edf/registry.toml").write_text('image = "quay.io#a/b:1"\n')
    (root / "edf/path.toml").write_text('image = "/elsewhere/a.sqsh"\n')
    return Project(root, SHIPPED, root)


def record(sarus: Sarus, reference: str = REFERENCE, **changes: object) -> Stored:
    """An image that `runner import` has put into the store."""
    sarus.add(reference, "a" * 64)
    row = sarus_store.find(reference, sarus_store.list_images())
    assert row is not None
    known = Stored("ngc-deepspeed", reference, "ngc-deepspeed", row.id, "a" * 64, "sha256:5", probe.architecture(), 1.0)
    known = replace(known, labels={"runner.recipe": "ngc-deepspeed", "runner.content": "0123456789ab"}, **changes)  # type: ignore[arg-type]
    sarus_store.write_record(sarus.images, known)
    return known


def plan(project: Project, env: str, **changes: object) -> RunPlan:
    request = Request(**{"env": env, "site": "sarus-lab", "words": ("true",), **changes})  # type: ignore[arg-type]
    return prepare(request, project, os.environ, Quiet())


def test_one_edf_runs_with_both_engines(project: Project, sarus: Sarus) -> None:
    record(sarus)
    stored = plan(project, "ngc-ds-alps")
    squashfs = sarus.images / "ngc-deepspeed.sqsh"
    squashfs.write_bytes(b"hsqs" + bytes(92))
    file = plan(project, "ngc-ds-alps", engine="ce")
    assert tomllib.loads(stored.files[EDF])["image"] == REFERENCE
    assert tomllib.loads(file.files[EDF])["image"] == str(squashfs)
    assert "--edf=" in stored.script and "--environment=" in file.script


def test_the_lock_records_the_digests_of_the_stored_image(project: Project, sarus: Sarus) -> None:
    known = record(sarus)
    image = plan(project, "ngc-ds-alps").image
    table = lock._image(image)
    assert (table["reference"], table["digest"], table["manifest"]) == (REFERENCE, "a" * 64, "sha256:5")
    assert table["store_id"] == known.id and lock.recipe(image)["name"] == "ngc-deepspeed"


@pytest.mark.parametrize(
    ("env", "command"),
    [("ngc-ds-alps", "runner build ngc-deepspeed --import"), ("registry", "runner import docker://quay.io#a/b:1")],
)
def test_a_missing_image_is_found_before_the_queue(project: Project, sarus: Sarus, env: str, command: str) -> None:
    with pytest.raises(RunnerError, match="is not in Sarus Suite's store") as error:
        plan(project, env)
    assert error.value.fix == f"{command}\nor, with `runner launch` and `runner shell`: --build"


def test_half_an_image_counts_as_missing(project: Project, sarus: Sarus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarus_store, "CONFIGURATION", sarus.folder / "etc")
    sarus.add("quay.io/a/b:1", data=None)
    with pytest.raises(RunnerError, match="is not in Sarus Suite's store"):
        plan(project, "registry")


def test_a_tag_that_moved_between_build_and_launch_is_refused(project: Project, sarus: Sarus) -> None:
    record(sarus, id="f" * 12)
    with pytest.raises(RunnerError, match="is not the one that runner put there") as error:
        plan(project, "ngc-ds-alps")
    assert "the tag has moved" in error.value.why and "runner import ngc-deepspeed" in error.value.fix


def test_an_image_for_other_processors_is_refused(project: Project, sarus: Sarus) -> None:
    record(sarus, architecture="s390x")
    with pytest.raises(RunnerError, match="is an image for s390x"):
        plan(project, "ngc-ds-alps")


def test_the_path_of_a_squashfs_file_is_refused_with_what_to_write(project: Project, sarus: Sarus) -> None:
    with pytest.raises(RunnerError, match="the engine 'sarus' cannot use the value of image") as error:
        plan(project, "path")
    assert "${RUNNER_IMAGES}/NAME.sqsh" in error.value.fix


def test_without_sarusctl_only_an_image_of_a_registry_is_launched(
    project: Project, sarus: Sarus, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sarus.folder / "bin/sarusctl").unlink()
    assert any("is not checked" in note for note in plan(project, "registry").notes)
    with pytest.raises(RunnerError, match="sarusctl is not on PATH"):
        plan(project, "ngc-ds-alps")


def test_a_dry_run_needs_neither_image_nor_sarusctl(project: Project, sarus: Sarus) -> None:
    missing = plan(project, "ngc-ds-alps", dry_run=True)
    assert any("is not in Sarus Suite's store" in note for note in missing.notes)
    (sarus.folder / "bin/sarusctl").unlink()
    without = plan(project, "ngc-ds-alps", dry_run=True)
    assert any("sarusctl is not on PATH" in note for note in without.notes)
    assert missing.script == without.script


def test_build_brings_what_is_missing(project: Project, sarus: Sarus) -> None:
    """`--build` gets the command whose work it does; what it makes is looked up again."""
    asked: list[LaunchImage] = []

    def make(environment: object, image: LaunchImage, site: object) -> None:
        asked.append(image)
        record(sarus)

    request = Request(env="ngc-ds-alps", site="sarus-lab", words=("true",))
    assert prepare(request, project, os.environ, Quiet(), make).image.reference == REFERENCE
    assert asked[0].brought_by == ("runner", "build", "ngc-deepspeed", "--import")


def test_a_rerun_needs_its_image_in_the_store(sarus: Sarus, tmp_path: Path) -> None:
    table = lock._image(LaunchImage(REFERENCE, stored=record(sarus)))
    again = rerun.Locked(tmp_path / "lock.toml", {"image": table, "recipe": {"name": "ngc-deepspeed"}})
    report = Quiet()
    rerun.need_image(again, report)
    assert report.lines == []
    table["store_id"] = "f" * 12
    rerun.need_image(again, report)
    assert "and the run used ffffffffffff" in report.lines[0]
    sarus_store.remove(REFERENCE)
    with pytest.raises(RunnerError, match="is not in Sarus Suite's store") as error:
        rerun.need_image(again, report)
    assert error.value.fix.startswith("runner import ngc-deepspeed ")


# ---- runner shell


@pytest.mark.parametrize("terminal", [True, False])
def test_a_shell_is_a_step_with_the_flag_of_skybox(project: Project, sarus: Sarus, terminal: bool) -> None:
    sarus.add("quay.io/a/b:1")
    request = ShellRequest("registry", ("true",), site="sarus-lab", terminal=terminal)
    with shell.prepared(request, project, os.environ, Quiet()) as call:
        (edf,) = (word.partition("=")[2] for word in call.argv if word.startswith("--edf="))
        assert tomllib.loads(Path(edf).read_text())["image"] == "quay.io/a/b:1"
        assert (call.argv[0], "--pty" in call.argv) == ("srun", terminal)


def test_a_shell_on_the_login_node_is_opened_by_sarusctl(project: Project, sarus: Sarus) -> None:
    sarus.add("quay.io/a/b:1")
    done = runner(project, "shell", "registry", "--here", "--", "sh", "-c", "a b")
    assert done.stdout.startswith("ran quay.io/a/b:1: env RUNNER_RUN=")
    assert done.stdout.endswith(" PYTHONNOUSERSITE=1 sh -c a b\n")
    call = runner(project, "shell", "registry", "--here", "--dry-run", "--", "true").stdout
    assert "sarusctl run " in call and "/environment.toml -- env " in call


def test_the_engines_that_need_an_allocation_open_none_here(project: Project, sarus: Sarus) -> None:
    done = runner(project, "shell", "registry", "--here", "--engine", "ce", code=2)
    assert "the engine ce is an option of srun" in done.stderr


# ---- runner images, runner gc


def runner(project: Project, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "runner", *words)  # RUNNER_SITE selects the site
    done = subprocess.run(argv, cwd=project.root, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def use(sarus: Sarus, name: str, image: str) -> None:
    folder = sarus.folder / "runs" / name
    folder.mkdir(parents=True)
    created = f"2026-01-01T00:00:0{name[-1]}+00:00"
    save(Run(name, folder, "a", "sarus-lab", "slurm", created, SUBMITTED, ("1",), image=image))


def test_images_lists_the_store_with_what_runner_knows(project: Project, sarus: Sarus) -> None:
    record(sarus)
    sarus.add("quay.io/others/x:1", "b" * 64)
    use(sarus, "a-0001", REFERENCE)
    shown = runner(project, "images").stdout.splitlines()
    assert shown[0].split() == ["IMAGE", "ID", "SIZE", "AGE", "NAME", "RUNS", "SOURCE"]
    assert shown[1].startswith(REFERENCE) and shown[1].split()[-3:] == ["ngc-deepspeed", "a-0001", "ngc-deepspeed"]
    assert shown[2].split()[-3:] == ["not", "by", "runner"]
    mine, others = check("images", runner(project, "images", "--json").stdout)
    assert (mine["runs"], mine["imported"]["image_digest"], others["imported"]) == (["a-0001"], "a" * 64, None)


def test_gc_removes_by_sarusctl_what_no_run_uses(project: Project, sarus: Sarus) -> None:
    older, used = "localhost/runner/ngc-deepspeed:000000000001", "localhost/runner/ngc-deepspeed:000000000002"
    for number, reference in enumerate((older, used)):
        sarus.add(reference, str(number) * 64)
        row = sarus_store.find(reference, sarus_store.list_images())
        assert row is not None
        sarus_store.write_record(sarus.images, Stored("ngc-deepspeed", reference, "x", row.id, "", created=0.5))
    record(sarus)
    sarus.add("quay.io/others/x:1", "b" * 64)
    use(sarus, "a-0001", used)
    assert runner(project, "gc", "--dry-run").stdout == f"{older}\n" and sarus.calls() == []
    done = runner(project, "gc", "--json")
    assert check("gc", done.stdout)["removed"] == [older] and sarus.calls() == [f"rmi {older}"]
    left = {row.reference for row in sarus_store.list_images()}
    assert left == {used, REFERENCE, "quay.io/others/x:1"} and len(sarus_store.list_records(sarus.images)) == 2
    assert runner(project, "gc", used).stdout == f"{used}\n"
    assert "there is no image 'quay.io/others/x:1'" in runner(project, "gc", "quay.io/others/x:1", code=1).stderr


def test_sarusctl_missing_stops_images_and_gc_with_its_name(project: Project, sarus: Sarus) -> None:
    (sarus.folder / "bin/sarusctl").unlink()
    for verb in ("images", "gc"):
        assert "sarusctl is not on PATH" in runner(project, verb, code=1).stderr
    assert json.loads(runner(project, "site", "show", "--json").stdout)["name"] == "sarus-lab"
