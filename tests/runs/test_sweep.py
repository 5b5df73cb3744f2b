"""A sweep is every combination once, each a run of its own; what waits for others starts when it should, not before."""

from dataclasses import replace
from pathlib import Path

import pytest

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.machine import sessions
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import after, hub, status
from runner.runs.gc import empty_sweeps
from runner.runs.history import Filters, find
from runner.runs.job import Job
from runner.runs.launch import prepare
from runner.runs.plan import Request
from runner.runs.run import SUBMITTED, Dependencies, Run, find_run, find_runs, save
from runner.runs.schedulers import local
from runner.runs.schedulers.slurm_commands import dependency_flags, parse_status
from runner.runs.sweep import new_notes, parse, with_values

ROOT = Path(__file__).resolve().parents[2]


def make(runs: Path, name: str, **values: object) -> Run:
    folder = runs / name
    folder.mkdir(parents=True)
    fixed: dict[str, object] = {"job": name.rpartition("-")[0], "site": "s", "scheduler": "slurm", "state": SUBMITTED,
                                "created": f"2026-11-20T10:00:0{name[-1]}+00:00", "job_ids": ("17",)}  # fmt: skip
    run = Run(name, folder, **{**fixed, **values})  # type: ignore[arg-type]
    save(run)
    return run


def test_each_combination_once_the_last_axis_fastest() -> None:
    sweep = parse(["lr=1e-5,2e-5", "seed=1,2"], None)
    assert sweep is not None
    assert [tuple(each.values()) for each in sweep.combinations] == [
        ("1e-5", "1"), ("1e-5", "2"), ("2e-5", "1"), ("2e-5", "2")]  # fmt: skip
    assert parse([], None) is None


def test_without_a_scheduler_a_run_that_cannot_be_started_ends_those_before_it(tmp_path: Path) -> None:
    """The launch then removes their folders."""
    runs = [make(tmp_path, f"a-000{number}", scheduler="local") for number in range(3)]
    (runs[0].folder / "job.sbatch").write_text("echo $$ >pid; sleep 600\n")
    for run in runs:
        (run.folder / "payload").mkdir()
        (run.folder / "payload/after.sh").write_text("echo $$ >pid; sleep 600\n")
    (runs[2].folder / "job.log").mkdir()
    with pytest.raises(OSError, match=r"job\.log"):
        local.start_sweep(tmp_path, runs, Dependencies(), None, Quiet())
    for run in runs[:2]:
        pid = (run.folder / "pid").read_text() if (run.folder / "pid").exists() else ""
        assert not pid or not sessions.members(int(pid))


def test_each_run_is_offline_only_if_its_own_model_is_prefetched(tmp_path: Path) -> None:
    home = tmp_path / "cache" / hub.HOME
    for name in ("org/a", "org/b"):
        note = home / hub.NOTES / hub.Repository("model", name).note
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text('{"folder": "/hub/models/snapshots/abc", "files": {}}')
    request = Request(words=("train", "--model_name_or_path", "org/a"), env="host", site="local", engine="host")
    environ = {"HOME": str(tmp_path), "PATH": "/bin", "RUNNER_CACHE": str(tmp_path / "cache")}
    plan = prepare(request, Project(None, ROOT, tmp_path), environ, Quiet())
    found = {name: with_values(plan, {"model_name_or_path": name}) for name in ("org/a", "org/b", "org/c")}
    assert {name: one.job.env for name, one in found.items()} == {
        "org/a": {"HF_HUB_OFFLINE": "1"},
        "org/b": {"HF_HUB_OFFLINE": "1"},
        "org/c": {},
    }
    assert "HF_HUB_OFFLINE" in found["org/a"].script and "HF_HUB_OFFLINE" not in found["org/c"].script
    (note,) = new_notes(plan, found.values())
    assert note.startswith("not prefetched: model 'org/c'")


@pytest.mark.parametrize(
    ("words", "at_once"),
    [(["lr"], None), (["lr="], None), (["lr=1,,2"], None), (["=1"], None), (["a b=1"], None), (["a=1,1"], None),
     (["a=1", "a=2"], None), (["a=1,2"], 0), ([], 2), ([f"a={','.join(map(str, range(1001)))}"], None)],
)  # fmt: skip
def test_what_is_no_sweep_is_refused(words: list[str], at_once: int | None) -> None:
    with pytest.raises(RunnerError):
        parse(words, at_once)


