"""A user's own batch script is launched unchanged; what sbatch, or a run, cannot take is refused before submission."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from runner.commands.launch import explain
from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import payload
from runner.runs.budget import estimate
from runner.runs.launch import prepare
from runner.runs.own_script import OwnScript, OwnScriptPlan
from runner.runs.plan import Request, RunPlan
from runner.runs.sweep import with_values
from tests.runs.scripts import given
from tests.runs.test_payload import programs
from tests.waiting import until

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 -t 10 # a comment\n#SBATCH --gres=gpu:h100:4\n"


def plan(folder: Path, text: str | bytes, request: Request | None = None, **variables: str) -> RunPlan:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "train.sbatch").write_bytes(data)
    request = request or Request(job="train.sbatch", site="generic-slurm", dry_run=True)
    return prepare(request, Project(None, folder / "shipped", folder), {"HOME": "/nowhere", **variables}, Quiet())


def batch(folder: Path, text: str = HEAD, request: Request | None = None, **variables: str) -> OwnScript:
    found = plan(folder, text, request, **variables)
    assert isinstance(found, OwnScriptPlan)
    return found.own


def launch(**changes: object) -> Request:
    return Request(**{"job": "train.sbatch", "site": "generic-slurm", "dry_run": True, **changes})  # type: ignore[arg-type]


def options(found: OwnScript) -> dict[str, tuple[str, str]]:
    return {name: (setting.value, str(setting.origin)) for name, setting in found.options.items()}


def test_each_option_comes_from_the_strongest_source(tmp_path: Path) -> None:
    """Command line, then SBATCH_*, then the script; only the command line's are passed on as flags."""
    request = launch(given=given(nodes=3, sbatch=("--qos=low",)))
    found = batch(tmp_path, HEAD + "#SBATCH -p old -p new\n", request, SBATCH_TIMELIMIT="7", SBATCH_QOS="high")
    assert options(found) == {
        "nodes": ("3", "command line"),
        "time": ("7", "SBATCH_TIMELIMIT"),
        "gres": ("gpu:h100:4", "train.sbatch:3"),
        "partition": ("new", "train.sbatch:4"),
        "qos": ("low", "command line"),
    }
    assert found.flags == ("--nodes=3", "--qos=low")


def test_a_job_file_names_the_script_and_its_settings(tmp_path: Path) -> None:
    text = 'batch = "train.sbatch"\narguments = ["a b"]\n[resources]\ntime = "5"\n[env]\nLR = "1e-3"\n'
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/mine.toml").write_text(text)
    (tmp_path / "train.sbatch").write_text(HEAD)
    request = launch(job="jobs/mine.toml", words=("more",))
    found = prepare(request, Project(tmp_path, tmp_path, tmp_path), {"XDG_CONFIG_HOME": "/nowhere"}, Quiet())
    assert (found.job.name, found.job.arguments) == ("mine", ("a b", "more"))
    assert "export LR=1e-3\n" in found.files["submit.sh"]
    assert 'exec sbatch --parsable --time=00:05:00 "$@" "$script" \'a b\' more\n' in found.files["submit.sh"]


def test_the_site_adds_only_a_missing_account_and_partition(tmp_path: Path) -> None:
    """None of the site's other flags and defaults; a dry run without an account says how to set one."""
    site = launch(site="alps-clariden", given=given(account="a01"))
    found = plan(tmp_path, HEAD, site)
    assert found.job.sbatch == ("--partition=normal", "--account=a01") and not found.notes
    missing = plan(tmp_path, HEAD + "#SBATCH -p debug\n", launch(site="alps-clariden"))
    assert missing.job.sbatch == () and "runner init --site alps-clariden --account NAME" in missing.notes[0]


def test_resources_are_read_for_the_cost_and_the_record(tmp_path: Path) -> None:
    job = plan(tmp_path, HEAD).job
    assert (job.resources.nodes, job.resources.gpus_per_node, job.resources.time_minutes) == (2, 4, 10)
    assert plan(tmp_path, "#!/bin/bash\n#SBATCH -N 2 -G 6\n").job.gpus == 6


