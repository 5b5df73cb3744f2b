"""build: real podman, tiny images; the same inputs answer at once, and nothing half-made is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.images.build import build as building
from runner.images.build.base import BuildContext, ResolvedBase, debian_reference, known_bases
from runner.images.build.build import plan_build
from runner.images.build.host_settings import HostSettings
from runner.images.build.steps import Step, bash, run_logged, run_quietly
from runner.images.engine import Engine, open_store
from runner.images.recipe import Base, Recipe
from runner.images.sources.engine_storage import Image, from_inspect
from runner.machine.report import Quiet
from tests.images.bench import TINY, Bench, content, end_processes_of, processes_of
from tests.lab.registry import Registry
from tests.schemas import check
from tests.waiting import until

pytestmark = pytest.mark.uses("busybox", "podman")
SLEEP = f"sleep {10_000_000 + os.getpid()}"  # of this process alone


def fresh(name: str) -> str:
    """A Containerfile whose layers no other test has."""
    return TINY.replace("WORKDIR", f"LABEL test={name}-{os.getpid()}-{time.monotonic_ns()}\nWORKDIR")


def test_the_same_inputs_answer_at_once(bench: Bench) -> None:
    bench.write("one", fresh("one"))
    first = bench.build("one")
    assert first.reference == f"localhost/runner/one:{first.tag}"
    assert len(first.tag) == 12
    bench.report.lines.clear()
    assert bench.build("one").id == first.id
    assert bench.said("was already built from the same inputs")
    assert not bench.said("step 1/")


def test_a_changed_input_gives_another_tag(bench: Bench) -> None:
    bench.write("two", fresh("two"))
    first = bench.build("two")
    bench.write("two", fresh("two") + "ENV MORE=1\n")
    second = bench.build("two")
    assert first.tag != second.tag
    assert bench.engine("image", "exists", first.reference) == ""
    latest = json.loads(bench.engine("image", "inspect", "localhost/runner/two:latest"))[0]
    assert latest["Id"] == second.id


def test_the_labels_tell_where_it_came_from_and_a_commit_builds_nothing_anew(bench: Bench) -> None:
    def git(*words: str) -> str:
        own = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ("git", *own, *words), cwd=bench.root, text=True, capture_output=True, check=True
        ).stdout.strip()

    bench.write("labelled", fresh("labelled"))
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    (bench.root / "containers/labelled.toml").open("a").write("# dirty\n")
    image = bench.build("labelled")
    commit = git("rev-parse", "HEAD")
    assert image.labels["org.opencontainers.image.revision"] == f"{commit}-dirty"
    assert image.labels["runner.recipe"] == image.labels["org.opencontainers.image.title"] == "labelled"
    assert image.labels["runner.content"] == image.tag
    assert image.labels["runner.version"]
    git("commit", "-q", "-a", "-m", "two")
    again = bench.build("labelled")
    assert again.id == image.id
    assert commit != git("rev-parse", "HEAD")


def test_build_arguments_and_another_name(bench: Bench) -> None:
    bench.write("args", "FROM scratch\nARG WORDS\nCOPY containers/busybox /busybox\nLABEL words=${WORDS}\n")
    image = bench.build("args", build_args={"WORDS": "it's $HOME"}, tag="localhost/other:name")
    assert image.labels["words"] == "it's $HOME"
    assert json.loads(bench.engine("image", "inspect", "localhost/other:name"))[0]["Id"] == image.id
    assert bench.build("args", build_args={"WORDS": "more"}).tag != image.tag


def test_flags_of_the_recipe_and_after_the_dashes_reach_the_engine(bench: Bench) -> None:
    """A stage and a secret: other flags give another image, and the secret is not in it."""
    stages = "RUN --mount=type=secret,id=token cmp /run/secrets/token /run/secrets/token\nLABEL stage=one\n"
    text = fresh("flags").replace("FROM scratch", "FROM scratch AS one") + stages + "FROM one\nLABEL stage=two\n"
    (bench.root / "token").write_text("hush")
    words = ("build", "flags", "--json", "--", "--secret", "id=token,src=token")
    images = []
    for of_recipe, more, stage in (("", (), "two"), ("", ("--target=one",), "one"), ("--target=one", (), "one")):
        bench.write("flags", text, f'flags = ["{of_recipe}"]\n' if of_recipe else "")
        done = bench.runner(*words, *more)
        assert done.returncode == 0, done.stderr
        images.append(json.loads(done.stdout))
        made = json.loads(bench.engine("image", "inspect", images[-1]["id"]))[0]
        assert made["Labels"]["stage"] == stage
    assert images[0]["tag"] != images[1]["tag"]
    assert "run/secrets/token" not in bench.export(bench.engine("create", images[1]["id"], "x").strip())
    script = bench.runner("build", "flags", "--dry-run", "--", "--network=none").stdout
    assert "--target=one --network=none --tag=" in script
    refused = bench.runner("build", "flags", "--", "--file=Containerfile.flags")
    assert refused.returncode == 2 and "--file cannot be passed to the engine" in refused.stderr


def test_only_files_that_the_recipe_lists_are_seen(bench: Bench) -> None:
    (bench.root / "secret").write_text("no")
    (bench.root / "deep/er").mkdir(parents=True)
    (bench.root / "deep/er/file").write_text("yes")
    bench.write("context", "FROM scratch\nCOPY . /all/\n")
    with (bench.root / "containers/context.toml").open("a") as recipe:
        recipe.write("")
    text = (bench.root / "containers/context.toml").read_text().replace('"]', '", "deep"]')
    (bench.root / "containers/context.toml").write_text(text)
    image = bench.build("context")
    listed = bench.export(bench.engine("create", image.id, "x").strip())
    assert {"all/containers/busybox", "all/deep/er/file"} <= set(listed)
    assert not any("secret" in name or "toml" in name for name in listed)


def test_a_failing_step_is_named_with_its_last_lines_and_the_kept_log(bench: Bench) -> None:
    recipe = fresh("bad").replace("WORKDIR /srv", "RUN echo before the end; echo to stderr >&2; exit 7")
    bench.write("bad", recipe)
    with pytest.raises(RunnerError) as caught:
        bench.build("bad")
    assert "at step 6/7: RUN echo before the end" in caught.value.what
    assert "before the end\n" in caught.value.why
    assert "to stderr" in caught.value.why
    log = next(Path(word.strip(";")) for word in caught.value.fix.split() if word.strip(";").endswith(".log"))
    assert "before the end\n" in log.read_text()
    assert not list((bench.folder / "cache/runner/build").glob("*-context"))
    # asked by its name: `podman images` fails where another test removes an image of its own meanwhile
    assert subprocess.run(("podman", "image", "exists", "localhost/runner/bad"), env=bench.environ).returncode == 1


@pytest.mark.uses("shellcheck")
def test_a_dry_run_prints_a_script_that_builds_the_same(bench: Bench) -> None:
    bench.write("dry", fresh("dry"))
    shown = bench.runner("build", "dry", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "localhost/runner/dry" not in bench.engine("images", "--format={{.Repository}}")
    assert not list((bench.folder / "cache/runner/build").glob("*-context"))
    subprocess.run(("bash", "-n"), input=shown.stdout, text=True, check=True)
    subprocess.run(("shellcheck", "-"), input=shown.stdout, text=True, check=True)
    subprocess.run(("bash",), input=shown.stdout, text=True, env=bench.environ, check=True, capture_output=True)
    built = bench.runner("build", "dry", "--json")
    assert "was already built from the same inputs" in built.stderr
    assert check("build", built.stdout)["reference"].startswith("localhost/runner/dry:")


def test_a_project_of_thousands_of_files_and_a_long_containerfile_build(bench: Bench) -> None:
    """Neither fits on a command line: names of 2 MB in all, a file of 140 KB."""
    deep = bench.root / "deep"
    deep.mkdir()
    names = [f"{number:05} it's {'x' * 180}" for number in range(11_500)]
    for name in names:
        (deep / name).touch()
    comments = "# a comment that makes the file long\n" * 4000
    bench.write("large", f"{comments}FROM scratch\nLABEL test={time.monotonic_ns()}\nCOPY deep/00000* /\n")
    text = (bench.root / "containers/large.toml").read_text().replace('"]', '", "deep"]')
    (bench.root / "containers/large.toml").write_text(text)
    image = bench.build("large")
    assert names[0] in bench.export(bench.engine("create", image.id, "x").strip())


def test_the_hosts_passwords_are_in_no_argument_and_no_file_for_others(bench: Bench, tmp_path: Path) -> None:
    recipe = bench.write("private", TINY)
    settings = HostSettings(files={"pip.conf": "[global]\nindex-url = https://me:pass-word@pypi.example.org/simple"})
    engine = Engine("podman", "")
    context = BuildContext(
        engine, open_store(engine, bench.environ), "linux/amd64", tmp_path / "private.log", bench.report
    )
    staging = context.staging
    plan = plan_build(recipe, context, ResolvedBase("", "", ""), settings, "0123456789ab")
    assert not any("pass-word" in word for step in plan for word in step.argv)
    assert "pass-word" in bash(plan)
    for way in ("here", "as a script"):
        steps = tuple(step for step in plan if step.argv[:1] != ("podman",))
        if way == "here":
            for step in steps:
                run_quietly(step)
        else:
            subprocess.run(("bash", "-c", bash(steps)), check=True)
        modes = {
            path.name: path.stat().st_mode & 0o777 for path in (staging, *staging.iterdir()) if path.name != "context"
        }
        assert modes == {staging.name: 0o700, "files": 0o600, "Containerfile": 0o600, "pip.conf": 0o644}
        assert (staging / "pip.conf").read_text().endswith("/simple\n")
        assert (staging / "context/containers/busybox").exists()
        shutil.rmtree(staging)


def test_a_file_is_the_same_by_the_script_and_by_the_machine(tmp_path: Path) -> None:
    text = "EOF\n$HOME `id` \\ 'quoted'\nEOF_\n\n"
    for mode in (0o600, 0o755):
        for path in (tmp_path / f"a file {mode}", tmp_path / f"another {mode}"):
            step = Step("a file", write=path, text=text, mode=mode)
            if path.name.startswith("a file"):
                subprocess.run(("bash", "-c", bash((step,))), check=True)
            else:
                run_quietly(step)
            assert path.read_text() == text
            assert path.stat().st_mode & 0o777 == mode


def test_the_output_and_the_exit_code_of_a_step_are_kept(tmp_path: Path) -> None:
    said: list[str] = []
    step = Step("a loud step", ("sh", "-c", "seq 30000 >&2; seq 30000; exit 3"))
    assert run_logged(step, tmp_path / "log", said.append) == 3
    assert len(said) == 60_000 and len((tmp_path / "log").read_text().splitlines()) == 60_001


def test_two_builds_at_once_give_one_image(bench: Bench) -> None:
    bench.write("race", fresh("race").replace("WORKDIR", "RUN sleep 2\nWORKDIR"))
    racers = [bench.start("build", "race") for _ in range(2)]
    said = [racer.communicate(timeout=600) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum("step 1/" in err for _, err in said) == 1


def test_a_recipe_may_change_during_its_build(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image has the files as they were, under their hash; the next build makes another one."""
    bench.write("moving", fresh("moving"))
    say = bench.report.say

    def edit(line: str) -> None:
        say(line)
        if line.startswith("step 1/"):
            bench.write("moving", fresh("moving") + "ENV LATER=1\n")

    with monkeypatch.context() as patch:
        patch.setattr(bench.report, "say", edit)
        first = bench.build("moving")
    assert bench.said(
        f"files of the recipe changed during the build; {first.reference} contains their earlier versions"
    )
    assert "LATER" not in bench.engine("image", "inspect", first.reference)
    second = bench.build("moving")
    assert second.tag != first.tag
    assert "LATER" in bench.engine("image", "inspect", second.reference)


