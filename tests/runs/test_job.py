"""A job is what command line, job file, site and defaults say, in this order; faults name their line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.runs.job import LAUNCHERS, Job, Layer, load_job_file, time_limit_minutes
from runner.runs.resolve import resolve
from runner.runs.schedulers.slurm_commands import time_limit_text
from runner.site import Site
from tests.runs.scripts import BARE, LOCAL, SLURM, given, overrides

FULL = """\
script = "jobs/sft.py"
environment = "cpu"
launcher = "srun"
arguments = ["--model", "it's $HOME"]
setup = "pip list"
task_prolog = "ulimit -c 0"
task_epilog = "echo $RUNNER_EXIT_CODE"
save_seconds = 300

[resources]
nodes = 2
gpus_per_node = 4
cpus_per_task = 72
memory = "450G"
time = "00:30:00"
partition = "normal"
account = "a-g1"

[env]
HF_HUB_OFFLINE = "1"

[mail]
user = "me@example.org"
events = ["END", "FAIL"]

[slurm]
sbatch = ["--constraint=gpu"]
srun = ["--network=disable_rdzv_get"]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def job_file(text: str) -> Path:
        path = tmp_path / "sft.toml"
        path.write_text(text)
        return path

    return job_file


def made(path: Path, layer: Layer | None = None, site: Site = SLURM) -> Job:
    return resolve((layer or {}, load_job_file(path)), BARE, site)


def test_every_key_of_a_job_file_counts(write: Callable[[str], Path]) -> None:
    """What is written in the file is in the job."""
    job = made(write(FULL))
    assert (job.name, job.script, job.launcher, job.save_seconds) == ("sft", "jobs/sft.py", "srun", 300)
    assert job.arguments == ("--model", "it's $HOME")
    assert (job.setup, job.task_prolog, job.task_epilog) == ("pip list", "ulimit -c 0", "echo $RUNNER_EXIT_CODE")
    resources = job.resources
    assert (resources.nodes, resources.gpus_per_node, resources.tasks_per_node, resources.cpus_per_task) == (
        2,
        4,
        4,
        72,
    )
    assert (resources.memory, resources.time_minutes) == ("450G", 30)
    assert (resources.partition, resources.account) == ("normal", "a-g1")
    assert job.env == {"HF_HUB_OFFLINE": "1"}
    assert (job.mail_user, job.mail_events) == ("me@example.org", ("END", "FAIL"))
    assert (job.sbatch, job.srun) == (("--constraint=gpu",), ("--network=disable_rdzv_get",))
    assert job.world_size == 8


def test_the_command_line_wins_and_adds(write: Callable[[str], Path]) -> None:
    """Values are replaced; arguments, variables and flags are added to those of the file."""
    layer = given(nodes=1, time_minutes="1-00", launcher="torchrun", arguments=("--steps", "3"), env={"A": "b"},
                      sbatch=("--qos=high",))  # fmt: skip
    job = made(write(FULL), layer)
    assert (job.resources.nodes, job.resources.time_minutes, job.launcher) == (1, 1440, "torchrun")
    assert job.arguments == ("--model", "it's $HOME", "--steps", "3")
    assert job.env == {"HF_HUB_OFFLINE": "1", "A": "b"}
    assert job.sbatch == ("--constraint=gpu", "--qos=high")


def test_each_value_says_where_it_came_from(write: Callable[[str], Path]) -> None:
    """Command line, line of the job file, the site with its source, or a default."""
    path = write(FULL)
    site = replace(SLURM, gpus_per_node=1, partition="batch", time_minutes=5)
    origins = made(path, given(nodes=1), site).origins
    assert str(origins["nodes"]) == "command line"
    assert origins["partition"].place is not None
    assert origins["partition"].place.line == FULL.splitlines().index('partition = "normal"') + 1
    assert str(resolve((overrides(),), BARE, site).origins["partition"]) == "site generic-slurm"
    assert str(origins["tasks_per_node"]) == "default"


