"""Any text reaches the program unchanged through the whole script, or is refused; it never runs as shell."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.runs.job import Job
from runner.runs.resolve import resolve
from tests.lab import parts
from tests.runs.scripts import BARE, CORPUS, LOCAL, overrides, run_locally, shell_job, write_run

NASTY = st.text(alphabet="'\"$`\\(){}[]#%j -!&|;<>*?~\n\r\t=,:^é😀\x01\x7f", max_size=40)
TEXT = st.text(max_size=80) | NASTY
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(lambda name: name != "PATH")
# variables that the scripts and shells on the way use for themselves
USED = st.sampled_from(
    ("LC_ALL", "HOME", "ENV", "PS4", "quote", "count", "task", "tasks", "code", "folder", "name", "end")
)
# `cat` gives the program's own words and variables back, byte by byte, as the kernel holds them
REPORT = 'cat "/proc/$$/cmdline" >"$RUNNER_ATTEMPT/arguments"; cat "/proc/$$/environ" >"$RUNNER_ATTEMPT/variables"'


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="runner words-"))
    yield folder
    shutil.rmtree(folder)


def arrived(folder: Path) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Arguments and variables as the program had them."""
    attempt = folder / "attempts" / "1"
    arguments = (attempt / "arguments").read_bytes().split(b"\0")[:-1]
    variables = (attempt / "variables").read_bytes().split(b"\0")[:-1]
    return arguments[4:], dict(entry.partition(b"=")[::2] for entry in variables)


def check(folder: Path, job: Job) -> None:
    write_run(folder, job)
    before = sorted(path.name for path in folder.iterdir())
    done = run_locally(folder)
    assert done.returncode == 0, done.stderr
    arguments, variables = arrived(folder)
    assert arguments == [word.encode() for word in job.arguments]
    for name, value in job.env.items():
        assert variables[name.encode()] == value.encode()
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "attempts"])
    shutil.rmtree(folder)


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_corpus(folders: Path, number: int) -> None:
    """Each text of the corpus as an argument and as the value of a variable."""
    text = CORPUS[number]
    job = shell_job(REPORT, env={"VALUE": text}, launcher="srun")
    check(folders / f"corpus-{number}", replace(job, arguments=(text, "last")))


@settings(max_examples=200 if parts.every_tier() else 25, suppress_health_check=list(HealthCheck))
@given(
    arguments=st.lists(TEXT, max_size=5),
    env=st.dictionaries(NAMES | USED, TEXT, max_size=4),
    number=st.integers(0, 10**9),
)
def test_any_text(folders: Path, arguments: list[str], env: dict[str, str], number: int) -> None:
    """Arguments and variables arrive, or a RunnerError says what cannot."""
    try:
        given_words = overrides(("sh", "-c", REPORT, "sh"), arguments=tuple(arguments), env=env)
        job = resolve((given_words,), BARE, LOCAL)
        folder = folders / f"run {number}"
        shutil.rmtree(folder, ignore_errors=True)
        write_run(folder, job)
    except RunnerError as error:
        assert error.fix
        return
    check(folder, job)


@pytest.mark.parametrize(
    "name", ["it's", 'a"b', "$HOME", "$(id)", "`id`", "a b", "#", "%j", "a\\b", "-x", "😀", "a\nb"]
)
def test_the_run_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """A path is text too: the script finds its folder whatever it is called."""
    check(tmp_path / name, replace(shell_job(REPORT, env={"A": "b"}), arguments=("--", "x y")))


@pytest.mark.parametrize("name", ["it's.py", "$(touch x).py", "a b.sh", "-x.py", "😀.sh", "#.py"])
def test_a_script_may_have_any_name(tmp_path: Path, name: str) -> None:
    """The script's path is one word, and its arguments follow it."""
    code = 'import sys; print("got", sys.argv[1:])' if name.endswith(".py") else "echo got \"['$1']\""
    job = Job("test", BARE, script=f"sub dir/{name}", arguments=("$HOME",))
    done = run_locally(write_run(tmp_path, job, code={f"sub dir/{name}": code + "\n"}))
    assert done.stdout == "got ['$HOME']\n"
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["sub dir"]