@pytest.mark.parametrize(
    ("lines", "hours"),
    [
        ("-N 2 --gpus-per-node=8 -t 60", 16),
        ("-N 2-4 --gpus-per-node=8 -t 60", 32),
        ("-N 2 --gres=gpu:a:2,gpu:b:1,shard:4 -t 60", 6),
        ("--ntasks=16 --ntasks-per-node=8 --gres=gpu:8 -t 60", 16),
        ("--gpus=16 --gpus-per-node=8 -t 60", 16),
        ("-N 2 --gpus-per-node=8 -t 60\n#SBATCH hetjob\n#SBATCH -N 1 --gpus-per-node=8 -t 30", 24),
        ("-N 1 -t 60\n#SBATCH packjob\n#SBATCH -N 3 -G 6 -t 120", 12),
        ("-N 2 --gpus-per-node=8 -t 60\n#SBATCH hetjob\n#SBATCH --gpus-per-node=8", None),
    ],
)
def test_the_cost_is_that_of_all_nodes_and_components(tmp_path: Path, lines: str, hours: int | None) -> None:
    """No number if a component has no time limit: it would be no upper bound."""
    found = estimate(plan(tmp_path, f"#!/bin/bash\n#SBATCH {lines}\n").job)
    assert (found and found.most) == hours


def test_directives_in_a_here_document_are_not_late(tmp_path: Path) -> None:
    text = f"{HEAD}sbatch <<EOF\n#!/bin/bash\n#SBATCH -N 9\nEOF\n"
    assert not any("ignores" in note for note in plan(tmp_path, text).notes)
    found = plan(tmp_path, "#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH -N 9\nEOF\n")
    assert found.job.resources.nodes == 1


@pytest.mark.parametrize(
    ("first", "reads"),
    [
        ("#!/bin/bash", True),
        ("#! /usr/bin/env bash", True),
        ("#!/bin/bash -l", True),
        ("#!/usr/bin/env -S bash -eux", True),
        ("#!/bin/sh", False),
        ("#!/bin/bash -p", False),
        ("#!/bin/bash --posix", False),
        ("#!/bin/bash -v", False),
        ("#!/usr/bin/env python3", False),
        ("#!/usr/bin/zsh", False),
    ],
)
def test_only_an_interpreter_that_does_not_read_bash_env_gets_a_wrapper(
    tmp_path: Path, first: str, reads: bool
) -> None:
    found = plan(tmp_path, f"{first}\n#SBATCH -t 5\n# more\necho\n#SBATCH -N 9\n")
    assert isinstance(found, OwnScriptPlan) and found.own.reads_bash_env == reads
    if not reads:
        assert found.files["wrapper/train.sbatch"] == "#!/bin/bash\n#SBATCH -t 5\n# more\n"
    assert found.notes[0] == "train.sbatch:5: sbatch ignores #SBATCH lines after the first command (line 4)"


def test_a_script_that_itself_runs_in_a_container_gets_no_wrapper(tmp_path: Path) -> None:
    """The image may have no bash, and may not see the run folder."""
    found = plan(tmp_path, "#!/bin/sh\n#SBATCH --container-image=x\n")
    assert "wrapper" not in found.files["submit.sh"] and found.notes[0].startswith(
        "the script itself runs in a container"
    )


@pytest.mark.parametrize(
    ("export", "flag"),
    [
        ("", ""),
        ("ALL", ""),
        ("ALL,A=1", ""),
        ("NONE", "--export=LR,BASH_ENV"),
        ("HOME,A=1", "--export=HOME,A=1,LR,BASH_ENV"),
    ],
)
def test_the_job_gets_our_variables_whatever_is_exported(tmp_path: Path, export: str, flag: str) -> None:
    """The script still sees its own value in SLURM_EXPORT_ENV (settings.sh)."""
    found = with_values(plan(tmp_path, f"{HEAD}#SBATCH --export={export}\n" if export else HEAD), {"LR": "1"})
    words = found.files["submit.sh"].splitlines()[-1].split()
    assert [word for word in words if word.startswith("--export")] == ([flag] if flag else [])
    assert ("export_env" in found.files["settings.sh"]) == bool(export)


def test_the_tasks_of_an_array(tmp_path: Path) -> None:
    assert batch(tmp_path, HEAD + "#SBATCH -a 1-7:3,20,2-3%2\n").array_tasks == (1, 4, 7, 20, 2, 3)
    assert batch(tmp_path, SBATCH_ARRAY_INX="0-1").array_tasks == (0, 1)


def test_any_bytes_are_kept(tmp_path: Path) -> None:
    data = HEAD.encode() + b"echo '\xe9\xff'\n"
    found = plan(tmp_path, data)
    assert found.script.encode(errors="surrogateescape") == data
    assert subprocess.run(("bash", "-n"), input=found.files["submit.sh"].encode(), check=False).returncode == 0