def test_a_sweep_means_all_its_runs_and_a_run_is_found_by_its_task(tmp_path: Path) -> None:
    made = [make(tmp_path, f"a-000{n}", sweep="a-sweep-0001", job_ids=(f"9_{n}",)) for n in (1, 2)]
    folder = tmp_path / "a-sweep-0001"
    folder.mkdir()
    (folder / "array.sbatch").write_text("")
    for number, run in enumerate([*made, replace(made[0], name="gone")]):
        (folder / str(number)).symlink_to(f"../{run.name}")
    assert [run.name for run in find_runs("a-sweep-0001", tmp_path)] == ["a-0001", "a-0002"]
    assert find_run("9_2", tmp_path).name == "a-0002"
    with pytest.raises(RunnerError) as caught:
        find_run("a-sweep-0001", tmp_path)
    assert "sweep of 2 runs" in caught.value.what
    assert [each.run.name for each in find(made, Filters(job="a-sweep-0001"))] == ["a-0001", "a-0002"]


def test_tags_must_all_be_there(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a-0001", tags=("paper", "v1")), make(tmp_path, "a-0002", tags=("paper",))]
    names = {tags: [each.run.name for each in find(runs, Filters(tags=tags))] for tags in (("paper",), ("v*", "paper"))}
    assert names == {("paper",): ["a-0001", "a-0002"], ("v*", "paper"): ["a-0001"]}


def test_squeue_names_the_tasks_of_an_array() -> None:
    """As Slurm 22.05 prints JobArrayID with --array."""
    found = parse_status("9_0|PENDING|Resources||0:00|5:00|0|\n9_1|RUNNING|None|nid001|0:03|4:57|0|\nx|RUNNING|\n")
    assert {job_id: each.state for job_id, each in found.items()} == {"9_0": "PENDING", "9_1": "RUNNING"}


def test_only_open_runs_are_waited_for_and_a_failed_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(tmp_path, "a-0001"), make(tmp_path, "a-0002", job_ids=("18", "19"))
    states = {"a-0001": "COMPLETED", "a-0002": "RUNNING"}
    monkeypatch.setattr(status, "ask", lambda runs: tuple(status.RunStatus(r, states[r.name]) for r in runs))
    assert dependency_flags(after.still_pending(Dependencies((one, two)))) == (
        "--dependency=afterok:19", "--kill-on-invalid-dep=yes")  # fmt: skip
    assert dependency_flags(Dependencies((one,), (two,)))[0] == "--dependency=afterok:17,afterany:19"
    assert dependency_flags(after.still_pending(Dependencies((one,)))) == ()
    states["a-0001"] = "TIMEOUT"
    with pytest.raises(RunnerError) as caught:
        after.still_pending(Dependencies((one,)))
    assert "a-0001" in caught.value.what and "TIMEOUT" in caught.value.what
    assert after.still_pending(Dependencies((), (one,))).runs == ()


def test_the_folder_of_the_run_before_stands_for_its_place(tmp_path: Path) -> None:
    one = make(tmp_path, "a-0001")
    job = Job("b", Environment("e", None, ""), command=("x",), arguments=("--checkpoint", "{after}/checkpoints/final"))
    assert after.with_folder(job, Dependencies((one,))).arguments[1] == f"{one.folder}/checkpoints/final"
    for waits in (Dependencies(), Dependencies((one,), (one,))):
        with pytest.raises(RunnerError):
            after.with_folder(job, waits)


def test_the_job_id_of_the_whole_array_means_the_sweep(tmp_path: Path) -> None:
    """It is what squeue shows."""
    for number in (1, 2):
        name = f"a-000{number}"
        make(tmp_path, name, job_ids=(f"35_{number}",), sweep="a-sweep-0001")
        link = tmp_path / "a-sweep-0001" / str(number)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"../{name}")
    (tmp_path / "a-sweep-0001/array.sbatch").write_text("")
    assert [run.name for run in find_runs("35", tmp_path)] == ["a-0001", "a-0002"]
    assert find_run("35_2", tmp_path).name == "a-0002"
    with pytest.raises(RunnerError, match="a-sweep-0001 is a sweep of 2 runs"):
        find_run("35", tmp_path)
    with pytest.raises(RunnerError):
        find_runs("3", tmp_path)


def test_only_folders_of_sweeps_and_arrays_without_runs_are_empty(tmp_path: Path) -> None:
    """The folder of an array of the user's own has submit.sh, as each of its runs has."""
    make(tmp_path, "a-0001")
    mine, theirs = "submit.sh", "array.sbatch"
    made = (("a-0001", mine, ""), ("a-array-0001", mine, "../a-0001"), ("a-array-0002", mine, "../gone"))
    for folder, name, link in (*made, ("a-sweep-0001", theirs, "../gone")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("")
        if link:
            (tmp_path / folder / "1").symlink_to(link)
    assert [path.name for path in empty_sweeps(tmp_path)] == ["a-array-0002", "a-sweep-0001"]
