"""A restart that cannot help does not happen: the same error a second time, without a new checkpoint, ends the run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from runner.runs import payload
from runner.runs.job import Restart
from runner.runs.why.cause import EXIT, Cause, all_causes
from tests.runs.scripts import run_locally, shell_job, write_run
from tests.runs.test_restart import causes

AWKS = [each for each in (("mawk",), ("gawk",), ("busybox", "awk"), ("original-awk",)) if shutil.which(each[0])]
STOPS = [cause for cause in all_causes() if cause.restart]
MISSING = """echo 'ModuleNotFoundError: No module named "torch"' >&2; exit 1"""


def ended(folder: Path, text: str, **policy: int) -> Path:
    """The run folder of a job with that policy, after its last attempt."""
    run = write_run(folder, shell_job(text, restart=Restart(**policy)))
    with (run / "job.log").open("ab") as log:
        run_locally(run, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    return run


def found(awk: tuple[str, ...], *logs: str, code: int = 1) -> str:
    """What a batch script finds in these logs of a failed task."""
    text = "".join(f"{log}\n\001\n" for log in logs)
    argv = (*awk, "-v", f"code={code}", "-f", str(Path(payload.__file__).with_name("stops.awk")))
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("awk", AWKS, ids=lambda awk: awk[0])
def test_each_pattern_finds_the_message_of_its_cause_and_not_the_near_miss(awk: tuple[str, ...]) -> None:
    for cause in (each for each in STOPS if each.kind != EXIT):
        assert found(awk, f"step 1\n{cause.message}").split(" ")[0] == cause.code
        assert found(awk, cause.near_miss).split(" ")[0] != cause.code


def test_only_causes_that_come_again_have_a_pattern() -> None:
    """The list stays short: what a batch script decides must be easy to check."""
    assert {cause.restart for cause in STOPS} == {"stop"} and len(STOPS) <= 40
    assert not [cause.code for cause in STOPS if bool(cause.node) == (cause.kind == EXIT)]
    assert not [cause.code for cause in all_causes() if cause.node and not cause.restart]
    assert not [cause.code for cause in STOPS if re.search(r"/|\\[A-Za-z]|\{[0-9]|\(\?", cause.node)]  # not POSIX


def message(code: str) -> Cause:
    return next(cause for cause in STOPS if cause.code == code)


@pytest.mark.parametrize("awk", AWKS, ids=lambda awk: awk[0])
def test_an_error_that_the_program_has_handled_does_not_count(awk: tuple[str, ...]) -> None:
    error = "ModuleNotFoundError: No module named 'apex'"
    expected = f"module-missing {error}"
    assert found(awk, f"[rank0]: {error}") == expected
    assert found(awk, f"{error}\nstep 1\nRuntimeError: NCCL communicator was aborted") == ""
    assert found(awk, error + "\nstep" * 200) == ""
    # what torchrun and other ranks add does not hide it
    assert found(awk, f"{error}\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: ") == expected
    assert found(awk, "step 1", f"{error}", "torch.distributed.DistBackendError: NCCL error") == expected
    assert found(awk, "step 1", code=127) == "exit-not-found exit code 127"
    assert found(awk, "step 1", code=1) == ""


def stopped(run: Path) -> str:
    return (run / "stopped").read_text().strip()


def test_the_same_error_twice_ends_the_run(tmp_path: Path) -> None:
    run = ended(tmp_path, MISSING, script_failure=5, without_checkpoint=5)
    assert causes(run) == ["script_failure"] * 2
    line = 'module-missing: ModuleNotFoundError: No module named "torch"'
    assert stopped(run) == f"the same error twice, and a restart cannot help: {line}"
    assert f"no further attempt: {stopped(run)}" in (run / "job.log").read_text()
    assert (run / "attempts/2/error").read_text() == 'module-missing ModuleNotFoundError: No module named "torch"\n'


def test_a_command_that_does_not_exist_and_a_wrong_argument(tmp_path: Path) -> None:
    for name, text in (("a", "exec /none/train"), ("b", "echo 'x.py: error: unrecognized arguments: --lr 3'; exit 2")):
        run = ended(tmp_path / name, text, script_failure=5, without_checkpoint=5)
        assert causes(run) == ["script_failure"] * 2 and "a restart cannot help" in stopped(run)


def test_numbers_in_the_line_may_differ(tmp_path: Path) -> None:
    text = "echo \"PermissionError: [Errno 13] Permission denied: '$RUNNER_ATTEMPT/x'\"; exit 1"
    run = ended(tmp_path, text, script_failure=5, without_checkpoint=5)
    assert len(causes(run)) == 2


@pytest.mark.parametrize(
    "text",
    [
        # another error each time; an error that may go away; a signal; a new checkpoint in each attempt
        """echo "ModuleNotFoundError: No module named 'm$(printf %*s $(ls ../attempts | wc -l) | tr ' ' x)'"; exit 1""",
        "echo 'ConnectionError: the server does not answer'; exit 1",
        MISSING.replace("exit 1", "kill -KILL $$"),
        f"""
n=$(ls ../attempts | wc -l)
mkdir -p ../checkpoints/checkpoint-$n
echo '{{}}' >../checkpoints/checkpoint-$n/complete.json
{MISSING}""",
    ],
)
def test_any_other_failure_uses_its_restarts(tmp_path: Path, text: str) -> None:
    run = ended(tmp_path, text, script_failure=3, without_checkpoint=9)
    assert causes(run) == ["script_failure"] * 4
    assert stopped(run) == "fourth script_failure; [restart] allows 3"