def test_the_site_fills_gaps() -> None:
    """GPUs, CPUs, memory, partition, account and time of the site count where nobody says otherwise."""
    site = replace(SLURM, gpus_per_node=4, cpus_per_node=288, memory="450G", time_minutes=30, partition="normal",
                   account="a")  # fmt: skip
    job = resolve((given(script="x.py"),), BARE, site)
    assert job.launcher == "torchrun"
    assert (job.resources.tasks_per_node, job.resources.cpus_per_task) == (4, 72)
    assert (job.tasks_per_node, job.cpus_per_step_task) == (1, 288)
    assert (job.resources.memory, job.resources.time_minutes) == ("450G", 30)


def test_one_process_needs_no_launcher() -> None:
    """What the user or the job file says stays; the site's launcher is for several processes."""
    one, four = replace(SLURM, gpus_per_node=1), replace(SLURM, gpus_per_node=4)
    assert resolve((given(script="x.py"),), BARE, one).launcher == "none"
    assert str(resolve((given(script="x.py"),), BARE, one).origins["launcher"]) == "one process needs no launcher"
    assert resolve((given(script="x.py"),), BARE, four).launcher == "torchrun"
    assert resolve((given(script="x.py", nodes=2),), BARE, one).launcher == "torchrun"
    assert resolve((given(script="x.py", launcher="torchrun"),), BARE, one).launcher == "torchrun"


def test_one_job_file_serves_sites_with_and_without_gpus(write: Callable[[str], Path]) -> None:
    """With GPUs there is one process each; without, as many as cpu_tasks_per_node says; tasks_per_node beats both."""
    path = write('script = "jobs/sft.py"\n[resources]\ncpu_tasks_per_node = 2\n')
    with_gpus, without = replace(SLURM, gpus_per_node=4), replace(SLURM, gpus_per_node=0)
    assert made(path, site=with_gpus).resources.tasks_per_node == 4
    job = made(path, site=without)
    assert job.resources.tasks_per_node == 2
    assert job.origins["tasks_per_node"].place is not None
    assert made(path, given(tasks_per_node=3), without).resources.tasks_per_node == 3


def test_a_command_runs_as_it_is() -> None:
    """Without a launcher asked for, a command is no Python script: it runs once per node."""
    job = resolve((overrides(("nvidia-smi", "-L"), nodes=2),), BARE, replace(SLURM, gpus_per_node=4))
    assert (job.launcher, job.tasks, job.name) == ("none", 2, "nvidia-smi")


