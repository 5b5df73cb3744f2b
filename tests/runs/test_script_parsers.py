"""What Slurm's commands print, as they printed it, is read right; what is unreadable is said, never guessed."""

import pytest

from runner.errors import RunnerError
from runner.runs.schedulers import slurm_commands
from runner.runs.schedulers.scheduler import JobStatus

# squeue --noheader --states=all --jobs=… --Format=JobID:|,State:|,Reason:|,NodeList:|,TimeUsed:|,TimeLeft:|,exit_code:|
# Slurm 22.05.8
SQUEUE = """\
1|FAILED|NonZeroExitCode|nid[001-002]|0:03|59:57|19200|
2|CANCELLED|None|nid[001-002]|0:02|59:58|19200|
3|FAILED|NonZeroExitCode|nid[001-002]|0:00|1:00:00|36608|
4|COMPLETING|None|nid001|0:00|1:00:00|0|
5|PENDING|BeginTime||0:00|1:00:00|0|
7|RUNNING|None|nid[001-002]|1-02:03:04|59:58|0|
8|TIMEOUT|TimeLimit|nid001|1:00|0:00|15|
9|COMPLETED|None|nid001|0:04|59:56|0|
"""


def test_squeue() -> None:
    """States, reasons, nodes and codes; a code only for what has ended, time left only for what has not."""
    found = slurm_commands.parse_status(SQUEUE)
    assert found["1"] == JobStatus("FAILED", "NonZeroExitCode", 75, "nid[001-002]", "0:03", "")
    assert found["2"] == JobStatus("CANCELLED", "", 75, "nid[001-002]", "0:02", "")
    assert found["3"].exit_code == 143
    assert found["4"] == JobStatus("COMPLETING", "", None, "nid001", "0:00", "1:00:00")
    assert found["5"] == JobStatus("PENDING", "BeginTime", None, "", "0:00", "1:00:00")
    assert found["7"] == JobStatus("RUNNING", "", None, "nid[001-002]", "1-02:03:04", "59:58")
    assert found["8"] == JobStatus("TIMEOUT", "TimeLimit", 143, "nid001", "1:00", "")
    assert found["9"] == JobStatus("COMPLETED", "", 0, "nid001", "0:04", "")
    assert len(found) == 8


@pytest.mark.parametrize(
    "text", ["", "\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "1|RUNNING\n"]
)
def test_what_is_no_answer_of_squeue(text: str) -> None:
    """Lines that are not an answer are passed over."""
    assert slurm_commands.parse_status(text) == {}


def test_one_question_names_every_job() -> None:
    """One squeue for all."""
    words = slurm_commands.status(("1", "2", "3"))
    assert words[0] == "squeue"
    assert "--jobs=1,2,3" in words


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("0", 0), ("256", 1), ("9", 137), ("0:9", 137), ("0:15", 143), ("255:0", 255), ("", None), ("x:y", None)],
)
def test_codes(code: str, exit_code: int | None) -> None:
    """As wait(2) gives it, or CODE:SIGNAL; a signal counts as a shell says it."""
    assert slurm_commands.parse_status(f"1|FAILED|None|nid001|0:03|0:00|{code}|\n")["1"].exit_code == exit_code


@pytest.mark.parametrize(
    ("text", "job_id"), [("71\n", "71"), ("71;cluster\n", "71"), ("sbatch: lua: welcome\n71\n", "71")]
)
def test_sbatch(text: str, job_id: str) -> None:
    """`ID` or `ID;CLUSTER`, behind whatever a site's plugin says first."""
    assert slurm_commands.parse_submit(text) == job_id


@pytest.mark.parametrize("text", ["", "Submitted batch job 71\n", "71 72\n", "error\n"])
def test_what_is_no_answer_of_sbatch(text: str) -> None:
    """Its words are in the error."""
    with pytest.raises(RunnerError) as caught:
        slurm_commands.parse_submit(text)
    assert text.strip() in caught.value.why
