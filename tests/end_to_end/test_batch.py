"""On a real Slurm: a user's own batch script runs as under plain sbatch, and is a run with attempts."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, write
from tests.lab.slurm import SlurmLab
from tests.runs.test_notify import Server
from tests.waiting import until

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
       "HOSTNAME", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME",
       "RUNNER_RUN", "RUNNER_ATTEMPT", "RUNNER_SAVE_AND_EXIT"}  # fmt: skip


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
    write(place, {"bash_env": "export STARTED=$((STARTED + 1))\n"})  # only the job's own shells may read it
    environ = {**cluster.environ, "PWD": str(place), "BASH_ENV": str(place / "bash_env"), "MINE": "a b"}
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
    jobs = [slurm.wait_for(job, "FAILED") for job in (first, second)]
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


SHELL = """\
#!/bin/bash
#SBATCH -t 5 -o /dev/null --no-requeue
number=$((SLURM_RESTART_COUNT + $(ls shell-"$1"-* 2>/dev/null | wc -l)))
{ env -0 | sort -z | grep -z -v -e ^SLURM -e ^RUNNER_ -e ^HOSTNAME; set -o; shopt; declare -F; } >"shell-$1-$number"
[ "$1$number" = plain0 ] || [ "$number" = 1 ] || exit 75
"""


def test_the_shell_options_and_functions_of_the_user_reach_the_script_alone(
    cluster: Runner, slurm: SlurmLab, place: Path
) -> None:
    """Also with a large environment, with options that keep bash from reading our file, and in a job that follows."""
    write(place, {"shell.sh": SHELL})
    hostile = {
        "POSIXLY_CORRECT": "1",
        "SHELLOPTS": "braceexpand:hashall:posix",
        "BASHOPTS": "failglob",
        **{f"BASH_FUNC_{name}%%": "() {  echo replaced\n}" for name in ("cd", "kill", "read", "dirname")},
        **{f"BIG{number}": "x" * 100_000 for number in range(12)},
    }
    plain(slurm, {**cluster.environ, **hostile}, place, "shell.sh", "plain")
    words = ("launch", "--restart", "time_limit=1", "./shell.sh", "--", "run")
    name = cluster(*words, cwd=place, extra_environ=hostile).stdout.strip()
    status = cluster.wait(name, lambda status: status["state"] == "COMPLETED" and status["attempt"] == 2)
    assert status["causes"] == ["time_limit", "done"] and len(status["job_ids"]) == 2
    texts = [(place / f"shell-{each}").read_text().split("\0") for each in ("plain-0", "run-0", "run-1")]
    assert [set(text) ^ set(texts[0]) for text in texts] == [set()] * 3
    assert any(word.startswith("BIG11=") for word in texts[0])


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
    given = ("--hang-seconds", "90", "--restart", "hang=2")
    text = cluster("launch", "--dry-run", *given, "./seen.sbatch", cwd=place).stderr
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["hang_seconds"] == ["90", "command", "line"] and rows["restart.hang"] == ["2", "command", "line"]
    assert rows["--open-mode"] == ["append", "command", "line"]
    assert not cluster.made()


def test_the_dry_run_asks_slurm_whether_it_accepts_the_script(cluster: Runner, place: Path) -> None:
    """Nothing is submitted. It fails as the launch would, after it has printed the script."""
    for name, line, why in (
        ("fits", "--nodes=2 --time=5", ""),
        ("number", "--cpus-per-task={{cpus}}", "{{cpus}}"),
        ("partition", "--partition=none --time=5", "partition"),
    ):
        write(place, {f"{name}.sbatch": f"#!/bin/bash\n#SBATCH {line}\ntrue\n"})
        done = cluster("launch", "--dry-run", f"./{name}.sbatch", cwd=place, code=1 if why else 0)
        assert done.stdout == (place / f"{name}.sbatch").read_text() and "would run: cd " in done.stderr
        assert ("sbatch rejected the job" in done.stderr) == bool(why) and why in done.stderr, done.stderr
        assert ("estimated start: " in done.stderr) != bool(why)
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


TRAPS = """\
#!/bin/bash
#SBATCH -t 5 -o /dev/null
log=seen-$SLURM_JOB_ID
for signal in USR1 USR2 TERM; do trap "echo script $signal >>$log; let n++" $signal; done
bash -c "trap 'echo child USR2 >>$log' USR2; echo up >>$log; while :; do sleep 0.1; done" &
until [ "$n" = 4 ]; do sleep 0.1; done
exit 3
"""


def test_signals_reach_the_script_exactly_once(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    """scancel --batch signals the script alone, --full its processes too, and plain scancel the whole job."""
    write(place, {"traps.sh": TRAPS})
    argv = ("sbatch", "--parsable", "traps.sh")
    run = cluster.launch("./traps.sh", cwd=place)
    jobs = [slurm.run(argv, cwd=place).stdout.strip(), cluster.status(run.name)["job_id"]]
    logs = [place / f"seen-{job}" for job in jobs]
    until(lambda: all(log.is_file() for log in logs))
    lines = 1
    for words, count in ((("--batch", "-s", "USR1"), 1), (("--full", "-s", "USR2"), 2), (("--batch", "-s", "TERM"), 1)):
        lines += count
        for job, log in zip(jobs, logs, strict=True):
            slurm.run(("scancel", *words, job))
            until(lambda log=log, lines=lines: len(log.read_text().splitlines()) == lines)  # type: ignore[misc]
    slurm.run(("scancel", *jobs))
    until(lambda: cluster.status(run.name)["state"] == "CANCELLED")
    until(lambda: all(slurm.job(job)["JobState"] == "CANCELLED" for job in jobs))
    texts = [sorted(log.read_text().splitlines()) for log in logs]
    wanted = ["child USR2", "script TERM", "script TERM", "script USR1", "script USR2", "up"]
    assert texts == [wanted, wanted]


def test_another_interpreter_gets_the_same_words_and_variables(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    text = "#!/usr/bin/env python3\n#SBATCH -t 5 --export=NONE -o py-%j\nimport os, sys\nprint(sys.argv[1:])\n"
    text += "names = [name for name in os.environ if not name.startswith('RUNNER_')]\n"
    text += (
        "print(os.getcwd(), sorted(names), os.environ['SLURM_EXPORT_ENV'], os.environ['SLURM_JOB_NAME'])\nsys.exit(5)\n"
    )
    write(place, {"py.sbatch": text, "bash_env": ""})
    environ = {**cluster.environ, "BASH_ENV": str(place / "bash_env")}  # not exported
    first = plain(slurm, environ, place, "py.sbatch", "a b")
    _, log = Runner(cluster.project, environ, cluster.site).finished("py.sbatch", "--", "a b", code=5, cwd=place)
    assert log == (place / f"py-{first}").read_text() and "['a b']" in log and "NONE py.sbatch\n" in log


def test_each_task_of_an_array_is_a_run(cluster: Runner, place: Path) -> None:
    head = "#!/bin/bash\n#SBATCH -t 5 -a 1-5:2 -o %x-%a\n"
    write(place, {"array.sh": head + 'echo "task $SLURM_ARRAY_TASK_ID"\nexit $((SLURM_ARRAY_TASK_ID % 3))\n'})
    name = cluster("launch", "--wait", "./array.sh", code=2, cwd=place).stdout.strip()
    rows = json.loads(cluster("status", "--json", name).stdout)
    assert name == "array-array-0001"
    assert [row["job_id"].partition("_")[2] for row in rows] == ["1", "3", "5"]
    assert [(row["state"], row["exit_code"]) for row in rows] == [("FAILED", 1), ("COMPLETED", 0), ("FAILED", 2)]
    assert cluster("logs", "array-0002").stdout.startswith("task 3\n")
    again = cluster("rerun", "array-0003").stdout.strip()
    status = cluster.wait(again, lambda status: status["state"] == "FAILED")
    assert status["job_id"].endswith("_5") and (cluster.runs / again / "job.log").read_text() == "task 5\n"


def test_a_heterogeneous_job_is_one_run(cluster: Runner, place: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -t 5 -N 1 -o het\n#SBATCH hetjob\n#SBATCH -N 1\n"
    write(place, {"het.sh": text + 'srun --het-group=0,1 sh -c "echo part $SLURM_HET_SIZE"\nexit 6\n'})
    folder, log = cluster.finished("./het.sh", code=6, cwd=place)
    assert log.count("part 2\n") == 2
    assert cluster.status(folder.name)["state"] == "FAILED"


def test_the_script_may_requeue_itself_and_a_policy_may_restart_it(cluster: Runner, place: Path) -> None:
    text = '#!/bin/bash\n#SBATCH -t 5 -o out\necho "start ${SLURM_RESTART_COUNT:-0}"\neval "$1"\n'
    write(place, {"again.sh": text})
    own = '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || { scontrol requeue $SLURM_JOB_ID; sleep 100; }'
    mine = cluster.launch("./again.sh", "--", own, cwd=place)
    cluster.wait(mine.name, lambda status: status["state"] == "COMPLETED")
    assert (mine / "attempts/2/exit_code").read_text() == "0\n" and (place / "out").read_text() == "start 1\n"
    words = ("--restart", "time_limit=1", "./again.sh", "--", "exit 75")
    folder = cluster.launch(*words, cwd=place)
    status = cluster.wait(folder.name, lambda status: status["state"] == "FAILED" and status["attempt"] == 2)
    assert status["reason"] == "second time_limit; [restart] allows 1"
    assert cluster("logs", folder.name).stdout.count("start 1\n") == 1


TWICE = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5 --output=out
number=${RUNNER_ATTEMPT##*/}
env | grep -v -e ^RUNNER_ATTEMPT= -e ^RUNNER_SAVE_AND_EXIT= -e ^_= -e ^SHLVL= | sort >"environment-$number"
echo "start $number with $*"
srun --nodes=2 --ntasks=2 sh -c 'echo "task $SLURM_PROCID"'
[ "$number" = 2 ] || { sleep 100 & exit 3; }
"""


