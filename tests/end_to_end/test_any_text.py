"""Whatever text a user writes reaches the program in the container unchanged, or is refused; it never runs as shell.

From the command line through job.sbatch, Slurm, srun, the engine and the image's shell; many texts ride in each job.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.quoting import literal
from runner.runs.checks import check_variable
from tests.end_to_end.conftest import Runner, environment, quoted, write
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import CORPUS

NASTY = st.text(alphabet="'\"$`\\(){}[]#%j -!&|;<>*?~\n\r\t=,:^é😀\x01\x7f", min_size=1, max_size=40)
TEXT = st.text(max_size=60) | NASTY
# written down by the program itself: its words and variables as it got them, NUL between them
REPORT = """\
for word; do printf '%s\\0' "$word"; done >"$RUNNER_RUN/words"
for number in $(seq 0 "$LAST"); do eval "printf '%s\\0' \\"\\$V$number\\""; done >"$RUNNER_RUN/variables"
"""
ENGINES = (("generic-slurm", "ce"), ("generic-pyxis", "pyxis"), ("generic-slurm", "sandbox"), ("local", "sandbox"))


def toml(variables: Sequence[str]) -> str:
    lines = [f"V{number} = {quoted(text)}" for number, text in enumerate(variables)]
    return "\n".join(("[env]", f'LAST = "{len(variables) - 1}"', *lines)) + "\n"


def is_taken(text: str) -> bool:
    """Whether the text may be a word at all; what may not is refused by name, which other tests show."""
    try:
        check_variable("V0", text)
        return bool(literal(text))
    except RunnerError:
        return False


def check(runner: Runner, engine: str, words: Sequence[str], variables: Sequence[str]) -> None:
    """One job: the words as arguments, the texts as values of variables of the job file."""
    write(runner.project, {"jobs/report.sh": REPORT, "jobs/report.toml": toml(variables)})
    launch = ("launch", "--wait", "--env", "box", "--engine", engine, "--script", "report", "--")
    folder = runner.runs / runner(*launch, *words).stdout.strip()
    assert (folder / "words").read_bytes() == b"".join(os.fsencode(word) + b"\0" for word in words)
    assert (folder / "variables").read_bytes() == b"".join(text.encode() + b"\0" for text in variables)
    shutil.rmtree(folder)


@pytest.fixture
def boxed(project: Path, busybox_sqsh: Path) -> Path:
    write(project, {"edf/box.toml": environment(busybox_sqsh)})
    return busybox_sqsh


def taken(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if is_taken(text)]


@pytest.mark.parametrize(("site", "engine"), ENGINES)
@pytest.mark.uses("bubblewrap", "squashfuse")
def test_corpus_in_the_container(cluster: Runner, boxed: Path, site: str, engine: str) -> None:
    runner = Runner(cluster.project, cluster.environ, site)
    texts = taken(CORPUS)
    assert len(texts) > len(CORPUS) - 4  # NUL, half a surrogate pair and the like; nothing else is refused
    check(runner, engine, texts, [text for text in texts if len(text) < 20_000])


@pytest.mark.parametrize(("site", "engine"), ENGINES[:2])
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(TEXT, min_size=60, max_size=80).map(taken),
    variables=st.lists(TEXT, min_size=20, max_size=30).map(taken),
)
def test_any_text_in_the_container(
    cluster: Runner, boxed: Path, site: str, engine: str, words: list[str], variables: list[str]
) -> None:
    """Four jobs on each engine of Slurm, some eighty generated texts in each."""
    check(Runner(cluster.project, cluster.environ, site), engine, words, variables)


def test_bytes_that_are_no_text_arrive(cluster: Runner, boxed: Path) -> None:
    """A file name of another encoding on the command line is a word like any other."""
    check(cluster, "ce", ["latin-\udce9", "\udcff\udc80"], ["x"])


def test_variables_of_the_edf(cluster: Runner, boxed: Path) -> None:
    """Their texts arrive on every engine; `$${` is the way to write `${` there."""
    texts = [text for text in taken(CORPUS) if 0 < len(text) < 5000]
    variables = {f"V{number}": text.replace("${", "$${") for number, text in enumerate(texts)}
    write(cluster.project, {"edf/box.toml": environment(boxed, env=variables)})
    write(cluster.project, {"jobs/report.sh": REPORT, "jobs/report.toml": toml([]).replace("-1", str(len(texts) - 1))})
    for site, engine in ENGINES:
        runner = Runner(cluster.project, cluster.environ, site)
        done = runner("launch", "--wait", "--env", "box", "--engine", engine, "--script", "report", code=None)
        if done.returncode != 0:
            assert "because:" in done.stderr and not done.stdout, f"{engine}: {done.stderr}"
            continue
        got = (runner.runs / done.stdout.strip() / "variables").read_bytes()
        assert got == b"".join(text.encode() + b"\0" for text in texts), engine


@pytest.mark.parametrize(
    "name",
    ["sp ace", "quo'te", 'dou"ble', "$HOME", "$(id)", "ümläut😀", "ha#sh", "per%j", "back\\slash", "co:lon", "com,ma"],
)
def test_folders_and_scripts_of_any_name(cluster: Runner, boxed: Path, name: str) -> None:
    """The project's path and the script's are text too: the job runs in them, or the name is refused before."""
    project = cluster.project.parent / name
    (cluster.project).rename(project)
    write(project, {f"jobs/{name}.sh": 'echo "ran $1"; pwd\n'})
    runner = Runner(project, cluster.environ, "generic-slurm")
    done = runner("launch", "--wait", "--env", "box", "--script", f"jobs/{name}.sh", "--", "it", code=None)
    if done.returncode != 0:
        assert "because:" in done.stderr and not done.stdout, done.stderr
        return
    log = (runner.runs / done.stdout.strip() / "job.log").read_text()
    assert "ran it\n" in log and f"{runner.runs / done.stdout.strip()}/code\n" in log


@pytest.mark.parametrize(
    "text", ["", "'", '"', "$HOME", "$(id)", "`id`", "line\nbreak", "a #c", "%j", "\\", "-x", "😀 é", "plain"]
)
def test_name_and_account_are_taken_or_refused(cluster: Runner, boxed: Path, slurm: SlurmLab, text: str) -> None:
    """What Slurm then says about the job is the very text."""
    words = (f"--name={text}", f"--account={text}", f"--sbatch=--comment={text}")
    for option, field in zip(words, ("JobName", "Account", "Comment"), strict=True):
        done = cluster("launch", "--parsable", "--env", "box", option, "--sbatch=--hold", "--", "true", code=None)
        if done.returncode != 0:
            assert done.returncode in (1, 2) and "because:" in done.stderr and not done.stdout, done.stderr
            continue
        job_id = done.stdout.strip()
        shown = slurm.run(("scontrol", "show", "job", job_id)).stdout
        slurm.run(("scancel", job_id))
        kept = text.lower() if field == "Account" else text  # Slurm keeps account names in small letters
        assert f"{field}={kept}\n" in shown or f"{field}={kept} " in shown, (option, shown)
