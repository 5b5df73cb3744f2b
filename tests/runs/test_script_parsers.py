"""What Slurm's commands print, as they printed it, is read right; what is unreadable is said, never guessed."""

import pytest

from runner.errors import RunnerError
from runner.runs.schedulers import slurm
from runner.runs.schedulers.slurm import JobStatus

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

# scontrol show --oneliner job 1, Slurm 22.05.8
SCONTROL = (
    "JobId=1 JobName=sft UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=75:0 RunTime=00:00:03 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2026-11-21T09:37:43 "
    "EligibleTime=2026-11-21T09:37:43 AccrueTime=2026-11-21T09:37:43 StartTime=2026-11-21T09:37:45 "
    "EndTime=2026-11-21T09:37:45 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-21T09:37:45 "
    "Scheduler=Backfill Partition=normal AllocNode:Sid=localhost:5377 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=nid[001-002] BatchHost=nid001 NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=4,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=* MinCPUsNode=2 MinMemoryNode=0 "
    "MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) "
    "Network=(null) Command=/scratch/sft-0001/job.sbatch WorkDir=/scratch/sft-0001 "
    "StdErr=/scratch/sft-0001/job.log StdIn=/dev/null StdOut=/scratch/sft-0001/job.log Power= \n"
)


def test_squeue() -> None:
    """States, reasons, nodes and codes; a code only for what has ended, time left only for what has not."""
    found = slurm.parse_status(SQUEUE)
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
    assert slurm.parse_status(text) == {}


def test_one_question_names_every_job() -> None:
    """One squeue for all."""
    words = slurm.status(("1", "2", "3"))
    assert words[0] == "squeue"
    assert "--jobs=1,2,3" in words


def test_scontrol() -> None:
    """What is still known of a job that left the queue."""
    assert slurm.parse_details(SCONTROL) == JobStatus("FAILED", "NonZeroExitCode", 75, "nid[001-002]", "00:00:03")


@pytest.mark.parametrize(
    ("code", "exit_code"), [("0:0", 0), ("0:9", 137), ("0:15", 143), ("255:0", 255), ("", None), ("x:y", None)]
)
def test_codes_of_scontrol(code: str, exit_code: int | None) -> None:
    """CODE:SIGNAL, where a signal counts as a shell says it."""
    found = slurm.parse_details(SCONTROL.replace("ExitCode=75:0", f"ExitCode={code}"))
    assert found is not None
    assert found.exit_code == exit_code


def test_scontrol_knows_nothing() -> None:
    """`slurm_load_jobs error: Invalid job id specified` goes to stderr, and nothing to stdout."""
    assert slurm.parse_details("") is None


@pytest.mark.parametrize(
    ("text", "job_id"), [("71\n", "71"), ("71;cluster\n", "71"), ("sbatch: lua: welcome\n71\n", "71")]
)
def test_sbatch(text: str, job_id: str) -> None:
    """`ID` or `ID;CLUSTER`, behind whatever a site's plugin says first."""
    assert slurm.parse_submit(text) == job_id


@pytest.mark.parametrize("text", ["", "Submitted batch job 71\n", "71 72\n", "error\n"])
def test_what_is_no_answer_of_sbatch(text: str) -> None:
    """Its words are in the error."""
    with pytest.raises(RunnerError) as caught:
        slurm.parse_submit(text)
    assert text.strip() in caught.value.why
