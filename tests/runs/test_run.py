"""A run folder has one owner, a whole record, and is found by every name that a user has for it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.machine import folders
from runner.runs.run import RECORD, SUBMITTED, Run, find_run, list_runs, load, save


def make_run(runs: Path, job: str = "sft", job_ids: tuple[str, ...] = (), created: str = "2026-11-21T10:00:00") -> Run:
    folder = folders.take_numbered(runs, job)
    run = Run(folder.name, folder, job, "local", "slurm", created, state=SUBMITTED, job_ids=job_ids)
    save(run)
    return run


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path, job_ids=("17", "18"))
    run = replace(run, command_line=("launch", "--", "echo", "ü '\" \n"), slurm={"version": "22.05.8"})
    save(run)
    assert load(run.folder) == run


def test_numbers_go_on_after_the_highest_and_never_touch_another_job(tmp_path: Path) -> None:
    (tmp_path / "sft-0041").mkdir()
    (tmp_path / "sft-long-0099").mkdir()
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0042"
    assert folders.take_numbered(tmp_path, "sft-long").name == "sft-long-0100"
    assert folders.take_numbered(tmp_path, "a.b").name == "a.b-0001"


def test_the_number_of_a_deleted_run_is_never_given_again(tmp_path: Path) -> None:
    """A name in somebody's notes means one run for good: the newest folder's number stays taken when it is deleted."""
    for _ in range(3):
        newest = folders.take_numbered(tmp_path, "sft")
    newest.rmdir()
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0004"
    assert folders.take_numbered(tmp_path, "other").name == "other-0001"
    shutil.rmtree(tmp_path / "sft-0004")
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0005"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"sft": "nine"}', b"\xff\xfe", None], ids=repr)
def test_without_a_whole_ledger_the_folders_are_counted(tmp_path: Path, content: bytes | None) -> None:
    """A ledger that is missing, damaged, or behind is mended by the next launch."""
    (tmp_path / "sft-0041").mkdir()
    if content is not None:
        (tmp_path / folders.NUMBERS).write_bytes(content)
    folders.take_numbered(tmp_path, "sft").rmdir()
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0043"


def test_a_ledger_that_cannot_be_written_stops_no_launch(tmp_path: Path) -> None:
    (tmp_path / folders.NUMBERS).mkdir()
    (tmp_path / ".numbers.lock").mkdir()
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0001"
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0002"


def test_concurrent_launches_get_different_folders(tmp_path: Path) -> None:
    """Six processes that take fifteen folders each make ninety folders, none twice."""
    code = (
        "import sys; from pathlib import Path; from runner.machine.folders import take_numbered\n"
        "for _ in range(15): print(take_numbered(Path(sys.argv[1]), 'sft').name)"
    )
    racers = [
        subprocess.Popen((sys.executable, "-c", code, str(tmp_path)), stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    names = [name for racer in racers for name in racer.communicate()[0].split()]
    assert len(names) == len(set(names)) == 90


def test_concurrent_launches_reuse_no_number_of_deleted_runs(tmp_path: Path) -> None:
    """Six processes make and delete fifteen folders each: ninety numbers, none twice."""
    code = (
        "import sys; from pathlib import Path; from runner.machine.folders import take_numbered\n"
        "for _ in range(15): folder = take_numbered(Path(sys.argv[1]), 'sft'); print(folder.name); folder.rmdir()"
    )
    racers = [
        subprocess.Popen((sys.executable, "-c", code, str(tmp_path)), stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    names = [name for racer in racers for name in racer.communicate()[0].split()]
    assert sorted(names) == [f"sft-{number:04}" for number in range(1, 91)]
    assert folders.take_numbered(tmp_path, "sft").name == "sft-0091"


def test_a_run_is_found_by_name_job_id_last_and_path(tmp_path: Path) -> None:
    first = make_run(tmp_path, job_ids=("17", "23"), created="2026-11-21T10:00:00")
    second = make_run(tmp_path, job_ids=("local-99",), created="2026-11-21T10:00:01")
    assert find_run("sft-0001", tmp_path) == first
    assert find_run("23", tmp_path) == first
    assert find_run("17_4", tmp_path) == first
    assert find_run("local-99", tmp_path) == second
    assert find_run("last", tmp_path) == second
    assert find_run(str(first.folder), tmp_path) == first


def test_runs_are_ordered_by_time_whatever_the_time_zone(tmp_path: Path) -> None:
    make_run(tmp_path, created="2026-10-25T02:10:00+01:00")  # after the end of summer time
    make_run(tmp_path, created="2026-10-25T02:50:00+02:00")
    make_run(tmp_path, created="not a time")
    assert [run.name for run in list_runs(tmp_path)] == ["sft-0003", "sft-0002", "sft-0001"]
    assert find_run("last", tmp_path).name == "sft-0001"


def test_an_unknown_run_lists_the_nearest(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(RunnerError, match="no run 'stf-0001'") as caught:
        find_run("stf-0001", tmp_path)
    assert "did you mean 'sft-0001'?" in caught.value.fix


def test_an_unknown_job_id_lists_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path, job_ids=("17",))
    with pytest.raises(RunnerError, match="'18'") as caught:
        find_run("18", tmp_path)
    assert "17 (sft-0001)" in caught.value.why


def test_no_runs_at_all_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(RunnerError) as caught:
        find_run("last", tmp_path / "nothing")
    assert str(tmp_path / "nothing") in caught.value.why


def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.folder / RECORD).write_text('{"name": ')
    with pytest.raises(RunnerError, match=r"cannot read .*run\.json"):
        find_run("sft-0001", tmp_path)
    assert list_runs(tmp_path) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", None),
        ("environment", None),
        ("scheduler", {"a": 1}),
        ("tags", "abc"),
        ("command_line", ["launch", 1]),
        ("parameters", {"lr": 1}),
        ("nodes", "2"),
    ],
)
def test_a_value_of_another_type_does_not_hide_the_other_runs(tmp_path: Path, key: str, value: object) -> None:
    run = make_run(tmp_path)
    shutil.copytree(run.folder, tmp_path / "sft-0002")
    path = tmp_path / "sft-0002" / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(RunnerError, match=r"cannot read .*run\.json"):
        load(tmp_path / "sft-0002")
    assert list_runs(tmp_path) == (run,)


def test_a_deleted_run_folder_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    folders.remove(run.folder)
    with pytest.raises(RunnerError, match="is not a run folder"):
        find_run(str(run.folder), tmp_path)
    with pytest.raises(RunnerError, match="there is no run 'sft-0001'"):
        find_run("sft-0001", tmp_path)