def test_no_gpus_by_mistake() -> None:
    """Where nobody has said how many GPUs a node has, the job gets none, and a warning."""
    assert "requesting no GPUs" in resolve((overrides(),), BARE, SLURM).notes[0]
    assert resolve((overrides(gpus_per_node=0),), BARE, SLURM).notes == ()
    assert resolve((overrides(),), BARE, replace(SLURM, gpus_per_node=4, cpus_per_node=64)).notes == ()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('scirpt = "a.py"', 1, "did you mean 'script'?"),
        ('script = "a.py"\n[resources]\nnode = 2', 3, "did you mean 'nodes'?"),
        ('script = "a.py"\n[resources]\nnodes = "2"', 3, "a whole number"),
        ('script = "a.py"\n[resources]\ntime = 30', 3, 'write "30"'),
        ('script = "a.py"\n[resources]\ntime = "soon"', 3, "HH:MM:SS"),
        ('script = "a.py"\narguments = ["a", 2]', 2, 'write "2"'),
        ('script = "a.py"\n[env]\nA = 1', 3, 'write "1"'),
        ('script = "a.py"\ncommand = ["b"]', 2, "one program"),
        ('script = "a.py"\nlauncher = "torchrnu"', 2, "did you mean 'torchrun'?"),
        ('script = "a.py"\n[resources]\nnodes = 0', 3, "at least 1"),
        ('script = "a.py"\n[mail]\nusr = "x"', 3, "did you mean 'user'?"),
        ('script = "a.py"\nsave_seconds = -1', 2, "0 to 65535"),
        ('script = "a.py"\n[resources]\nmemory = "lots"', 3, "K, M, G or T"),
        ("script = a.py", 1, "not valid TOML"),
    ],
)
def test_faults_name_line_and_key(write: Callable[[str], Path], text: str, line: int, words: str) -> None:
    """A fault of a job file says where it stands and what to write."""
    with pytest.raises(RunnerError) as caught:
        made(write(text))
    assert f"sft.toml:{line}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"launcher": "mpirun"}, ", ".join(sorted(LAUNCHERS))),
        ({"name": "a b"}, "the run folder is named after the job"),
        ({"name": "-x"}, "the run folder is named after the job"),
        ({"name": "../up"}, "the run folder is named after the job"),
        ({"name": ""}, "the run folder is named after the job"),
        ({"name": "%j"}, "the run folder is named after the job"),
        ({"env": {"1A": "x"}}, "begin with a digit"),
        ({"env": {"RANK": "0"}}, "for each task"),
        ({"env": {"RUNNER_RUN": "/x"}}, "belong to runner"),
        ({"env": {"IFS": ":"}}, "shells reserve that name"),
        ({"env": {"A": "a\0b"}}, "NUL"),
        ({"env": {"A": "x" * 131_070}}, "name and value together"),
        ({"env": {"A": "\ud800"}}, "not UTF-8"),
        ({"partition": ""}, "it must be a name"),
        ({"nodes": 0}, "at least 1"),
        ({"script": "a.py"}, "one program"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    """Before anything is written: the value, the reason, and what to do."""
    with pytest.raises(RunnerError) as caught:
        resolve((overrides(**settings),), BARE, SLURM)
    assert words in str(caught.value)
    assert caught.value.fix


def test_one_machine_has_one_node() -> None:
    """A site without a scheduler refuses more nodes, and flags that nobody would read."""
    with pytest.raises(RunnerError, match="has only one"):
        resolve((overrides(nodes=2),), BARE, LOCAL)
    with pytest.raises(RunnerError, match="no sbatch"):
        resolve((overrides(sbatch=("--qos=x",)),), BARE, LOCAL)


def test_an_account_is_asked_for_before_sbatch_does() -> None:
    """On a site that needs one; a pass-through flag counts."""
    site = replace(SLURM, account_required=True)
    with pytest.raises(RunnerError, match="requires an account"):
        resolve((overrides(),), BARE, site)
    assert resolve((overrides(account="a"),), BARE, site).resources.account == "a"
    resolve((overrides(sbatch=("--account=a",)),), BARE, site)


@pytest.mark.parametrize(
    ("text", "minutes", "shown"),
    [
        ("30", 30, "00:30:00"),
        ("0:30", 1, "00:01:00"),
        ("90:00", 90, "01:30:00"),
        ("00:30:00", 30, "00:30:00"),
        ("24:00:01", 1441, "1-00:01:00"),
        ("1-0", 1440, "1-00:00:00"),
        ("2-12:30", 3630, "2-12:30:00"),
        ("1-00:00:30", 1441, "1-00:01:00"),
    ],
)
def test_time_limits_are_slurms(text: str, minutes: int, shown: str) -> None:
    """All six forms of sbatch's --time, rounded up to minutes."""
    assert time_limit_minutes(text, "--time") == minutes
    assert time_limit_text(minutes) == shown


@pytest.mark.parametrize("text", ["", "0", "1h", "-5", "1:2:3:4", "1-", "UNLIMITED"])
def test_other_times_are_refused(text: str) -> None:
    """With the forms that are understood."""
    with pytest.raises(RunnerError):
        time_limit_minutes(text, "--time")
