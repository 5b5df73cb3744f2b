"""payload/usage.sh: samples a node beside its tasks, never delays them, and ends those of a replaced attempt."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from runner.runs import payload
from runner.runs.attempt import Attempt, GpuUsage, NodeUsage
from tests.runs.scripts import run_locally, shell_job, write_run
from tests.waiting import until

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def task(processes: list["subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    processes.append(subprocess.Popen(("sleep", "600")))
    return processes[-1]


@pytest.fixture(params=["dash", "bash", "busybox sh"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, task: "subprocess.Popen[bytes]",
    processes: list["subprocess.Popen[bytes]"],
) -> Start:  # fmt: skip
    """Starts usage.sh for node 0 of attempts/1, with a sample each second; `root` stands for the machine's files."""

    def started(root: Path | None = None, **environ: str) -> "subprocess.Popen[bytes]":
        for name, text in payload.files().items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            for folder in ("/proc/stat", "/proc/meminfo", "/proc/self", "/sys/fs") if root else ():
                text = text.replace(folder, f"{root}{folder}")
            path.write_text(text)
        variables = {**os.environ, "RUNNER_NODE_SECONDS": "6", "SLURMD_NODENAME": "nid007", **environ}
        argv = (*request.param.split(), tmp_path / "payload/usage.sh", tmp_path / "attempts/1", "0", str(task.pid))
        (tmp_path / "attempts/1").mkdir(parents=True, exist_ok=True)
        processes.append(subprocess.Popen(argv, env=variables))
        return processes[-1]

    return started


def sampled(tmp_path: Path, condition: Callable[[NodeUsage], object]) -> NodeUsage:
    """The first sample as wanted."""
    found: list[NodeUsage] = []

    def is_there() -> object:
        found[:] = Attempt(tmp_path / "attempts/1").usage
        return found and condition(found[0])

    until(is_there, "a sample")
    return found[0]


def command(folder: Path, text: str) -> dict[str, str]:
    """PATH with a program nvidia-smi."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def machine(root: Path, texts: Mapping[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.mark.uses("busybox")
def test_the_gpus_are_as_nvidia_smi_shows_them(start: Start, tmp_path: Path) -> None:
    """What a GPU does not tell (`[N/A]`) is unknown."""
    start(**command(tmp_path / "bin", "echo '97, 70144, 97871, 512.73'; echo '[N/A], 3, 97871, [N/A]'"))
    usage = sampled(tmp_path, lambda usage: usage.gpus and usage.cpu_percent is not None)
    assert usage.gpus == (GpuUsage(97, 70144, 97871, 512), GpuUsage(None, 3, 97871, None))
    assert (usage.node, usage.memory_of) == ("nid007", "node")
    assert 0 <= (usage.cpu_percent or 0) <= 100
    assert 0 < (usage.memory_used_mib or 0) < (usage.memory_total_mib or 0)


@pytest.mark.parametrize(("text", "error"), [("exit 9", "fails"), ("exec sleep 600", "hangs")])
def test_nvidia_smi_that_fails_or_hangs_stops_no_sample(start: Start, tmp_path: Path, text: str, error: str) -> None:
    sampler = start(**command(tmp_path / "bin", text))
    assert sampled(tmp_path, lambda usage: usage.gpu_error).gpu_error == f"nvidia-smi {error}"
    own = children(sampler.pid).split()
    sampler.terminate()
    assert sampler.wait(60) is not None
    until(lambda: not any(Path("/proc", pid).exists() for pid in own), "the end of nvidia-smi and sleep")


MEMINFO = "MemTotal:       98304 kB\nMemFree:  1024 kB\nMemAvailable:   65536 kB\n"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, (None, None, "")),
        ({"proc/meminfo": MEMINFO}, (32, 96, "node")),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "33554432\n",
          "sys/fs/cgroup/job/step/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "20971520\n",
          "sys/fs/cgroup/job/memory.stat": "file 1\ninactive_file 4194304\n"}, (16, 32, "job")),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu:/\n4:memory:/job\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "33554432\n",
          "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "20971520\n",
          "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 4194304\n"}, (16, 32, "job")),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "336870912000\n"},
         (32, 96, "node")),
    ],
    ids=["nothing", "node", "cgroup v2", "cgroup v1", "limit above the memory"],
)  # fmt: skip
def test_memory_is_that_of_the_job_if_it_is_limited(
    start: Start, tmp_path: Path, texts: Mapping[str, str], expected: tuple[int | None, int | None, str]
) -> None:
    start(machine(tmp_path / "root", texts))
    usage = sampled(tmp_path, lambda usage: usage.node == "nid007")
    assert (usage.memory_used_mib, usage.memory_total_mib, usage.memory_of) == expected
    assert usage.cpu_percent is None, "there is no /proc/stat"


def test_it_ends_with_its_task(start: Start, task: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    sampler = start()
    sampled(tmp_path, lambda usage: usage)
    task.kill()
    task.wait()
    assert sampler.wait(60) is not None


def test_each_minute_has_a_line_in_the_log(start: Start, tmp_path: Path) -> None:
    """Each fourth sample, the one after nvidia-smi was started; a line that was cut off is left out."""
    sampler = start(**command(tmp_path / "bin", "echo '97, 70144, 97871, 512.73'"))
    attempt = Attempt(tmp_path / "attempts/1")
    until(lambda: len(list(attempt.usage_log)) == 2, "two lines")
    begun, ended = (at for at, _ in attempt.usage_log)
    assert ended - begun >= 4
    assert {(use.node, use.gpus) for _, use in attempt.usage_log} == {("nid007", (GpuUsage(97, 70144, 97871, 512),))}
    sampler.terminate()
    sampler.wait(60)
    with (attempt.folder / "usage-log/0").open("a") as file:
        file.write("1700000000 nid0")
    assert len(list(attempt.usage_log)) == 2


def test_a_sample_of_an_older_version_has_no_power(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage/0").write_text("1700000000 nid007 12 100 200 job 97 70144 97871 3 4 97871\n")
    (found,) = Attempt(tmp_path).usage
    assert found.gpus == (GpuUsage(97, 70144, 97871), GpuUsage(3, 4, 97871))


def test_samples_take_less_than_half_a_percent_of_a_processor(start: Start, tmp_path: Path) -> None:
    """Its processes' time, for a sample each 15 s and nvidia-smi each minute. nvidia-smi itself is a stand-in here."""
    sampler = start(**command(tmp_path / "bin", "echo '97, 70144, 97871, 512.73'"))
    until(lambda: len(list(Attempt(tmp_path / "attempts/1").usage_log)) == 2, "six samples")
    sampler.terminate()
    _, _, used = os.wait4(sampler.pid, 0)
    assert (used.ru_utime + used.ru_stime) / 6 / 15 < 0.005


