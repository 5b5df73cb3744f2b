"""The distribution works outside of the checkout: from a wheel, and from an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clean copy of the tracked and untracked-not-ignored files."""
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", source / "dist", source, cwd=source)
    (made,) = (source / "dist").glob("runner_hpc-*.whl")
    return made


def clean_venv(folder: Path, *requirements: str | Path) -> Path:
    """A new virtual environment with the requirements; returns its bin folder."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", *requirements, cwd=folder.parent)
    return folder / "bin"


def test_a_wheel_carries_the_one_copy_of_recipes_environments_and_jobs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [*(f"Containerfile.{name}" for name in ("ngc-deepspeed", "aws-deepspeed", "ngc-megatron", "cpu"))]
    for folder in ("containers", "edf", "jobs", "clusters", "docs"):
        shipped += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("[!.]*.*")]
    package = ROOT / "src" / "runner"
    data = [path for path in package.rglob("*.*") if path.suffix not in {".py", ".pyc"}]
    assert {path.relative_to(package.parent).as_posix() for path in data} <= names
    assert {f"runner/shipped/{name}" for name in shipped} <= names


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installed_runner_works_outside_of_the_checkout(kind: str, wheel: Path, tmp_path: Path) -> None:
    """`runner` finds its recipes, environments and jobs, renders a script, and copies them out to edit."""
    bin_folder = clean_venv(tmp_path / "venv", *([wheel] if kind == "wheel" else ["-e", ROOT]))
    work = tmp_path / "elsewhere"
    work.mkdir()
    env = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    assert run("runner", "--version", cwd=work, env=env).startswith("runner 0.")
    assert "environments:" in run("runner", "--help", cwd=work, env=env)
    # pyxis starts it with the variables of the job
    assert "usage: " in run("runner-importer", "--help", cwd=work, env=env | {"PYTHONHOME": "/x", "PYTHONPATH": "/x"})
    script = run(
        "runner", "launch", "--dry-run", "--site", "local", "--env", "cpu", "--script", "sft", cwd=work, env=env
    )
    assert script.startswith("#!/bin/bash")
    run("runner", "init", "--all", cwd=work, env=env)
    assert (work / "Containerfile.cpu").read_bytes() == (ROOT / "Containerfile.cpu").read_bytes()
    assert (work / "edf" / "ngc-ds.toml").is_file() and (work / "jobs" / "sft.py").is_file()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_every_dependency_has_wheels(machine: str, python: str, tmp_path: Path) -> None:
    """pip resolves the tool's dependencies from wheels alone, for both architectures and the ends of our range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--target", tmp_path),
        *("--only-binary", ":all:", "--implementation", "cp", "--python-version", python),
        *("--platform", f"manylinux_2_17_{machine}", "--platform", f"manylinux2014_{machine}"),
        *("--platform", f"manylinux_2_28_{machine}"),
        *project["dependencies"],
        cwd=tmp_path,
    )