def test_files_that_change_while_they_are_copied_make_no_image(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tag, which is a hash of the files, would name an image of other ones."""
    bench.write("torn", fresh("torn"))

    def late(step: Step) -> None:
        run_quietly(step)
        bench.write("torn", fresh("torn"))

    monkeypatch.setattr(building, "run_quietly", late)
    with pytest.raises(RunnerError, match="files of recipe 'torn' changed while they were copied"):
        bench.build("torn")
    assert "localhost/runner/torn" not in bench.engine("images", "--format={{.Repository}}")


@pytest.fixture
def asleep(bench: Bench) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """asleep(NAME): a build that has come to a step that sleeps for days."""

    def start(name: str) -> subprocess.Popen[str]:
        bench.write(name, fresh(name).replace("WORKDIR", f"RUN {SLEEP} && echo slept\nWORKDIR"))
        child = bench.start("build", name)
        until(lambda: processes_of(SLEEP))
        return child

    yield start
    end_processes_of(SLEEP)


def test_ctrl_c_ends_the_engine_and_its_step_and_leaves_no_image(
    bench: Bench, asleep: Callable[[str], subprocess.Popen[str]]
) -> None:
    child, context = asleep("stop"), str(bench.folder / "cache/runner/build/stop-context")
    assert processes_of(context)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=600) == 130
    until(lambda: not processes_of(context), "the end of podman build")
    until(lambda: not processes_of(SLEEP), "the end of the RUN step, which podman 4.3 itself leaves running")
    assert "localhost/runner/stop" not in bench.engine("images", "--format={{.Repository}}")
    assert not list((bench.folder / "cache/runner/build").glob("*-context"))
    bench.write("stop", fresh("stop"))
    assert bench.runner("build", "stop").returncode == 0


def test_after_a_kill_the_next_build_works_and_sees_no_old_file(
    bench: Bench, asleep: Callable[[str], subprocess.Popen[str]]
) -> None:
    child = asleep("kill")
    child.kill()
    child.wait(timeout=600)
    (bench.folder / "cache/runner/build/kill-context/context/stale").write_text("old")
    (bench.root / "Containerfile.kill").write_text("FROM scratch\nCOPY . /\n")
    image = bench.build("kill")
    container = bench.engine("create", image.id, "x").strip()
    assert "stale" not in bench.export(container)


def test_a_registrys_base_is_used_by_its_digest(bench: Bench, registry: Registry) -> None:
    bench.write("base", fresh("base"))
    built = bench.build("base")
    name = f"{registry.address}/python:3.11"
    bench.engine("push", "--quiet", built.reference, name)
    bench.write("upon", "ARG BASE\nFROM ${BASE}\nENV UPON=1\n", f'[[base]]\nimage = "{name}"\n')
    image = bench.build("upon")
    assert bench.said(f"pulling the base image {name}")
    label = image.labels["org.opencontainers.image.base.name"]
    assert label == f"{registry.address}/python@{image.labels['org.opencontainers.image.base.digest']}"
    assert "UPON=1" in image.config["Env"] and "GREETING=hello there" in image.config["Env"]
    bench.report.lines.clear()
    assert bench.build("upon").id == image.id
    assert not bench.said("base:")
    # neither is the base needed any more, nor its registry
    bench.engine("untag", name, name)
    with pytest.raises(subprocess.CalledProcessError):
        bench.engine("image", "exists", name)
    bench.report.lines.clear()
    assert bench.build("upon").id == image.id
    assert not bench.said("base:")


def test_without_a_registry_the_debian_base_is_taken_and_why_is_said(bench: Bench) -> None:
    bases = """
[[base]]
image = "127.0.0.1:9/python:3.11"
[[base]]
debian = "bookworm"
packages = ["python3"]
"""
    bench.write("fallback", "ARG BASE\nFROM ${BASE}\nENV A=b\n", bases)
    stand_in = bench.build_stand_in(debian_reference(Base(None, "bookworm", ("python3",)), "linux/amd64"))
    image = bench.build("fallback", no_cache=False)
    assert image.labels["org.opencontainers.image.base.name"] == stand_in
    assert bench.said(
        "warning: using the base Debian bookworm instead of 127.0.0.1:9/python:3.11 (127.0.0.1:9/python:3.11: "
    )
    # asked for anew, the registry is tried first
    with pytest.raises(RunnerError) as caught:
        bench.write("fallback", "ARG BASE\nFROM ${BASE}\nENV A=c\n", bases.split("[[base]]\ndebian")[0])
        bench.build("fallback")
    assert "127.0.0.1:9/python:3.11: the registry cannot be read" in caught.value.why


class Storage:
    """A storage with these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find(self, name: str) -> Image | None:
        config = {"Architecture": "amd64", "Id": "1"}
        return from_inspect(config, "podman", name) if name in self.names else None


def test_an_image_on_a_later_base_does_not_count_once_an_earlier_base_is_in_the_storage(tmp_path: Path) -> None:
    bases = (Base("example.org/a:1"), Base("example.org/b:1"), Base(None, "bookworm"))
    recipe = Recipe("x", tmp_path, tmp_path, tmp_path, bases)

    def named(*stored: str) -> list[str]:
        store: Any = Storage(*stored)
        context = BuildContext(Engine("podman", ""), store, "linux/amd64", tmp_path, Quiet())
        return [base.named for base in known_bases(recipe, context)]

    assert named() == ["Debian bookworm"]
    assert named("example.org/b:1") == ["example.org/b:1"]
    assert named("example.org/a:1", "example.org/b:1") == ["example.org/a:1"]


def test_a_foreign_platform_without_an_emulator_is_refused_before_the_build(bench: Bench) -> None:
    bench.write("arm")
    if Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        pytest.skip("this machine emulates arm64")
    with pytest.raises(RunnerError, match="cannot build for linux/arm64 on this machine"):
        bench.build("arm", platform="linux/arm64")


@pytest.fixture
def docker(bench: Bench, docker_socket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose docker is podman's socket; where there is no docker client, podman's remote client plays it."""
    monkeypatch.setenv("DOCKER_HOST", docker_socket)
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    if shutil.which("docker") is None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/docker").write_text(f'#!/bin/sh\nexec podman --remote --url {docker_socket} "$@"\n')
        (tmp_path / "bin/docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return bench


def test_docker_builds_and_imports_by_the_same_code(docker: Bench) -> None:
    docker.write("bydocker", fresh("bydocker"))
    built = docker.runner("build", "bydocker", "--engine", "docker", "--import")
    assert built.returncode == 0, built.stderr
    assert "engine: docker (requested)" in built.stderr
    assert content(Path(built.stdout.strip()), "etc/environment").splitlines()[1] == "GREETING=hello there"
    again = docker.runner("import", "dockerd://localhost/runner/bydocker:latest")
    assert (again.returncode, again.stdout) == (0, built.stdout), again.stderr
    assert "already imported" in again.stderr
