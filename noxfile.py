"""Sessions: they call `runner` commands and print them as a user would type them.

./nox -s demo          the main job end to end: image, squashfs, environment, training, sample
./nox -s tests         the test suite on real parts (real Slurm, podman, registry, squashfs), in ten minutes
./nox -s tests-all     every test, also those that depend on time, take long or ask a package index: an hour
./nox -s quick         the tests that need neither Slurm nor podman nor torch, in two minutes
./nox -s 'pins(ngc-24.06)'   the tests of the jobs on the versions of that image, without a GPU; also ngc-25.06
./nox -s build-image   runner build [-- RECIPE …]
./nox -s lab           a private Slurm cluster to play with, until Ctrl-C
./nox -s lint          ruff, mypy --strict, bash -n and shellcheck on every shell script
./nox -s docs          the documentation as a web site with search, in build/docs/site
./nox -s bench         figures, measured side by side
./nox -s faults        what runs survive, counted on private clusters: 20 times each fault, an hour
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True
# pip finds wheels that other installers do not look for (find-links folders, the CPU build of torch)
nox.options.default_venv_backend = "virtualenv"

CONTAINERS = (
    *("podman", "crun", "runc", "uidmap", "slirp4netns", "fuse-overlayfs", "fuse3", "netavark", "catatonit"),
    *("mmdebstrap", "skopeo", "squashfs-tools", "squashfs-tools-ng", "squashfuse", "bubblewrap"),
)
LAB = (
    *("slurm-wlm", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    *("libslurm-dev", "gcc", "g++", "libc6-dev", "python3-dev", "buildah", "docker-registry", "busybox-static"),
    *("shellcheck", "git", "umoci", "faketime", "zsh", "fish", "libpam-oath", "oathtool", "iproute2"),
    # with systemd, the package would start a server; there, the tests of --on need one that is installed already
    *(() if Path("/run/systemd/system").exists() else ("openssh-server",)),
)
IMPORTERS = ("pigz", "umoci", "zstd")
TEST_TOOLS = (
    *("pytest", "pytest-xdist", "pytest-cov", "pytest-timeout", "hypothesis", "jsonschema", "zensical"),
    *("mypy", "ruff", "types-docker", "build", "hatchling", "editables"),
)
CONSTRAINTS = Path("requirements/ci.txt").resolve()
CPU_PINS = Path("containers/pins/cpu.txt").resolve()
# pip reads these for what it installs and for what it builds wheels with; new pip wants the second name for the latter
PINNED = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-nox"
TRIES = 3


def debian_packages(session: nox.Session, packages: tuple[str, ...]) -> bool:
    """Install the Debian packages that are missing, as root; else say which they are. True when none is missing."""
    if shutil.which("dpkg-query") is None:
        session.warn(f"this is not Debian or Ubuntu: what these packages bring is needed here: {' '.join(packages)}")
        return False
    listed = subprocess.run(("dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\n"), capture_output=True, text=True)
    installed = {line.split()[0] for line in listed.stdout.splitlines() if line.endswith(" installed")}
    missing = [package for package in packages if package not in installed]
    if not missing:
        return True
    wait = "-oDPkg::Lock::Timeout=600"  # a new machine's automatic upgrades hold the lock for minutes
    command = ("apt-get", wait, "install", "-y", "--no-install-recommends", *missing)
    sudo = () if os.geteuid() == 0 else ("sudo", "-n")
    if shutil.which("apt-get") is None or (sudo and subprocess.run((*sudo, "true"), capture_output=True).returncode):
        session.warn(f"missing Debian packages: {' '.join(missing)}\n  try: sudo {' '.join(command)}")
        return False
    session.log(f"installing Debian packages: {' '.join(missing)}")
    for attempt in range(1, TRIES + 1):
        apt_update(session, sudo)
        done = subprocess.run(
            (*sudo, "env", "DEBIAN_FRONTEND=noninteractive", *command), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return True
        pause(session, "apt-get install", attempt, done.stdout + done.stderr)
    session.error("Debian's package index does not answer, or lacks a package: see the lines above")


def apt_update(session: nox.Session, sudo: tuple[str, ...]) -> None:
    """Fetch apt's lists; waits up to ten minutes for their lock, which DPkg::Lock::Timeout does not cover."""
    attempt = 1
    for locked in range(120):
        done = subprocess.run((*sudo, "apt-get", "update", "-qq"), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "Could not get lock" in done.stderr:
            if locked == 0:
                session.log("another program holds apt's lock: waiting up to 10 minutes")
            time.sleep(5)
            continue
        pause(session, "apt-get update", attempt, done.stderr)
        if attempt == TRIES:
            break
        attempt += 1
    session.error("Debian's package index does not answer")


def pause(session: nox.Session, what: str, attempt: int, output: str) -> None:
    """Print why a try has failed, and wait before the next one: an index that hiccups answers seconds later."""
    session.warn(f"{what} failed, try {attempt} of {TRIES}:\n{output.strip()[-2000:]}")
    if attempt < TRIES:
        time.sleep(10)


def install(session: nox.Session, *words: str, python: str = "python") -> None:
    """`pip install` at the pinned versions, three times if need be. Raises CommandFailed when the last try fails."""
    argv = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words)
    for attempt in range(1, TRIES + 1):
        try:
            session.run(*argv, env=PINNED, external=True, log=False)
            return
        except CommandFailed:
            pause(session, f"pip install {' '.join(words)}", attempt, "")
    session.warn("the package index does not answer, or lacks a package: see pip's lines above")
    raise CommandFailed(f"pip install {' '.join(words)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder that other checkouts on this machine may be making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shared_environment(session: nox.Session) -> Path:
    """Return a virtual environment with everything that lint, tests and benchmarks use; made once per content.

    It is kept in the user's cache, outside of the checkout, so that another clone asks no package index. `complete` is
    written last: an environment without it was cut short, and is made again.
    """
    steps = "".join(map(inspect.getsource, (shared_environment, install_training_stack)))
    recipe = (sys.version, CONSTRAINTS.read_text(), CPU_PINS.read_text(), steps, *TEST_TOOLS, *project_dependencies())
    folder = ENVIRONMENTS / hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    with locked(folder):
        if not (folder / "complete").is_file():
            session.log(f"installing the test environment, once: {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            make = (sys.executable, "-m", "virtualenv", "--quiet", "--no-periodic-update", str(folder))
            session.run(*make, external=True, log=False)
            python = str(folder / "bin" / "python")
            install(session, *TEST_TOOLS, *project_dependencies(), python=python)
            install_training_stack(session, python)
            # files for tests that install: pip and setuptools, and what runner itself needs
            download = (python, "-m", "pip", "download", "--quiet", "--only-binary=:all:")
            pip_itself = ("--no-deps", f"--dest={folder / 'wheels'}", "pip", "setuptools<81")
            session.run(*download, *pip_itself, external=True, log=False)
            needs = (f"--dest={folder / 'wheels' / 'runner'}", *project_dependencies())
            session.run(*download, *needs, env=PINNED, external=True, log=False)
            (folder / "complete").touch()  # the time of its last use
    for other in ENVIRONMENTS.glob("*/complete"):
        if time.time() - other.stat().st_mtime > 30 * 24 * 3600:
            shutil.rmtree(other.parent, ignore_errors=True)
    return folder


def project_dependencies() -> list[str]:
    """Return what pyproject.toml asks for."""
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(name for names in project["optional-dependencies"].values() for name in names)]


def use_shared_environment(session: nox.Session) -> None:
    """Put the shared packages and their programs into the session's own environment, and this checkout's runner."""
    shared, own = shared_environment(session), Path(session.virtualenv.location)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(shared), "platbase": str(shared)})
    target = sysconfig.get_path("purelib", "venv", {"base": str(own), "platbase": str(own)})
    Path(target, "shared.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    for program in (shared / "bin").iterdir():
        copy = own / "bin" / program.name
        if program.name.startswith(("python", "pip", "activate")):
            continue
        copy.unlink(missing_ok=True)
        content = program.read_bytes()
        if content.startswith(b"#!"):  # it names the interpreter, which must be the session's
            copy.write_bytes(content.replace(str(shared).encode(), str(own).encode()))
            copy.chmod(0o755)
        else:
            copy.symlink_to(program)
    session.env["RUNNER_TEST_WHEELS"] = str(shared / "wheels")
    session.run(
        *("python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"),
        *("--no-index", "-e", "."),
        log=False,
    )


@nox.session
def demo(session: nox.Session) -> None:
    """The main job end to end on this machine: no GPU, no registry account, no cluster, no model download."""
    session.log("builds an image, imports it as squashfs, trains a tiny model in it and asks the model a question")
    session.log(
        "the first time: 4 to 12 minutes on two cores, 0.5 GB to download; again: 1 to 3 minutes, nothing to download"
    )
    debian_packages(session, CONTAINERS)
    install(session, "-e", ".")
    session.run("python", "bench/demo.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a web site, in build/docs/site; broken links and anchors are errors."""
    install(session, "-e", ".", "zensical")
    session.run("python", "-m", "bench.docs", *session.posargs)


@nox.session(name="build-image")
def build_image(session: nox.Session) -> None:
    """runner build [RECIPE …]: by default the NGC image, Containerfile.ngc-deepspeed."""
    install(session, "-e", ".")
    session.run("runner", "build", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on real parts, in ten minutes; words after -- go to pytest: `-- tests/runs -x`."""
    debian_packages(session, CONTAINERS + LAB)
    use_shared_environment(session)
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
    else:
        session.run("python", "-m", "tests.gate")


@nox.session(name="tests-all")
def tests_all(session: nox.Session) -> None:
    """Every test, also those that depend on time, take long or ask a package index; nothing is run twice."""
    debian_packages(session, CONTAINERS + LAB)
    use_shared_environment(session)
    session.run("python", "-m", "tests.gate", "--all", *session.posargs)


@nox.session
def quick(session: nox.Session) -> None:
    """The tests that need neither Slurm nor podman nor torch, in two minutes; words after -- go to pytest."""
    use_shared_environment(session)
    session.run("python", "-m", "pytest", "--quick", "-q", *(session.posargs or ("-n", "auto")))


@nox.session
@nox.parametrize(
    ("python", "base", "torch", "numpy"),
    [
        nox.param("3.10", "ngc-24.06", "2.4.0", "1.24.4", id="ngc-24.06"),
        nox.param("3.12", "ngc-25.06", "2.8.0", "1.26.4", id="ngc-25.06"),
    ],
)
def pins(session: nox.Session, base: str, torch: str, numpy: str) -> None:
    """The tests of the jobs on what an NGC image has, as the package index has it; words after -- go to pytest."""
    session.install(
        "-q", f"torch=={torch}", f"numpy=={numpy}", "-r", f"containers/pins/{base}.txt", "pytest>=8", "hypothesis"
    )
    session.run(
        "python", "-m", "pytest", "--confcutdir=tests/jobs", *(session.posargs or ("tests/jobs", "-m", "not slow"))
    )


def install_training_stack(session: nox.Session, python: str) -> None:
    """What the jobs import, at the versions of the demo's image; torch is its CPU build."""
    try:
        install(session, "--no-deps", "torch==2.13.0+cpu", python=python)
    except CommandFailed:
        index = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
        install(session, "--no-deps", "torch==2.13.0+cpu", *index, python=python)
    install(session, "--no-deps", "-r", str(CPU_PINS), python=python)
    # for tests/jobs/test_megatron_data.py and tests/runs/trainers/test_real.py
    install(session, "--no-deps", "--only-binary=:all:", "megatron-core", "sentencepiece", python=python)
    install(session, "--no-deps", "pytorch-lightning", "lightning-utilities", "torchmetrics", python=python)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict, bash -n and shellcheck on every shell script; `-- --gate`: style is counted, not fatal.

    A line that is too long says nothing about whether the work is right, so .ci/run does not reject it.
    """
    gate = "--gate" in session.posargs
    debian_packages(session, ("git", "shellcheck"))
    use_shared_environment(session)
    golden, own = shell_scripts()
    faults = {
        "ruff (syntax, undefined names)": ("ruff", "check", "--output-format=concise", "--select=E9,F63,F7,F82", "."),
        "mypy": ("mypy",),
        "bash -n": ("bash", "-c", 'code=0; for file; do bash -n "$file" || code=1; done; exit $code', *golden, *own),
    }
    style = {
        "ruff check": ("ruff", "check", "--output-format=concise", "."),
        "ruff format": ("ruff", "format", "--check", "."),
        "tests": ("python", "-m", "tests.lab.rules"),
        "shellcheck": ("shellcheck", "--format=gcc", *own),
        # SC2016: a user's `$` in single quotes is meant as text. SC1091: the payload is checked by itself
        "shellcheck of golden files": ("shellcheck", "--format=gcc", "--exclude=SC2016,SC1091", *golden),
    }
    checks = {**faults, **style}
    with ThreadPoolExecutor(2) as pool:
        ended_well = dict(zip(checks, pool.map(partial(passes, session), checks, checks.values()), strict=True))
    broken = [name for name in faults if not ended_well[name]]
    untidy = [name for name in style if not ended_well[name]]
    print(f"lint: {len(broken)} faults ({', '.join(broken) or 'none'}),"
          f" {len(untidy)} findings of style ({', '.join(untidy) or 'none'})", flush=True)  # fmt: skip
    if broken or (untidy and not gate):
        session.error("lint found something")


def passes(session: nox.Session, name: str, command: tuple[str, ...]) -> bool:
    """Run a check, and print its output if it fails; returns whether its exit code is 0."""
    session.log(name)
    try:
        session.run(*command, external=True, log=False, silent=True)
    except CommandFailed:
        return False
    return True


def shell_scripts() -> tuple[list[str], list[str]]:
    """(rendered golden scripts, all others): tracked files that end in .sh or .sbatch, or begin with a shell's #!."""
    listed = subprocess.run(("git", "ls-files", "-z"), capture_output=True, text=True, check=True).stdout.split("\0")
    found = [name for name in listed if Path(name).is_file() and _is_shell(Path(name))]
    return [name for name in found if name.startswith("tests/golden/")], [
        name for name in found if not name.startswith("tests/golden/")
    ]


def _is_shell(path: Path) -> bool:
    if path.suffix == ".j2":  # a template; what it renders is among the golden files
        return False
    if path.suffix in {".sh", ".sbatch"}:
        return True
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba|da)?sh\b", file.readline(100)) is not None


@nox.session
def lab(session: nox.Session) -> None:
    """A private Slurm cluster of three virtual nodes, to try things on."""
    debian_packages(session, CONTAINERS + LAB)
    install(session, "-e", ".")
    session.run("python", "-m", "tests.lab", *(session.posargs or ("run",)))


@nox.session
def faults(session: nox.Session) -> None:
    """Each fault 20 times; words after -- choose: `-- time_limit preemption --times 3`. Ctrl-C keeps what there is."""
    debian_packages(session, CONTAINERS + LAB)
    use_shared_environment(session)
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures as ratios: start-up; `-- import`, `-- train`, `-- runs`, `-- scripts`, `-- engines`, `-- adopt`, …"""
    if session.posargs[:1] == ["import"]:
        debian_packages(session, CONTAINERS + IMPORTERS)
        install(session, "-e", ".")
        session.run("python", "-m", "bench.importing", *session.posargs[1:])
        return
    if session.posargs[:1] == ["train"]:
        use_shared_environment(session)
        session.run("python", "-m", "bench.training", *session.posargs[1:])
        return
    if session.posargs[:1] in (["runs"], ["scripts"], ["adopt"], ["engines"], ["cold_start"]):
        debian_packages(session, CONTAINERS + LAB)
        use_shared_environment(session)
        session.run("python", "-m", f"bench.{session.posargs[0]}", *session.posargs[1:])
        return
    session.install("-q", "torchx")
    install(session, "-e", ".")  # apart: torchx asks for an older urllib3 than ours
    session.run("python", "bench/startup.py", *session.posargs)