def test_on_request_the_whole_script_runs_again_in_its_allocation(
    cluster: Runner, slurm: SlurmLab, place: Path
) -> None:
    """With the same words, variables and output, in the same job."""
    write(place, {"twice.sh": TWICE})
    policy = ("--restart", "script_failure=1", "--restart", "in_place=true")
    folder = cluster.launch(*policy, "./twice.sh", "--", "a b", cwd=place)
    cluster.wait(folder.name, lambda status: status["state"] == "COMPLETED")
    (job,) = (folder / "job_ids").read_text().split()
    assert slurm.job(job)["Restarts"] == "0"
    assert sorted((place / "out").read_text().splitlines()) == [
        "start 1 with a b", "start 2 with a b", *["task 0"] * 2, *["task 1"] * 2]  # fmt: skip
    first, second = (environment_of(place / f"environment-{number}") for number in (1, 2))
    assert second == first  # with SLURM_OVERLAP, parallel steps of the script would share their GPUs
    why = "the script ended with exit code 3: the next attempt starts in this allocation, on the same nodes"
    assert (folder / "attempts/1/next").read_text().splitlines()[:2] == ["in_place", why]
    assert (folder / "attempts/2/exit_code").read_text() == "0\n"


def test_a_rerun_submits_the_bytes_of_the_launch(cluster: Runner, place: Path) -> None:
    """Also when the file has changed since; --from-snapshot runs the script of the run's own copy of the code."""
    write(place, {"save.sh": "#!/bin/bash\n#SBATCH -t 5\necho old $LR $0\npwd\n", "lib": "x"})
    sweep = cluster("launch", "--sweep", "LR=1,2", "./save.sh", cwd=place).stdout.strip()
    rows = json.loads(cluster("status", "--json", sweep).stdout)
    write(place, {"save.sh": "#!/bin/bash\n#SBATCH -t 5\necho new\npwd\n"})
    done = cluster("rerun", rows[1]["run"])
    assert f"{place}/save.sh has changed since" in done.stderr
    again = done.stdout.strip()
    cluster.wait(again, lambda status: status["state"] == "COMPLETED")
    assert (cluster.runs / again / "job.log").read_text().startswith("old 2 ")
    folder, log = cluster.finished("--from-snapshot", "./save.sh", cwd=place)
    assert log == f"new\n{folder}/code/work\n"