def test_a_script_without_sbatch_lines_gets_its_options_from_the_command_line(tmp_path: Path) -> None:
    found = plan(tmp_path, b"#!/bin/bash\necho x\n", launch(given=given(nodes=2, time_minutes="10")))
    assert (found.job.resources.nodes, found.job.resources.time_minutes) == (2, 10)
    for text in ("#!/usr/bin/env python3\n", "import torch\n"):
        (tmp_path / "train.py").write_text(text)
        with pytest.raises(RunnerError, match=r"train\.py is not a batch script") as caught:
            plan(tmp_path, HEAD, launch(job="./train.py"))
        assert "runner launch --script ./train.py" in caught.value.fix


@pytest.mark.parametrize(
    ("lines", "gpu_hours"),
    [
        ("-t 8:00:00 --gres=gpu", "at most 8.0 GPU hours"),
        ("-t 8:00:00 --gres=gpu:a100", "at most 8.0 GPU hours"),
        ("-t 8:00:00 --gres=nvme:1,gpu:a100:4 -N 2", "at most 64.0 GPU hours"),
        ("-t 8:00:00 --gres=gpu:1 --array=0-4", "at most 40.0 GPU hours (5 runs; each at most 8.0 GPU hours)"),
        (
            "-t 1:00:00 -N 1 --gpus-per-node=4\n#SBATCH hetjob\n#SBATCH -N 2 --gres=gpu:8 -t 30",
            "at most 20.0 GPU hours",
        ),
        ("-t 1:00:00 --gres=craynetwork:1", None),
    ],
)
def test_the_cost_counts_every_gpu_of_every_task(tmp_path: Path, lines: str, gpu_hours: str | None) -> None:
    """As the dry run says it."""
    found = plan(tmp_path, f"#!/bin/bash\n#SBATCH {lines}\necho x\n".encode())
    project = Project(None, tmp_path / "shipped", tmp_path)
    said = [line for line in explain(found, {"HOME": "/nowhere"}, project) if line.startswith("cost: ")]
    assert said == ([f"cost: {gpu_hours}"] if gpu_hours else [])


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (b"", "sbatch would reject train.sbatch", "the file is empty"),
        (b"#!/bin/bash\n#SBATCH -N 1\n\0", "sbatch would reject train.sbatch", "NUL"),
        (b"#SBATCH -N 1\n", "sbatch would reject train.sbatch", "`#!`"),
        (b"\xef\xbb\xbf#!/bin/bash\n#SBATCH -N 1\n", "sbatch would reject train.sbatch", "byte order mark"),
        (b"#!/bin/bash\n#SBATCH -N 1\r\n", "sbatch would reject train.sbatch", r"line 2 ends in \r\n"),
        (b"#!/bin/bash\n#SBATCH --wrap=x\n", "train.sbatch:2: --wrap cannot be used", "--wrap"),
        (b"#!/bin/bash\n\n#SBATCH -W\n", "train.sbatch:3: --wait cannot be used", "after the end"),
        (b"#!/bin/bash\n#SBATCH -M other\n", "train.sbatch:2: --clusters cannot be used", "default cluster"),
        (b"#!/bin/bash\n#SBATCH --export=nil\n", "train.sbatch:2: --export=NIL cannot be used", "run folder"),
    ],
)
def test_what_cannot_be_a_run_is_refused_with_its_line(tmp_path: Path, text: bytes, what: str, why: str) -> None:
    with pytest.raises(RunnerError) as raised:
        plan(tmp_path, text)
    assert raised.value.what.startswith(what) and why in raised.value.why


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (launch(env="cpu"), "command line: --env cannot be used"),
        (launch(engine="host"), "command line: --engine cannot be used"),
        (launch(given=given(launcher="torchrun")), "command line: --launcher cannot be used"),
        (launch(given=given(srun=("--mpi=none",))), "command line: --srun cannot be used"),
        (launch(given=given(sbatch=("--test-only",))), "command line: --test-only cannot be used"),
        (launch(site="local"), "cannot launch train.sbatch on the site 'local'"),
        (launch(from_snapshot=True), "cannot run train.sbatch from a snapshot"),
        (launch(job="./missing.sbatch"), "there is no job file './missing.sbatch'"),
        (launch(job="./"), "cannot read ./"),
        (launch(given=given(trainer="nope")), "there is no trainer 'nope'"),
    ],
)
def test_what_does_not_fit_a_batch_script_is_refused(tmp_path: Path, request_: Request, what: str) -> None:
    with pytest.raises(RunnerError) as raised:
        plan(tmp_path, HEAD, request_)
    assert raised.value.what.startswith(what)


