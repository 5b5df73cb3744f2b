"""Where podman's storage dies with the job, one job builds and imports: on the lab's Slurm, the storage thrown away."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.commands.build import on_one_platform
from runner.errors import RunnerError
from runner.images.build.base import BuildOptions
from runner.images.build.job import BuildJob, check_account, goes_to_a_job, script, submission
from runner.images.recipe import Recipe
from runner.machine import probe
from runner.site_files import load_site
from tests.images.bench import TINY, Bench, content
from tests.lab.slurm import SlurmLab
from tests.waiting import until

SITE = """\
name = "alps-lab"
summary = "a site of the lab that builds in jobs"
[sources.lab]
title = "the lab"
date = "2026-11-21"
[values]
scheduler = {{ value = "slurm", source = "lab" }}
engine = {{ value = "ce", source = "lab" }}
architecture = {{ value = "{architecture}", source = "lab" }}
image_folder = {{ value = "{images}", source = "lab" }}
container_storage = {{ value = "{storage}", source = "lab" }}
"""
JOB = BuildJob(
    "cpu",
    Path("/home/a b/jobs/cpu-0001"),
    Path("/home/it's/project"),
    ("runner", "build", "$(id)"),
    "/dev/shm/${USER}",
    Path("/scratch/images"),
)


@pytest.fixture
def storage() -> Iterator[Path]:
    """Where the job's podman keeps its images: a short path, podman takes 50 characters."""
    path = Path(f"/tmp/rlab-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def alps(bench: Bench, slurm: SlurmLab, storage: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on the lab's Slurm whose site builds in jobs."""
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    folder = bench.folder / "home/.config/runner/sites"
    folder.mkdir(parents=True)
    text = SITE.format(architecture=probe.architecture(), images=bench.folder / "scratch", storage=storage)
    (folder / "alps-lab.toml").write_text(text)
    monkeypatch.delenv("RUNNER_IMAGES")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("RUNNER_SITE", "alps-lab")
    return bench


@pytest.mark.uses("shellcheck")
def test_the_script_is_bash_and_quotes_what_it_is_given() -> None:
    text = script(JOB)
    subprocess.run(("bash", "-n"), input=text, text=True, check=True)
    subprocess.run(("shellcheck", "--severity=warning", "-"), input=text, text=True, check=True)
    assert "runner build '$(id)' > \"$folder/path\" &" in text
    assert 'storage="/dev/shm/${USER}/runner-$SLURM_JOB_ID"' in text
    assert script(JOB) == text


def test_the_users_umask_decides_who_can_read_the_squashfs_file(tmp_path: Path) -> None:
    job = replace(JOB, folder=tmp_path, project=tmp_path, words=("sh", "-c", "umask"), storage=f"{tmp_path}/memory")
    done = subprocess.run(("bash", "-c", script(job)), env={**os.environ, "SLURM_JOB_ID": "7"}, umask=0o027, check=True)
    assert (done.returncode, (tmp_path / "path").read_text()) == (0, "0027\n")
    assert (tmp_path / "exit_code").read_text() == "0\n"
    assert stat.S_IMODE((tmp_path / "memory").stat().st_mode) == 0o700


def test_the_submission_takes_the_sites_values_and_the_users_flags_last() -> None:
    words = submission(JOB, load_site("alps-clariden"), ("--account=a01", "--time=5"))
    assert words[:2] == ("sbatch", "--parsable")
    assert {"--mem=450G", "--partition=normal", "--no-requeue"} < set(words)
    assert words[-3:] == ("--account=a01", "--time=5", "/home/a b/jobs/cpu-0001/build.sbatch")


def test_an_account_is_asked_for_before_submission() -> None:
    site = load_site("alps-clariden", {"XDG_CONFIG_HOME": "/nowhere"})
    with pytest.raises(RunnerError) as caught:
        check_account(site, (), {})
    assert caught.value.fix == "--sbatch=--account=PROJECT"
    check_account(site, ("--account=x",), {})
    check_account(site, (), {"SBATCH_ACCOUNT": "x"})
    check_account(replace(site, sbatch=("--account=x",)), (), {})


def test_only_such_sites_build_in_a_job_and_not_within_one() -> None:
    assert goes_to_a_job(load_site("alps-clariden"), {})
    assert not goes_to_a_job(load_site("alps-clariden"), {"SLURM_JOB_ID": "1"})
    assert not goes_to_a_job(load_site("generic-slurm"), {})


def test_a_build_for_an_import_has_the_platform_that_the_import_accepts() -> None:
    recipe = Recipe("a", Path("/a.toml"), Path("/"), Path("/Containerfile.a"))
    site = load_site("alps-clariden")
    assert on_one_platform(recipe, BuildOptions(), site) == (BuildOptions(platform="linux/arm64"), site)
    options, chosen = on_one_platform(recipe, BuildOptions(platform="linux/amd64"), site)
    assert (options.platform, chosen.architecture) == ("linux/amd64", "amd64")
    anywhere = load_site("generic-slurm")
    assert on_one_platform(recipe, BuildOptions(), anywhere) == (BuildOptions(), anywhere)
    assert on_one_platform(recipe, BuildOptions(platform="arm64"), anywhere)[1].architecture == "arm64"


@pytest.mark.uses("podman", "tar2sqfs", "busybox")
def test_one_job_builds_imports_and_gives_the_path(alps: Bench, storage: Path) -> None:
    alps.write("injob")
    done = alps.runner("build", "injob", "--import")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parent == alps.folder / "scratch"
    assert content(path, "etc/environment").endswith("GREETING=hello there\n")
    assert "step 1/" in done.stderr  # the job's log is shown while it runs
    assert not list(storage.iterdir())  # the storage went with the job
    assert "localhost/runner/injob" not in alps.engine("images", "--format={{.Repository}}")


@pytest.mark.uses("podman", "busybox")
def test_a_build_that_fails_in_its_job_is_told_with_its_words(alps: Bench, storage: Path) -> None:
    alps.write("badjob", TINY.replace("WORKDIR /srv", "RUN echo it went wrong; exit 3"))
    done = alps.runner("build", "badjob", "--import")
    assert (done.returncode, done.stdout) == (1, "")
    assert "failed with exit code 1" in done.stderr and "it went wrong" in done.stderr
    assert not list(storage.iterdir())


@pytest.mark.uses("podman", "busybox")
def test_ctrl_c_cancels_the_job_and_its_storage_goes(alps: Bench, slurm: SlurmLab, storage: Path) -> None:
    alps.write("longjob", TINY.replace("WORKDIR /srv", "RUN sleep 600"))
    child = alps.start("build", "longjob", "--import")
    log = alps.folder / "cache/runner/build-jobs/longjob-0001/log"
    until(lambda: log.exists() and "sleep 600" in log.read_text())
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=600) == 130
    queue = slurm.run(("squeue", "--noheader", "--name=build-longjob", "--states=PENDING,RUNNING")).stdout
    assert queue == ""
    until(lambda: not list(storage.iterdir()), "the job, which Slurm gives 30 s to end by itself", 240)


def test_a_dry_run_prints_the_jobs_script(alps: Bench) -> None:
    alps.write("dryjob")
    done = alps.runner("build", "dryjob", "--import", "--dry-run", "--sbatch=--constraint=x", "--", "--target", "a b")
    assert done.returncode == 0, done.stderr
    subprocess.run(("bash", "-n"), input=done.stdout, text=True, check=True)
    assert " -- --target 'a b'" in done.stdout
    assert "--constraint=x" in done.stderr
    assert not (alps.folder / "cache/runner/build-jobs").exists()
    done = alps.runner("build", "dryjob", "--dry-run", "--sbatch=--constraint=x")
    assert done.returncode == 2 and "without --import, dryjob is built on this machine" in done.stderr