def test_a_folder_that_cannot_be_written_ends_it_silently(start: Start, tmp_path: Path) -> None:
    (tmp_path / "attempts/1").mkdir(parents=True)
    (tmp_path / "attempts/1/usage").touch()
    assert start().wait(60) is not None


@pytest.mark.parametrize("start", ["dash", "bash"], indirect=True)  # busybox has its own `sleep`
def test_it_ends_if_it_cannot_pause(start: Start, tmp_path: Path) -> None:
    """As in a container whose files are gone, because slurmstepd was killed; it would use a whole core."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sleep").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bin/sleep").chmod(0o755)
    assert start(PATH=f"{tmp_path}/bin:{os.environ['PATH']}").wait(60) == 2


@pytest.mark.parametrize("saving", [False, True])
def test_tasks_of_a_replaced_attempt_end(
    start: Start, task: "subprocess.Popen[bytes]", processes: list["subprocess.Popen[bytes]"], tmp_path: Path,
    saving: bool,
) -> None:  # fmt: skip
    """All tasks of this attempt on this node, but no child of the batch script, and no task of another attempt."""
    attempt = tmp_path / "attempts/1"
    start()
    sampled(tmp_path, lambda usage: usage)
    for variables in ({"RUNNER_ATTEMPT": f"{attempt}", "SLURM_STEPID": "0"}, {"RUNNER_ATTEMPT": f"{attempt}"},
                      {"RUNNER_ATTEMPT": f"{attempt}0", "SLURM_STEPID": "0"}):  # fmt: skip
        processes.append(subprocess.Popen(("sleep", "600"), env={"PATH": os.environ["PATH"], **variables}))
    other, child, later = processes[-3:]
    if saving:
        (attempt / "save-and-exit").touch()
    (attempt / "replaced").touch()
    if saving:
        before = (attempt / "usage/0").stat().st_mtime_ns
        until(lambda: (attempt / "usage/0").stat().st_mtime_ns != before, "another sample")
        assert task.poll() is None, "it may save for a minute"
        return
    until(lambda: task.poll() is not None and other.poll() is not None, "the end of the tasks")
    assert child.poll() is None and later.poll() is None


def test_the_sampler_delays_no_task(tmp_path: Path) -> None:
    """Not even a `wait` for all children in the job's own prolog or epilog, and no process of it stays."""
    job = shell_job("exit 3", task_prolog="wait\n", task_epilog="wait; echo over")
    run = write_run(tmp_path / "run", job)
    done = run_locally(run, extra_environ={"RUNNER_NODE_SECONDS": "36000"}, timeout=120)
    assert (done.returncode, done.stdout) == (3, "over\n")
