"""The project travels with `--on HOST launch`: what a launch copies, only what is new, and never half of it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.slurm import SlurmLab
from tests.remote.sshd import Sshd
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    not shutil.which("/usr/sbin/sshd") or os.geteuid() != 0, reason="needs openssh-server and root"
)
LOCAL = ("--site", "local", "--engine", "host", "--env", "host")
SHOW = "set -e\nfind . -type f | sort\ncat 'it'\\''s \"x\".txt'\n"


@pytest.fixture(scope="module")
def host() -> Iterator[Sshd]:
    with Sshd(os.environ) as started:
        started.install()
        yield started


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(("git", "-C", folder, *who, *words), check=True, capture_output=True)


def make_project(folder: Path) -> Path:
    """A git repository with hostile names, a modified, an untracked, an ignored and a secret file, and a symlink."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs/show.sh").write_text(SHOW)
    (folder / "jobs/show.toml").write_text('script = "jobs/show.sh"\nenvironment = "mine"\n')
    (folder / "edf").mkdir()
    (folder / "edf/mine.toml").write_text('[env]\nGREETING = "from the laptop"\n')
    (folder / 'it\'s "x".txt').write_text("first\n")
    (folder / "two\nlines *").write_text("x\n")
    (folder / "run me").write_text("#!/bin/sh\n")
    (folder / "run me").chmod(0o755)
    (folder / "link").symlink_to("run me")
    (folder / ".gitignore").write_text("*.log\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    (folder / 'it\'s "x".txt').write_text("second\n")
    (folder / "new.py").write_text("print(1)\n")
    (folder / "old.log").write_text("ignored\n")
    (folder / ".env").write_text("KEY=abcdefgh\n")
    return folder


def copy_of(host: Sshd, project: Path) -> Path:
    return host.home / ".local/share/runner/on/code" / os.uname().nodename / str(project)[1:]


def tree(folder: Path) -> dict[str, tuple[str, bool]]:
    """Relative path -> (content or target of a link, executable), without runs and the record."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] not in ("runs", ".git", ".runner-sent") and (path.is_symlink() or path.is_file()):
            content = str(path.readlink()) if path.is_symlink() else path.read_text()
            found[name] = (content, os.access(path, os.X_OK))
    return found


@pytest.mark.parametrize("name", ["plain", 'a b\'s "x" $HOME `id` *'])
def test_a_launch_takes_the_project_with_it(host: Sshd, name: str) -> None:
    """All that a launch copies arrives with its modes and links, and the ignored and secret files stay here."""
    project = make_project(host.local / name)
    done = host("--on", "lab", "launch", *LOCAL[:-2], "show", "--wait", cwd=project)
    assert "second\n" in done.stderr and "COMPLETED" in done.stderr
    expected = tree(project)
    assert {*expected} - {*tree(copy_of(host, project))} == {"old.log", ".env"}
    assert tree(copy_of(host, project)) == {k: v for k, v in expected.items() if k not in ("old.log", ".env")}
    run = copy_of(host, project) / "runs" / done.stdout.strip()
    assert "from the laptop" in (run / "environment.toml").read_text()
    assert done.stdout.strip() in host("--on", "lab", "status", "--site", "local", cwd=project).stdout
    inside = host("--on", "lab", "status", "--site", "local", cwd=project / "jobs").stdout
    assert done.stdout.strip() in inside


def test_a_project_in_a_folder_with_a_line_break(host: Sshd) -> None:
    """It travels; as on the login node, a launch needs a folder for runs without one."""
    project = make_project(host.local / "two\nlines")
    assert "from the laptop" in host("--on", "lab", "env", "show", "mine", "--site", "local", cwd=project).stdout
    assert {*tree(project)} - {*tree(copy_of(host, project))} == {"old.log", ".env"}
    done = host("--on", "lab", "launch", *LOCAL[:-2], "show", cwd=project, code=1)
    assert "the path contains a line break" in done.stderr


def test_only_what_is_new_travels(host: Sshd) -> None:
    project = make_project(host.local / "new")
    show = ("--on", "lab", "env", "show", "mine", "--site", "local")
    assert "sent 13 files" in host(*show, cwd=project).stderr
    assert "sent" not in host(*show, cwd=project).stderr
    (project / "new.py").touch()
    (project / "jobs/show.sh").write_text(SHOW)
    assert "sent" not in host(*show, cwd=project).stderr, "the same content with another time"
    (project / "new.py").write_text("print(2)\n")
    assert "sent 1 files" in host(*show, cwd=project).stderr
    (project / "new.py").unlink()
    (project / "new.py").mkdir()
    (project / "new.py/inner").write_text("a file becomes a folder\n")
    shutil.rmtree(project / "edf")
    (project / "edf").write_text("and a folder a file\n")
    host("--on", "lab", "env", "show", "host", "--site", "local", cwd=project)
    assert {*tree(project)} - {*tree(copy_of(host, project))} == {"old.log", ".env"}
    assert not (copy_of(host, project) / "new.py").is_file()


def test_what_was_changed_or_made_on_the_other_side_is_kept(host: Sshd) -> None:
    project = make_project(host.local / "kept")
    show = ("--on", "lab", "env", "show", "mine", "--site", "local")
    host(*show, cwd=project)
    copy = copy_of(host, project)
    (copy / "new.py").write_text("edited there\n")
    (copy / "later.py").write_text("made there\n")
    (copy / "run me").unlink()
    (project / "later.py").write_text("from here\n")
    errors = host(*show, cwd=project).stderr
    assert "new.py was changed in the copy on lab" in errors and "later.py was changed in the copy on lab" in errors
    assert (copy / "new.py.orig").read_text() == "edited there\n"
    assert (copy / "later.py.orig").read_text() == "made there\n"
    assert {**tree(project), **tree(copy)} == {**tree(copy), **tree(project)}


def test_files_outside_of_the_project_travel_too(host: Sshd) -> None:
    project, other = make_project(host.local / "inside"), host.local / "other place"
    other.mkdir()
    (other / "its job.sh").write_text("echo from outside:$GREETING\n")
    (other / "e.toml").write_text('[env]\nGREETING = "hello"\n')
    words = ("launch", *LOCAL[:-2], f"--env={other}/e.toml", "--script", "../other place/its job.sh", "--wait")
    assert "from outside:hello\n" in host("--on", "lab", *words, cwd=project).stderr
    done = host("--on", "lab", "launch", *LOCAL, "--script", "its job.sh", "--wait", cwd=other)
    assert "from outside:\n" in done.stderr, "a folder that is not a project"
    (project / "batch.sh").write_text("#!/bin/bash\n#SBATCH --time=1\ntrue\n")
    done = host("--on", "lab", "launch", "./batch.sh", "--site", "generic-slurm", "--dry-run", cwd=project)
    assert done.stdout == (project / "batch.sh").read_text()


def test_the_page_of_report_comes_back(host: Sshd) -> None:
    """A report replaces a report, and no other file."""
    project = make_project(host.local / "report")
    run = host("--on", "lab", "launch", *LOCAL[:-2], "show", "--wait", cwd=project).stdout.strip()
    words = ("--on", "lab", "report", run, "--site", "local")
    for _ in range(2):
        assert host(*words, cwd=project).stdout == f"{project}/{run}.html\n"
    assert run in (project / f"{run}.html").read_text()
    job = json.loads(host("--on", "lab", "status", "--json", "--site", "local", cwd=project).stdout)[-1]["job_id"]
    for chosen in ((), ("last",), (job,), (run, "last"), (f"{copy_of(host, project)}/runs/{run}/",)):
        last = ("--on", "lab", "report", *chosen, "--site", "local")
        assert host(*last, cwd=project).stdout == f"{project}/{run}.html\n", "as without --on"
    assert host(*last, "-o", "pages/", cwd=project).stdout == f"{project}/pages/{run}.html\n"
    assert host(*last, "-o", "pages", cwd=project).stdout == f"{project}/pages/{run}.html\n"
    (project / "mine.html").write_text("mine\n")
    assert "the file exists, and runner did not write it" in host(*words, "-o", "mine.html", cwd=project, code=1).stderr
    assert (project / "mine.html").read_text() == "mine\n"
    assert host(*words, "-o", "a b.html", cwd=project).stdout == f"{project}/a b.html\n"
    (project / "notes.txt").write_text("mine\n")
    assert "the file exists, and runner did not write it" in host(*words, "-onotes.txt", cwd=project, code=1).stderr
    assert (project / "notes.txt").read_text() == "mine\n"
    assert host(*words, "-otable.md", "--md", cwd=project).stdout == f"{project}/table.md\n"
    assert json.loads(host(*words, "-o", "x.html", "--json", cwd=project).stdout)[0]["run"] == run
    assert not (project / "x.html").exists(), "as without --on"
    sent = [path for path in copy_of(host, Path("/")).iterdir() if re.fullmatch(r"\.[0-9a-f]{16}.*", path.name)]
    assert not [*sent, *copy_of(host, project).glob("*.md")], "nothing is left there"
    none = host("--on", "lab", "report", "--since", "2100-01-01", "--site", "local", cwd=project)
    assert "no run was launched" in none.stderr and not none.stdout
    if find_spec("matplotlib"):
        drawn = host("--on", "lab", "account", run, "--png", "bars.png", "--site", "local", cwd=project).stdout
        assert drawn == f"{project}/bars.png\n" and (project / "bars.png").is_file()
    done = host("--on", "lab", "env", "check", "--fix", "mine", cwd=project, code=2)
    assert "--on cannot be used with env check --fix" in done.stderr


def test_the_users_own_site_file_travels(host: Sshd) -> None:
    settings = host.local / ".config/runner"
    for name, text in (("sites/mine.toml", 'base = "local"\nsummary = "x"\n[values]\nenv = { A = "of the laptop" }\n'),
                       ("hosts/near.toml", 'host = "lab"\nsite = "mine"\n')):  # fmt: skip
        (settings / name).parent.mkdir(parents=True, exist_ok=True)
        (settings / name).write_text(text)
    project = make_project(host.local / "site")
    words = ("--on", "near", "launch", "--engine", "host", "show", "--dry-run")
    try:
        assert "of the laptop" in host(*words, cwd=project).stdout
        there = host.home / ".config/runner/sites/mine.toml"
        assert there.is_symlink()
        there.unlink()
        there.write_text("summary = 'of the other side'\n")
        (settings / "sites/mine.toml").write_text('base = "local"\nsummary = "y"\n')
        assert "mine.toml is another file" in host(*words, cwd=project, code=1).stderr
        assert there.read_text() == "summary = 'of the other side'\n"
        there.unlink()
        host(*words, cwd=project)
    finally:
        shutil.rmtree(settings)


def test_a_known_secret_stays_here(host: Sshd) -> None:
    project = make_project(host.local / "secret")
    (project / "new.py").write_text("token = 'hf_abcdefghijklmnop'\n")
    secret = {"HF_TOKEN": "hf_abcdefghijklmnop"}
    done = host("--on", "lab", "launch", *LOCAL[:-2], "show", cwd=project, code=1, extra_environ=secret)
    assert "new.py) would contain the value of the secret HF_TOKEN" in done.stderr
    assert not copy_of(host, project).exists()


def test_two_commands_at_the_same_time_do_not_harm_each_other(host: Sshd) -> None:
    project = make_project(host.local / "twice")
    (project / "large.txt").write_bytes(os.urandom(5 << 20))
    argv = host.argv("--on", "lab", "launch", *LOCAL[:-2], "show", "--wait")
    started = [
        subprocess.Popen(argv, cwd=project, env=host.here(), stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for child in started:
        assert child.communicate(timeout=120)[1] and child.returncode == 0
    assert len(list((copy_of(host, project) / "runs").glob("show-*"))) == 3


def test_a_full_disk_on_the_other_side_changes_nothing(host: Sshd) -> None:
    project = make_project(host.local / "full")
    disk = host.home / "small disk"
    disk.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk), check=True)
    (host.local / ".config/runner/hosts").mkdir(parents=True)
    (host.local / ".config/runner/hosts/small.toml").write_text(f'host = "lab"\nfolder = "{disk}/on"\n')
    try:
        words = ("--on", "small", "launch", *LOCAL[:-2], "show", "--dry-run")
        script = host(*words, cwd=project).stdout
        (project / "large.bin").write_bytes(os.urandom(3 << 20))
        (project / "new.py").write_text("changed\n")
        assert "No space left on device" in host(*words, cwd=project, code=1).stderr
        copy = disk / "on/code" / os.uname().nodename / str(project)[1:]
        assert (copy / "new.py").read_text() == "print(1)\n" and not (copy / "large.bin").exists()
        (project / "large.bin").unlink()
        assert host(*words, cwd=project).stdout == script and (copy / "new.py").read_text() == "changed\n"
    finally:
        shutil.rmtree(host.local / ".config/runner/hosts")
        subprocess.run(("umount", disk), check=True)


def test_ctrl_c_while_the_project_travels(host: Sshd) -> None:
    project = make_project(host.local / "stopped")
    (project / "large.txt").write_bytes(os.urandom(9 << 20))
    argv = host.argv("--on", "lab", "launch", *LOCAL[:-2], "show")
    child = subprocess.Popen(argv, cwd=project, env=host.here(), stderr=subprocess.PIPE, text=True)
    state = copy_of(host, Path("/")) / ".state"
    deadline = time.monotonic() + 60
    while not list(state.glob("*/*.part")) and time.monotonic() < deadline:
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 130, errors
    assert not (copy_of(host, project) / "runs").exists()
    assert "second" in host("--on", "lab", "launch", *LOCAL[:-2], "show", "--wait", cwd=project).stderr


def copied(copy: Path) -> dict[str, tuple[str, bool]]:
    """The files of a copy, without those that it keeps beside; nothing while it is written."""
    with suppress(FileNotFoundError):
        return {name: each for name, each in tree(copy).items() if not name.endswith(".orig")}
    return {}


@pytest.mark.slow
def test_twenty_cuts_leave_no_half_run_and_the_same_command_continues(host: Sshd) -> None:
    """After each cut, the copy has one of the states of the project, and no launch has begun."""
    project = make_project(host.local / "cut")
    chance = random.Random(7)
    argv = host.argv("--on", "lab", "launch", *LOCAL[:-2], "show")
    copy, cuts = copy_of(host, project), 0
    begun = time.monotonic()
    host(*argv[3:], cwd=project)
    length = time.monotonic() - begun
    states = [tree(copy)]
    for number in range(20):
        for name in ("a", "b", "c"):
            (project / f"{name}.txt").write_text(f"{number}" + os.urandom(1 << 20).hex())
        before = {path.name for path in (copy / "runs").glob("show-*")}
        child = subprocess.Popen(argv, cwd=project, env=host.here(), stderr=subprocess.PIPE, text=True)
        time.sleep(chance.uniform(0.1, length))
        host.drop()
        errors = child.communicate(timeout=120)[1]
        wanted = {name: each for name, each in tree(project).items() if name not in ("old.log", ".env")}
        # what has arrived whole is written, also after the cut; until then, the copy has no token
        states.append(wanted)
        until(lambda: copied(copy) in states, f"a whole state after cut {number}")
        after = {path.name for path in (copy / "runs").glob("show-*")} - before
        if child.returncode:
            cuts += 1
        for name in after:
            assert (copy / "runs" / name / "lock.toml").is_file() or child.returncode, errors
    assert cuts >= 5, "the cuts came too late"
    assert "second" in host(*argv[3:], "--wait", cwd=project).stderr
    assert not list(copy_of(host, Path("/")).glob(".state/*/*.part"))


def test_script_and_lock_are_those_of_a_launch_on_the_login_node(plain_slurm: SlurmLab) -> None:
    """The copy is replaced by a clone at the same path, and launched there: only the time differs."""
    with Sshd(plain_slurm.environ) as host:
        host.install()
        project = make_project(host.local / "same")
        words = ("launch", "--site", "generic-slurm", "--engine", "host", "show", "--nodes", "1", "--time", "5")
        name = host("--on", "lab", *words, cwd=project).stdout.strip()
        copy = copy_of(host, project)
        (status,) = json.loads(host("--on", "lab", "status", name, *words[1:3], "--json", cwd=project).stdout)
        assert plain_slurm.wait_for(status["job_id"], ("COMPLETED", "FAILED"))["JobState"] == "COMPLETED"
        sent = {file: (copy / "runs" / name / file).read_bytes() for file in ("job.sbatch", "lock.toml", "code.diff")}
        assert host("--on", "lab", *words, "--dry-run", cwd=project).stdout.encode() == sent["job.sbatch"]
        shutil.move(copy, host.home / "moved away")
        shutil.copytree(project, copy, symlinks=True)
        runner = (f"{host.home}/bin/runner", *words)
        done = subprocess.run(runner, cwd=copy, env=host.there(), capture_output=True, text=True, check=True)
        assert done.stdout.strip() == name
        for file, data in sent.items():
            here = (copy / "runs" / name / file).read_bytes()
            assert without_time(here) == without_time(data), file


def without_time(data: bytes) -> list[bytes]:
    return [line for line in data.splitlines() if not line.startswith(b"created = ")]


@pytest.mark.slow
def test_one_changed_file_of_50_000_travels_alone(host: Sshd, capsys: pytest.CaptureFixture[str]) -> None:
    """A repository of 2 GB. The figure is the processor time of this side, with git and the verb."""
    project = host.local / "big"
    for number in range(50_000):
        path = project / f"d{number % 500:03}/f{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d\n" % number + b"x" * 3000)
    for number in range(100):
        with (project / f"weights{number}.bin").open("wb") as file:
            file.truncate(19 << 20)
    (project / "runner.toml").write_text("")
    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    words = ("--on", "lab", "env", "show", "host", "--site", "local")
    assert "sent 50,0" in host(*words, cwd=project, timeout=900).stderr
    figures = []
    for number in range(4):
        (project / "d001/f1.py").write_text(f"changed {number}\n")
        begun = time.monotonic(), sum(os.times()[2:4])
        done = host(*words, cwd=project, timeout=900)
        figures.append((time.monotonic() - begun[0], sum(os.times()[2:4]) - begun[1]))
        assert "sent 3 files" in done.stderr or "sent 2 files" in done.stderr
    plain = time.monotonic()
    host("--on", "lab", "env", "show", "host", "--site", "local")
    plain = time.monotonic() - plain
    with capsys.disabled():
        print(f"\none changed file of 50,000: wall and processor seconds {figures}; a verb without files {plain:.2f}")
    assert min(cpu for _, cpu in figures) < 5
