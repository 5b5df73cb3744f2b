"""Sessions: they call `runner` commands and print them as a user would type them.

./nox -s demo          the main job end to end: image, squashfs, environment, training, sample
./nox -s tests         the test suite on real parts (real Slurm, podman, registry, squashfs)
./nox -s quick         the tests that need neither Slurm nor podman nor torch, in under a minute
./nox -s 'pins(ngc-24.06)'   the tests of the jobs on the versions of that image, without a GPU; also ngc-25.06
./nox -s build-image   runner build [-- RECIPE …]
./nox -s lab           a private Slurm cluster to play with, until Ctrl-C
./nox -s lint          ruff, mypy --strict, bash -n and shellcheck on every shell script
./nox -s docs          the documentation as a web site with search, in build/docs/site
./nox -s bench         figures, measured side by side
./nox -s faults        what runs survive, counted on private clusters: 20 times each fault, an hour
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
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
DOCS_TOOL = "zensical==0.0.73"  # exactly: before 1.0, each release may change its settings
IMPORTERS = ("pigz", "umoci", "zstd")
TEST_TOOLS = (
    "pytest>=8",
    "pytest-xdist",
    "pytest-cov",
    "hypothesis",
    "jsonschema",
    "mypy",
    "ruff",
    "types-docker",
    "build",
    "hatchling",
)


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
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    apt_update(session, sudo)
    session.run(*sudo, *command, external=True, env=quiet, silent=True, log=False)
    return True


def apt_update(session: nox.Session, sudo: tuple[str, ...]) -> None:
    """Fetch apt's lists; waits up to ten minutes for their lock, which DPkg::Lock::Timeout does not cover."""
    for attempt in range(120):
        done = subprocess.run((*sudo, "apt-get", "update", "-qq"), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "Could not get lock" not in done.stderr:
            break
        if attempt == 0:
            session.log("another program holds apt's lock: waiting up to 10 minutes")
        time.sleep(5)
    session.error(f"apt-get update: {done.stderr.strip()}")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job end to end on this machine: no GPU, no registry account, no cluster, no model download."""
    session.log("builds an image, imports it as squashfs, trains a tiny model in it and asks the model a question")
    session.log(
        "the first time: 4 to 12 minutes on two cores, 0.5 GB to download; again: 1 to 3 minutes, nothing to download"
    )
    debian_packages(session, CONTAINERS)
    session.install("-q", "-e", ".")
    session.run("python", "bench/demo.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a web site, in build/docs/site; broken links and anchors are errors."""
    session.install("-q", "-e", ".", DOCS_TOOL)
    session.run("python", "-m", "bench.docs", *session.posargs)


@nox.session(name="build-image")
def build_image(session: nox.Session) -> None:
    """runner build [RECIPE …]: by default the NGC image, Containerfile.ngc-deepspeed."""
    session.install("-q", "-e", ".")
    session.run("runner", "build", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on real parts; words after -- go to pytest (`-- -m slow`: what takes more than a minute each)."""
    debian_packages(session, CONTAINERS + LAB)
    session.install("-q", "-e", ".", *TEST_TOOLS, DOCS_TOOL)
    install_training_stack(session)
    # three at a time on two cores: a third of the tests wait, for Slurm above all; the longest files are begun first
    spread = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
    options = session.posargs or (*spread, "--durations=25", "-m", "not slow")
    session.run("python", "-m", "pytest", *options)


@nox.session
def quick(session: nox.Session) -> None:
    """The tests that need neither Slurm nor podman nor torch, in under a minute; words after -- go to pytest."""
    session.install("-q", "-e", ".", *TEST_TOOLS)
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


def install_training_stack(session: nox.Session) -> None:
    """What the jobs import, at the versions of the demo's image; torch is its CPU build."""
    torch = ("-q", "--no-deps", "torch==2.13.0+cpu")
    try:
        session.install(*torch)
    except CommandFailed:
        session.install(*torch, "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.install("-q", "--no-deps", "-r", "containers/pins/cpu.txt")
    try:  # for tests/jobs/test_megatron_data.py, which compares with sums where these are not installed
        session.install("-q", "--no-deps", "--only-binary=:all:", "megatron-core==0.16.1", "sentencepiece")
    except CommandFailed:
        session.warn("megatron-core and sentencepiece cannot be installed: the tests compare with recorded sums")
    lightning = ("pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
    session.install("-q", "--no-deps", *lightning)  # for tests/runs/trainers/test_real.py


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict, bash -n and shellcheck on every shell script."""
    debian_packages(session, ("git", "shellcheck"))
    session.install("-q", "-e", ".", *TEST_TOOLS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    golden, own = shell_scripts()
    for script in (*golden, *own):
        session.run("bash", "-n", script, external=True, silent=True, log=False)
    session.run("shellcheck", *own, external=True)
    # SC2016: a user's `$` in single quotes is meant as text. SC1091: the payload is checked by itself
    session.run("shellcheck", "--exclude=SC2016,SC1091", *golden, external=True)


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
    session.install("-q", "-e", ".")
    session.run("python", "-m", "tests.lab", *(session.posargs or ("run",)))


@nox.session
def faults(session: nox.Session) -> None:
    """Each fault 20 times; words after -- choose: `-- time_limit preemption --times 3`. Ctrl-C keeps what there is."""
    debian_packages(session, CONTAINERS + LAB)
    session.install("-q", "-e", ".", *TEST_TOOLS)
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures as ratios: start-up; `-- import`, `-- train`, `-- runs`, `-- scripts`, `-- engines`, `-- cold_start`."""
    if session.posargs[:1] == ["import"]:
        debian_packages(session, CONTAINERS + IMPORTERS)
        session.install("-q", "-e", ".")
        session.run("python", "-m", "bench.importing", *session.posargs[1:])
        return
    if session.posargs[:1] == ["train"]:
        install_training_stack(session)
        session.run("python", "-m", "bench.training", *session.posargs[1:])
        return
    if session.posargs[:1] in (["runs"], ["scripts"], ["engines"], ["cold_start"]):
        debian_packages(session, CONTAINERS + LAB)
        session.install("-q", "-e", ".", *TEST_TOOLS)
        session.run("python", "-m", f"bench.{session.posargs[0]}", *session.posargs[1:])
        return
    session.install("-q", "torchx")
    session.install("-q", "-e", ".")  # apart: torchx asks for an older urllib3 than ours
    session.run("python", "bench/startup.py", *session.posargs)