def test_a_sweep_sets_variables_and_fills_in_arguments(tmp_path: Path) -> None:
    found = plan(tmp_path, HEAD, launch(words=("--seed={seed}",)))
    one = with_values(found, {"seed": "3", "LR": "1e-3"})
    assert one.job.arguments == ("--seed=3",) and one.job.env == {"LR": "1e-3"}
    with pytest.raises(RunnerError, match="cannot set the variable 'learning-rate'"):
        with_values(found, {"learning-rate": "1"})


def test_a_requested_restart_allows_requeues_and_keeps_the_output(tmp_path: Path) -> None:
    """Without --restart, and without [restart], nothing is added; a script that forbids requeues is submitted again."""
    assert batch(tmp_path).flags == ()
    restart = launch(given=given(restart=("time_limit=3",)))
    found = plan(tmp_path, HEAD, restart)
    assert found.job.sbatch == ("--requeue", "--open-mode=append")
    assert "restart_words='by=requeue time_limit=3 without_checkpoint=3'\n" in found.files["settings.sh"]
    found = plan(tmp_path, HEAD + "#SBATCH --no-requeue\n", restart)
    assert found.job.sbatch == () and "by=submit" in found.files["settings.sh"]


@pytest.mark.parametrize("word", ["time_limit", "time_limit=", "time_limit=-1", "gpu=1", "time_limit=1.5"])
def test_a_restart_flag_names_a_cause_and_a_number(word: str) -> None:
    with pytest.raises(RunnerError, match="cannot read --restart"):
        given(restart=(word,))


def started(run: Path, text: str, settings: str = "", **environ: str) -> "subprocess.Popen[bytes]":
    """A batch script in a run folder, as slurmd starts it."""
    for name, content in {**payload.files(own_script=True), "settings.sh": settings, "slurm_script": text}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUNNER_"))}
    ours = {"BASH_ENV": f"{run}/payload/batch.sh", "SLURM_JOB_ID": "17", "HOME": str(run)}
    with (run / "out").open("ab") as out:
        words = ("bash", "slurm_script")
        return subprocess.Popen(words, cwd=run, env={**outer, **ours, **environ}, stdout=out, stderr=out)


SHOWS = """\
#!/bin/bash
: >>made
env -0 | sort -z | tr '\\0' '\\n'
set -o; shopt; declare -F; ulimit -a; umask
for number in /proc/$$/fd/*; do echo "${number##*/}"; done
printf 'word <%s>\\n' "$@"
exit 3
"""
HOSTILE = {
    "functions": {
        "BASH_FUNC_cd%%": '() {  builtin cd "$@" && builtin pwd\n}',
        **{f"BASH_FUNC_{name}%%": "() {  echo replaced\n}" for name in ("kill", "read", "exec", "cat", "return")},
    },
    "options of bash": {"BASHOPTS": "failglob:expand_aliases:extglob"},
    "noclobber": {"SHELLOPTS": "braceexpand:hashall:noclobber"},
    "allexport": {"SHELLOPTS": "allexport:keyword:noglob"},
    "trace": {"SHELLOPTS": "nounset:xtrace"},
    "names of ours": {
        "limit": "3",
        "interpreter": "/bin/false",
        "again": "x",
        "withheld": "x",
        "words": "x",
        "TMOUT": "1",
    },
    "names of bash": {"UID": "7", "PPID": "8", "CDPATH": "/usr", "GLOBIGNORE": "*", "IFS": "/", "PS4": "$(echo x)"},
    "odd names": {"-u": "a", "a b": "c", "A.B": "d", "my_token": "secret-horse", "EMPTY": "", "LINES_": "x\ny"},
    "much": {f"BIG{number}": "x" * 100_000 for number in range(12)},
}


