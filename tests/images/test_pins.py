"""Every pin set resolves for its base's Python and torch, on x86_64 and aarch64, by pip's own resolver.

Nothing is installed and no gigabytes are fetched: the base's torch is a stand-in wheel of that exact version, which is
also what it is in the image: there already, and not to be changed. DeepSpeed is on the index as source only; its
stand-in has the requirements that its own setup.py reads. The package index is needed, nothing else of the network.
"""

import json
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.images.standins import write_wheel

ROOT = Path(__file__).parents[2]
PINS = ROOT / "containers" / "pins"
RESOLVE = ("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--implementation=cp", "--quiet")


@dataclass(frozen=True)
class Base:
    """What a pin set is for."""

    pins: str
    python: str
    torch: str
    glibc: int  # 2.X of the base's distribution
    triton: str = ""  # the one that comes with the base; pip knows NGC's under another name


BASES = (
    Base("cpu", "3.11", "2.13.0+cpu", 36),
    Base("ngc-24.06", "3.10", "2.4.0a0+f70bd71a48", 35, "3.0.0"),
    Base("ngc-25.06", "3.12", "2.8.0a0+5228986c39", 39, "3.3.0"),
)


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "pip", "--disable-pip-version-check", *words)
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)


def pinned(base: Base) -> dict[str, str]:
    """Version by name of the lines that fix one."""
    lines = (PINS / f"{base.pins}.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normal(name): version.strip() for name, version in pairs}


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@cache
def deepspeed_requirements(version: str, folder: Path) -> tuple[str, ...]:
    """What DeepSpeed's setup.py gives as install_requires, read from its source archive."""
    done = pip("download", "--no-deps", "--no-binary=deepspeed", f"--dest={folder}", f"deepspeed=={version}")
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / f"deepspeed-{version}.tar.gz") as archive:
        member = archive.extractfile(f"deepspeed-{version}/requirements/requirements.txt")
        assert member is not None
        return tuple(line for line in member.read().decode().split() if line)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def resolve(base: Base, machine: str, sources: Path, work: Path, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Let pip resolve the pin set as if on that machine; the report is work/report.json."""
    wheels = work / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "torch", base.torch)
    deepspeed = pinned(base)["deepspeed"]
    write_wheel(wheels, "deepspeed", deepspeed, deepspeed_requirements(deepspeed, sources))
    constraints = [f"torch=={base.torch}"]
    if base.triton:
        write_wheel(wheels, "triton", base.triton)
        constraints.append(f"triton=={base.triton}")
    (work / "constraints.txt").write_text("\n".join(constraints) + "\n")
    (work / "requirements.txt").write_text((PINS / f"{base.pins}.txt").read_text() + f"\n{extra}\n")
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(base.glibc, 4, -1)]
    platforms = [f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}", f"linux_{machine}")]
    where = (f"--target={work / 'target'}", f"--report={work / 'report.json'}", f"--find-links={wheels}")
    files = (f"--constraint={work / 'constraints.txt'}", f"--requirement={work / 'requirements.txt'}")
    return pip(*RESOLVE, f"--python-version={base.python}", *platforms, *where, *files)


def chosen(work: Path) -> dict[str, str]:
    report = json.loads((work / "report.json").read_text())
    return {normal(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in report["install"]}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.pins)
def test_a_pin_set_resolves(base: Base, machine: str, sources: Path, tmp_path: Path) -> None:
    """Wheels for all of it exist, nothing contradicts, and torch is the base's."""
    done = resolve(base, machine, sources, tmp_path)
    assert done.returncode == 0, done.stderr
    packages = chosen(tmp_path)
    assert packages["torch"] == base.torch
    assert {name: packages.get(name) for name in pinned(base)} == pinned(base)


def test_the_demo_is_pinned_to_the_last_package(sources: Path, tmp_path: Path) -> None:
    """cpu.txt is installed with --no-deps: what the resolver finds and the file lacks would be missing in the image."""
    base = BASES[0]
    done = resolve(base, "aarch64", sources, tmp_path)
    assert done.returncode == 0, done.stderr
    assert chosen(tmp_path) == pinned(base)


def test_a_package_that_wants_another_torch_does_not_resolve(sources: Path, tmp_path: Path) -> None:
    """2.4.0a0 is a pre-release of 2.4: pip says who asks for more, and chooses nothing."""
    done = resolve(BASES[1], "x86_64", sources, tmp_path, extra="torch>=2.4")
    assert done.returncode != 0
    assert "torch" in done.stderr and "conflict" in done.stderr


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.pins)
def test_the_header_says_what_it_is_for(base: Base) -> None:
    head = (PINS / f"{base.pins}.txt").read_text().splitlines()[0]
    assert f"Python {base.python}, torch {base.torch}, 20" in head


def test_no_pin_set_is_forgotten() -> None:
    assert {path.stem for path in PINS.glob("*.txt")} == {base.pins for base in BASES}
