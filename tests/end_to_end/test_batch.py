"""On a real Slurm: a user's own batch script runs as under plain sbatch, and is a run with attempts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, write
from tests.lab.slurm import SlurmLab

SEEN = """\
#!/bin/bash
#SBATCH --job-name=seen
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5
#SBATCH -o out-%x-%j.txt
printf 'word <%s>\\n' "$@"
echo "in $PWD, submitted in $SLURM_SUBMIT_DIR, $0 is ${0##*/}"
scontrol show job "$SLURM_JOB_ID" | grep -E 'Command=|WorkDir='
srun --nodes=2 --ntasks=2 sh -c 'echo "task $SLURM_PROCID"' | sort
env | sort >"environment-$SLURM_JOB_ID"
echo "relative" >"relative-$SLURM_JOB_ID"
trap 'echo "the trap"; exit 3' USR1
kill -USR1 $$
"""
# what differs between any two jobs, or is ours
OWN = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME",
       "HOSTNAME", "RUNNER_RUN", "RUNNER_ATTEMPT", "RUNNER_SAVE_AND_EXIT"}  # fmt: skip


@pytest.fixture
def place(project: Path) -> Path:
    """A folder of the user's, with the script, apart from the project's folders."""
    write(project, {"work/seen.sbatch": SEEN})
    return project / "work"


def plain(slurm: SlurmLab, environ: Mapping[str, str], place: Path, *words: str) -> str:
    """The job id of a plain `sbatch --wait`, which must not be rejected."""
    argv = ("sbatch", "--parsable", "--wait", *words)
    return slurm.run(argv, cwd=place, env={**environ, "PWD": str(place)}, check=False).stdout.strip()


def environment_of(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def test_a_script_runs_as_under_plain_sbatch(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    """Output, environment, folders, Slurm's record and exit code are the same; the run has them all."""
    environ = {**cluster.environ, "PWD": str(place), "BASH_ENV": str(place / "nothing"), "MINE": "a b"}
    runner = Runner(cluster.project, environ, cluster.site)
    first = plain(slurm, environ, place, "seen.sbatch", "a b", "*")
    name = runner("launch", "--wait", "seen.sbatch", "--", "a b", "*", code=3, cwd=place).stdout.strip()
    folder = cluster.runs / name
    second = (folder / "job_ids").read_text().strip()
    texts = [(place / f"out-seen-{job}.txt").read_text() for job in (first, second)]
    assert texts[0].replace(f"job{first}", "") == texts[1].replace(f"job{second}", "")
    assert "word <*>" in texts[1] and "task 1" in texts[1] and texts[1].endswith("the trap\n")
    variables = [environment_of(place / f"environment-{job}") for job in (first, second)]
    assert variables[1]["RUNNER_RUN"] == str(folder)
    mine, theirs = ({name: text for name, text in each.items() if name not in OWN} for each in variables)
    assert mine == theirs
    jobs = [slurm.job(job) for job in (first, second)]
    same = ("Command", "WorkDir", "NumNodes", "TRES", "TimeLimit", "ExitCode", "Partition", "Requeue", "JobState")
    assert [jobs[0].get(key) for key in same] == [jobs[1].get(key) for key in same]
    assert (folder / "job.log").resolve() == place / f"out-seen-{second}.txt"
    assert (folder / "script/seen.sbatch").read_bytes() == (place / "seen.sbatch").read_bytes()
    status = runner.status(name)
    assert (status["state"], status["exit_code"], status["attempt"]) == ("FAILED", 3, 1)
    logs = runner("logs", name).stdout
    assert "task 1\n" in logs and "runner: attempt 1 ended with exit code 3\n" in logs
    assert "runner: " not in texts[1]
    assert "exit code 3" in runner("why", name, code=None).stdout


def test_the_dry_run_prints_the_scripts_bytes_and_the_source_of_each_value(cluster: Runner, place: Path) -> None:
    environ = {**cluster.environ, "SBATCH_TIMELIMIT": "7"}
    runner = Runner(cluster.project, environ, cluster.site)
    shown = runner("launch", "--dry-run", "--nodes", "1", "./seen.sbatch", "--", "x", cwd=place, text=False)
    assert shown.stdout == (place / "seen.sbatch").read_bytes()
    text = shown.stderr.decode()
    assert f"cd {place} && sbatch --nodes=1 ./seen.sbatch x\n" in text
    found = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  --")}
    assert found["--nodes"] == ["1", "command", "line"]
    assert found["--time"] == ["7", "SBATCH_TIMELIMIT"]
    assert found["--ntasks-per-node"] == ["1", "./seen.sbatch:3"]
    assert not cluster.made()


def test_scripts_end_by_a_signal_as_under_plain_sbatch(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    """Slurm's ExitCode tells `exit 143` from a TERM, and `kill 0` ends the script's own processes alone."""
    text = '#!/bin/bash\n#SBATCH -t 5 -o /dev/null\nsleep 100 &\neval "$1"\nsleep 100\n'
    write(place, {"end.sh": text})
    ways = ("exit 143", "kill -TERM $$", "kill -KILL $$", "kill 0", "kill -- -$$", "trap 'exit 4' INT; kill -INT $$")
    runs = [cluster.launch("./end.sh", "--", way, cwd=place) for way in ways]
    wanted = [slurm.job(plain(slurm, cluster.environ, place, "end.sh", way))["ExitCode"] for way in ways]
    assert wanted == ["143:0", "0:15", "0:9", "0:15", "0:15", "4:0"]
    jobs = [(run / "job_ids").read_text().strip() for run in runs]
    found = [slurm.wait_for(job, ("FAILED", "COMPLETED"))["ExitCode"] for job in jobs]
    assert found == wanted
    assert [(run / "attempts/1/exit_code").read_text() for run in runs] == [
        "143\n",
        "143\n",
        "137\n",
        "143\n",
        "143\n",
        "4\n",
    ]