@pytest.mark.parametrize("environ", HOSTILE.values(), ids=HOSTILE)
def test_a_script_sees_its_environment_whatever_it_means_to_bash(tmp_path: Path, environ: dict[str, str]) -> None:
    """It runs once, is recorded, and prints what it prints without runner."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    plain.mkdir()
    assert started(run, SHOWS, **environ).wait(timeout=120) == 3
    (plain / "slurm_script").write_text(SHOWS)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUNNER_"))}
    variables = {**outer, "SLURM_JOB_ID": "17", "HOME": str(run), **environ}
    done = subprocess.run(("bash", "slurm_script"), cwd=plain, env=variables, capture_output=True, check=False)
    lines = [line for line in (run / "out").read_bytes().splitlines() if not line.startswith(b"RUNNER_")]
    assert (run / "attempts/1/exit_code").read_text() == "3\n" and not (run / "attempts/2").exists()
    wanted = (done.stderr + done.stdout).replace(bytes(plain), bytes(run)).splitlines()
    assert sorted(lines) == sorted(wanted)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    """Empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_exit_code_is_known_if_slurm_ends_all_processes_at_once(tmp_path: Path) -> None:
    """The script may end just before the signal reaches payload/batch.sh. Several tries, because that is a race."""
    for number in range(6):
        run = tmp_path / str(number)
        job = started(run, "#!/bin/bash\necho $$ >up\nexec sleep 1000\n")
        try:
            until(lambda run=run: (run / "up").exists() and (run / "up").read_text())  # type: ignore[misc]
            script = int((run / "up").read_text())
            sleeping = [pid for pid in children(job.pid) if pid != script and b"sleep" in command_line(pid)]
            for pid in sleeping:  # they tell that all processes get the signal
                os.kill(pid, signal.SIGTERM)
            until(lambda pids=sleeping: not any(map(command_line, pids)))  # type: ignore[misc]
            os.kill(script, signal.SIGTERM)
            os.kill(job.pid, signal.SIGTERM)
            assert job.wait(timeout=60) == -signal.SIGTERM
        finally:
            job.kill()
            job.wait()
        assert (run / "attempts/1/exit_code").read_text() == "143\n"


SLURM = {
    "squeue": """#!/bin/sh
case "$*" in
*RestartCnt*) echo 0 ;;
*%T*) [ "$MOMENT" != checks ] || kill -s "$SENT" "$(cat up)"; echo RUNNING 1:00:00 a ;;
esac
""",
    "cat": """#!/bin/sh
case "$*" in */jobs) [ "$MOMENT" != end ] || kill -s "$SENT" "$(/bin/cat up)"; esac
exec /bin/cat "$@"
""",
    "scontrol": "#!/bin/sh\necho a\n",
    "scancel": "#!/bin/sh\n",
}


@pytest.mark.parametrize("moment", ["end", "checks"])
@pytest.mark.parametrize(("sent", "cause"), [("USR1", "script_failure"), ("TERM", "cancelled")])
def test_a_signal_between_two_attempts_is_not_lost(tmp_path: Path, sent: str, cause: str, moment: str) -> None:
    """It does not come again: close to the time limit, the job gives its nodes back."""
    tools = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a", "SENT": sent, "MOMENT": moment}
    programs(tmp_path / "bin", SLURM)
    script = '#!/bin/bash\necho $PPID >up\n[ "${RUNNER_ATTEMPT##*/}" != 1 ] || exit 3\n'
    job = started(tmp_path, script, "restart_words='by=requeue script_failure=1 in_place=true'\n", **tools)
    assert job.wait(timeout=60) == 3
    assert (tmp_path / "attempts/1/cause").read_text() == f"{cause}\n"
    assert not (tmp_path / "attempts/2").exists()
    why = "the script ended with exit code 3; the script has missed the signal USR1: requeueing this job"
    if sent == "USR1":
        assert (tmp_path / "attempts/1/next").read_text() == f"requeue\n{why}\n"


@pytest.mark.parametrize(
    "log", ["", "slurmstepd: error: *** JOB 17 ON a CANCELLED AT 2026-11-20 DUE TO PREEMPTION ***\n"]
)
def test_term_before_the_script_starts_cancels_the_attempt(tmp_path: Path, log: str) -> None:
    """What Slurm has written about an earlier attempt to the same file is not the cause."""
    waits = "#!/bin/sh\ncase $* in *%V*) touch asked; until [ -e go ]; do sleep 0.1; done ;; esac\n"
    tools = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a"}
    programs(tmp_path / "bin", {**SLURM, "squeue": waits})
    (tmp_path / "out").write_text(log)
    job = started(tmp_path, "#!/bin/bash\ntouch up\n", **tools)
    until((tmp_path / "asked").exists)
    job.terminate()
    (tmp_path / "go").touch()
    assert job.wait(timeout=60) == 143
    assert (tmp_path / "attempts/1/cause").read_text() == "cancelled\n"
    assert not (tmp_path / "up").exists()