WATCHED = {"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "1", "RUNNER_START_SECONDS": "0"}
ALL_EVENTS = 'batch = "train.sbatch"\nnotify = ["start", "first_step", "requeue", "failure", "end"]\n'
TOLD = """\
#!/bin/bash
#SBATCH -t 5 -o out
echo "token $HF_TOKEN"
echo '{"step": 1}' >>"$RUNNER_RUN/metrics.jsonl"
until grep -q first_step "$RUNNER_ATTEMPT/notified"; do sleep 0.1; done
exit 9
"""


def test_the_webhook_is_told_about_each_attempt_of_a_script(cluster: Runner, place: Path) -> None:
    """Also about the first step, if the program writes metrics.jsonl; a secret of the job's variables is masked."""
    write(cluster.project, {"jobs/told.toml": ALL_EVENTS + "[restart]\nscript_failure = 1\n", "train.sbatch": TOLD})
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        secrets = cluster.project / "secrets"
        secrets.write_text(f"RUNNER_WEBHOOK={server.url}\n")
        secrets.chmod(0o600)
        extra = {**WATCHED, "RUNNER_SECRETS": str(secrets), "HF_TOKEN": "correct-horse-battery"}
        name = cluster("launch", "told", extra_environ=extra, cwd=place).stdout.strip()
        cluster.wait(name, lambda status: status["state"] == "FAILED" and status["attempt"] == 2)
        until(lambda: len(server.got) == 6)
        server.shutdown()
    texts = server.texts()
    told = sorted((text[text.index("(attempt ") + 9], text.split(" (")[0].split(" on ")[0]) for text in texts)
    assert told == [
        ("1", f"{name}: script_failure: another attempt follows"),
        ("1", f"{name}: started"),
        ("1", f"{name}: the first step is done"),
        ("2", f"{name}: ended by script_failure, exit code 9"),
        ("2", f"{name}: started"),
        ("2", f"{name}: the first step is done"),
    ]
    assert "token (secret)" in texts[-1] and not any("correct-horse" in text for text in texts)


SILENT = """\
#!/bin/bash
#SBATCH -t 5 -o out-%j
echo "step 1/9 loss 2.5"
echo "step 2/9 loss 2.5"
[ "${RUNNER_ATTEMPT##*/}" = 1 ] || exit 0
trap '' TERM
sleep 1000 &
echo $! >sleeping
wait
"""


def test_a_script_that_falls_silent_is_ended_and_restarted(cluster: Runner, place: Path) -> None:
    """After three times --hang-seconds, a log that no longer grows is a hang."""
    write(place, {"silent.sbatch": SILENT})
    words = ("--hang-seconds", "3", "--restart", "hang=1", "./silent.sbatch")
    folder = cluster.launch(*words, extra_environ=WATCHED, cwd=place)
    cluster.wait(folder.name, lambda status: status["state"] == "COMPLETED" and status["attempt"] == 2)
    causes = [(folder / f"attempts/{number}/cause").read_text() for number in (1, 2)]
    assert causes == ["hang\n", "done\n"]
    assert not Path(f"/proc/{(place / 'sleeping').read_text().strip()}").exists()
    assert "no progress for" in (folder / "attempts/1/runner.log").read_text()


def test_tokens_per_second_of_a_script_are_those_of_all_its_processes(cluster: Runner, place: Path) -> None:
    """torchtitan logs those of one process; Slurm knows how many there are."""
    log = Path(__file__).parents[1] / "runs/trainers/logs/torchtitan.log"
    write(place, {"titan.sbatch": f"#!/bin/bash\n#SBATCH -t 5 --nodes=2 --ntasks=2 -o out-%j\ncat {log}\n"})
    folder, _ = cluster.finished("./titan.sbatch", cwd=place, extra_environ=WATCHED)
    row = cluster.status(folder.name)
    assert (row["step"], row["tokens_per_second"]) == (20, 2 * 6401)


def test_the_time_limit_restarts_a_script_only_where_that_is_asked_for(
    cluster: Runner, slurm: SlurmLab, place: Path
) -> None:
    """Without a restart, and after the last one, Slurm's record, the status and `why` name the time limit."""
    write(place, {"long.sbatch": "#!/bin/bash\n#SBATCH -t 5 -o out-%j\necho up\nsleep 1000\n"})

    def start_and_time_out(folder: Path, job: str, number: int) -> None:
        until((folder / f"attempts/{number}").exists)
        slurm.wait_for(job, "RUNNING")
        until(lambda: (place / f"out-{job}").read_text().count("up\n") == number)
        slurm.run(("scontrol", "update", f"JobId={job}", "EndTime=now+1"))

    def timed_out(folder: Path, number: int) -> None:
        until((folder / f"attempts/{number}/cause").exists, seconds=300)  # Slurm looks twice a minute
        assert (folder / f"attempts/{number}/cause").read_text() == "time_limit\n"

    plain, restarted = (
        cluster.launch(*words, "./long.sbatch", cwd=place) for words in ((), ("--restart", "time_limit=1"))
    )
    jobs = {folder: cluster.status(folder.name)["job_id"] for folder in (plain, restarted)}
    for folder, job in jobs.items():
        start_and_time_out(folder, job, 1)
    for folder in jobs:
        timed_out(folder, 1)
    start_and_time_out(restarted, jobs[restarted], 2)
    timed_out(restarted, 2)
    for folder, attempts in ((plain, 1), (restarted, 2)):
        assert slurm.wait_for(jobs[folder], "TIMEOUT")["Restarts"] == str(attempts - 1)
        status = cluster.wait(folder.name, lambda status: status["state"] == "TIMEOUT")
        assert status["attempt"] == attempts
        assert "time limit" in cluster("why", folder.name, code=None).stdout
        assert (folder / "stopped").exists() == (attempts > 1)


def test_a_rerun_of_a_script_with_a_secret_submits_the_file_itself(cluster: Runner, place: Path) -> None:
    """No run folder has a copy of it. If the file has changed, the user is told; if it is gone, nothing remains."""
    secret = {"HF_TOKEN": "correct-horse-battery"}
    text = "#!/bin/bash\n#SBATCH -t 5 -o out-%j\ntoken=correct-horse-battery\necho first\n"
    write(place, {"secret.sh": text})
    done = cluster("launch", "--wait", "./secret.sh", extra_environ=secret, cwd=place)
    first = done.stdout.strip()
    assert "copying neither the code nor the script to the run folder" in done.stderr
    again = cluster("rerun", first, extra_environ=secret)
    cluster.wait(again.stdout.strip(), lambda status: status["state"] == "COMPLETED")
    assert "has changed" not in again.stderr
    write(place, {"secret.sh": text.replace("first", "second")})
    changed = cluster("rerun", first, extra_environ=secret)
    cluster.wait(changed.stdout.strip(), lambda status: status["state"] == "COMPLETED")
    assert f"{place}/secret.sh has changed since the launch; submitting it as it is now" in changed.stderr
    names = [done.stdout.strip() for done in (again, changed)]
    assert [cluster("logs", name).stdout.partition("\n")[0] for name in names] == ["first", "second"]
    (place / "secret.sh").unlink()
    before = cluster.made()
    gone = cluster("rerun", first, code=1, extra_environ=secret)
    assert "secret.sh" in gone.stderr and cluster.made() == before
    for path in cluster.runs.rglob("*"):
        assert path.is_symlink() or not path.is_file() or b"correct-horse" not in path.read_bytes(), path


def test_each_task_of_an_array_restarts_by_itself(cluster: Runner, place: Path) -> None:
    """Its attempts and causes are its own; a rerun of one task has the policy too."""
    head = "#!/bin/bash\n#SBATCH -t 5 -a 1-2 -o %x-%a\n"
    text = 'echo "start ${SLURM_RESTART_COUNT:-0} of $SLURM_ARRAY_TASK_ID"\n'
    text += '[ "$SLURM_ARRAY_TASK_ID" = 1 ] || [ "${RUNNER_ATTEMPT##*/}" = 2 ] || exit 75\n'
    write(place, {"again.sh": head + text})
    name = cluster("launch", "--restart", "time_limit=1", "./again.sh", cwd=place).stdout.strip()
    rows = json.loads(cluster("status", "--json", name).stdout)
    for row, attempts in zip(rows, (1, 2), strict=True):
        last = cluster.wait(
            row["run"], lambda status, n=attempts: (status["state"], status["attempt"]) == ("COMPLETED", n)
        )
        assert last["causes"] == ["time_limit", "done"][2 - attempts :]
    assert cluster("logs", rows[1]["run"]).stdout.count(" of 2\n") == 2
    again = cluster("rerun", rows[1]["run"]).stdout.strip()
    cluster.wait(again, lambda status: status["state"] == "COMPLETED" and status["attempt"] == 2)
    assert "start 0 of 1" in (place / "again.sh-1").read_text()
