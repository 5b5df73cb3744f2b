"""Every pin set resolves for its base's Python and torch, on x86_64 and aarch64, by pip's own resolver.

Nothing is installed and no gigabytes are fetched: the base's torch is a stand-in wheel of that exact version, which is
also what it is in the image: there already, and not to be changed. DeepSpeed is on the index as source only; its
stand-in has the requirements that its own setup.py reads. The package index is needed, nothing else of the network.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.images.standins import write_wheel

ROOT = Path(__file__).parents[2]
PINS = ROOT / "containers" / "pins"
# manylinux_2_X tags that wheels of this stack bear; each more costs pip seconds
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35, 36, 39)
MACHINES = ("x86_64", "aarch64")
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
    Base("ngc-megatron-25.06", "3.12", "2.8.0a0+5228986c39", 39, "3.3.0"),
    Base("ngc-megatron-25.09", "3.12", "2.9.0a0+50eac811a6", 39, "3.4.0"),
)


def pip(*words: str, program: tuple[str, ...] = ("-m", "pip")) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, *program, *words, "--disable-pip-version-check")
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture(scope="module")
def new_pip(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The newest pip, run from its wheel: it resolves twice as fast as the one of Python 3.11's ensurepip."""
    folder = tmp_path_factory.mktemp("pip")
    done = pip("download", "--no-deps", "--quiet", f"--dest={folder}", "pip")
    assert done.returncode == 0, done.stderr
    return (str(next(folder.glob("pip-*.whl")) / "pip"),)


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


def resolve(
    program: tuple[str, ...], base: Base, machine: str, work: Path, requirements: str
) -> tuple[str, dict[str, str]]:
    """What pip says on stderr when it fails, and the packages that it chose for that machine."""
    wheels = work / "wheels"
    wheels.mkdir(parents=True)
    write_wheel(wheels, "torch", base.torch)
    deepspeed = pinned(base).get("deepspeed", "")
    if "deepspeed" in requirements:
        write_wheel(wheels, "deepspeed", deepspeed, deepspeed_requirements(deepspeed, work))
    constraints = [f"torch=={base.torch}"]
    if base.triton:
        write_wheel(wheels, "triton", base.triton)
        constraints.append(f"triton=={base.triton}")
    (work / "constraints.txt").write_text("\n".join(constraints) + "\n")
    (work / "requirements.txt").write_text(requirements)
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC if minor <= base.glibc]
    platforms = [f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}")]
    where = (f"--target={work / 'target'}", f"--report={work / 'report.json'}", f"--find-links={wheels}")
    files = (f"--constraint={work / 'constraints.txt'}", f"--requirement={work / 'requirements.txt'}")
    done = pip(*RESOLVE, f"--python-version={base.python}", *platforms, *where, *files, program=program)
    if done.returncode != 0:
        return done.stderr, {}
    report = json.loads((work / "report.json").read_text())
    return "", {normal(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in report["install"]}


Answers = dict[tuple[str, str], Future[tuple[str, dict[str, str]]]]


# each machine and each base once: the others are asked for by -m slow, a resolution takes half a minute
OFTEN = (("cpu", "x86_64"), ("ngc-25.06", "aarch64"), ("ngc-24.06", "x86_64"), ("ngc-megatron-25.09", "aarch64"))
SETS = [
    pytest.param(base, machine, id=f"{base.pins}-{machine}", marks=() if often else pytest.mark.slow)
    for base in BASES
    for machine in MACHINES
    for often in [(base.pins, machine) in OFTEN]
]


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, new_pip: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Answers]:
    """pip's answer for each pin set and machine that is tested; all at once, pip itself uses one core only."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    chosen = [(call.params["base"], call.params["machine"]) for call in calls if call and "machine" in call.params]
    asked = list(dict.fromkeys(chosen))
    work = tmp_path_factory.mktemp("pins")
    with ThreadPoolExecutor(max_workers=min(6, len(os.sched_getaffinity(0)))) as pool:
        yield {
            (base.pins, machine): pool.submit(
                resolve,
                new_pip,
                base,
                machine,
                work / f"{base.pins}-{machine}",
                (PINS / f"{base.pins}.txt").read_text(),
            )
            for base, machine in asked
        }


@pytest.mark.parametrize(("base", "machine"), SETS)
def test_a_pin_set_resolves(base: Base, machine: str, answers: Answers) -> None:
    """Wheels for all of it exist, nothing contradicts, and torch is the base's."""
    error, packages = answers[base.pins, machine].result()
    assert not error
    assert packages.get("torch", base.torch) == base.torch  # nothing of Megatron's pins asks for it
    assert {name: packages.get(name) for name in pinned(base)} == pinned(base)


@pytest.mark.parametrize(("base", "machine"), [each for each in SETS if each.values[0] is BASES[0]])
def test_the_demo_is_pinned_to_the_last_package(base: Base, machine: str, answers: Answers) -> None:
    """cpu.txt is installed with --no-deps: what the resolver finds and the file lacks would be missing in the image."""
    assert answers["cpu", machine].result()[1] == pinned(base)


def test_a_package_that_wants_another_torch_does_not_resolve(new_pip: tuple[str, ...], tmp_path: Path) -> None:
    """transformers 5 asks for torch 2.6: on the 24.06 base pip says so and chooses nothing."""
    error, packages = resolve(new_pip, BASES[1], "x86_64", tmp_path, "transformers[torch]==5.9.0\n")
    assert "torch" in error and "conflict" in error
    assert packages == {}


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.pins)
def test_the_header_says_what_it_is_for(base: Base) -> None:
    head = (PINS / f"{base.pins}.txt").read_text().splitlines()[0]
    assert f"Python {base.python}, torch {base.torch}, 20" in head


def test_no_pin_set_is_forgotten() -> None:
    assert {path.stem for path in PINS.glob("*.txt")} == {base.pins for base in BASES}
