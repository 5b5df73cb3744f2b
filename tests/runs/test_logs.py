"""What a run has printed is shown whole, in whole lines, in the order of time as far as it was written down."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.runs.follow import Following
from runner.runs.logs import all_streams, check_ranks, last_lines, merged, parse_ranks, read_times, without_times
from runner.runs.run import SUBMITTED, Run, save


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("a-0001", tmp_path, "a", "s", "slurm", "2026-11-20T10:00:00+00:00", SUBMITTED, ("17",), nodes=2,
               processes_per_node=2)  # fmt: skip


def put(run: Run, **files: str) -> None:
    """Files of attempt 1 (`rank_1` -> rank-1.log), job.log and log-times."""
    folder = run.folder / "attempts/1"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = (
            run.log if name == "job" else folder / ("log-times" if name == "times" else f"{name.replace('_', '-')}.log")
        )
        path.write_text(text)


def shown(run: Run, ranks: Sequence[int] = ()) -> str:
    return b"".join(merged(run, ranks)).decode()


def test_lines_stand_in_the_order_in_which_the_files_grew(run: Run) -> None:
    """A line belongs to the second in which its end was there; within a second job.log is first, then the ranks."""
    put(run, job="job.sbatch: attempt 1 on a\nzero\nzero later\n", rank_1="one\none la" + "ter\n", rank_2="two\n",
        times="100 30 job.log\n100 10 attempts/1/rank-1.log\n101 4 attempts/1/rank-2.log\n"
              "102 14 attempts/1/rank-1.log\n103 45 job.log\n99")  # fmt: skip
    assert shown(run) == (
        "job.sbatch: attempt 1 on a\n1| one\n2| two\n1| one later\nzero\nzero later\n"
    )  # at second 100, job.log had 30 bytes: `zero` was not whole


def test_a_line_after_the_last_record_of_its_file_is_after_all_that_was_recorded(run: Run) -> None:
    """The end of a run is not recorded. Before bash 5, the times are whole seconds."""
    put(run, job="job.sbatch: attempt 1 on a\nzero\n", rank_1="one\nlast\n",
        times="100 27 job.log\n100.25 4 attempts/1/rank-1.log\n101.5 32 job.log\n")  # fmt: skip
    assert shown(run) == "job.sbatch: attempt 1 on a\n1| one\nzero\n1| last\n"


def test_a_single_log_and_a_single_rank_are_shown_as_they_are(run: Run) -> None:
    put(run, job="any\r\ntext\x00 without end")
    assert shown(run) == "any\r\ntext\x00 without end"
    put(run, rank_3="three")
    assert shown(run, (3,)) == "three"
    assert "3| three\n" in shown(run)
    assert without_times(run) == (1,)


def test_attempts_follow_each_other_and_a_rank_is_shown_in_all_of_them(run: Run) -> None:
    put(run, job="before\njob.sbatch: attempt 1 on a\nx\njob.sbatch: attempt 2 on b\ny\n", rank_1="first\n")
    (run.folder / "attempts/2").mkdir()
    (run.folder / "attempts/2/rank-1.log").write_text("second\n")
    assert [line for line in shown(run).splitlines() if " on " not in line] == [
        "before", "x", "1| first", "y", "1| second"]  # fmt: skip
    assert shown(run, (1,)) == "--- attempt 1 ---\nfirst\n--- attempt 2 ---\nsecond\n"
    assert shown(run, (0,)).startswith("--- attempt 1 ---\nbefore\n") and shown(run, (0,)).endswith("\ny\n")


def test_ranks_of_torchrun_are_counted_over_nodes_and_rank_0_is_not_shown_twice(run: Run) -> None:
    for node, local in ((0, 0), (0, 1), (1, 0), (1, 1)):
        folder = run.folder / f"attempts/1/node-{node}/none_x/attempt_0/{local}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"{node}.{local}\n")
        (folder / "stderr.log").write_text("")
    run.log.write_text("[default0]:0.0\n")
    assert sorted(shown(run).splitlines()) == ["1| 0.1", "2| 1.0", "3| 1.1", "[default0]:0.0"]
    assert [shown(run, (rank,)) for rank in (0, 3)] == ["0.0\n", "1.1\n"]
    with pytest.raises(RunnerError) as caught:
        check_ranks(run, (4,))
    assert "0 to 3" in caught.value.why


def test_what_a_node_says_before_its_ranks_start_bears_its_number(run: Run) -> None:
    put(run, setup_node_1="installing\n")
    assert shown(run) == "n1| installing\n"
    assert [each.label for each in all_streams(run)] == ["", "n1| "]


def test_following_finds_the_files_of_a_later_attempt_and_cuts_no_line(run: Run) -> None:
    put(run, job="a\n", rank_1="whole\nhal")
    files = Following(run)
    assert b"".join(files.new()) == b"a\n1| whole\n"
    put(run, job="a\nb", rank_1="whole\nhalf\n")
    (run.folder / "attempts/2").mkdir()
    (run.folder / "attempts/2/rank-1.log").write_text("again")
    files.searched -= 2
    assert b"".join(files.new()) == b"1| half\n"
    assert b"".join(files.last()) == b"b\n1| again\n"


@given(st.data())
@settings(max_examples=60)
def test_whatever_the_times_say_each_file_is_shown_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = st.lists(st.text("ab ", max_size=5), max_size=8)
    texts = {rank: "".join(f"{line}\n" for line in data.draw(lines)) for rank in (1, 2, 3)}
    times = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.sampled_from((1, 2, 3)))))
    one = Run("a-1", tmp_path_factory.mktemp("run"), "a", "s", "slurm", "x", SUBMITTED, ("1",), processes_per_node=4)
    put(one, job="", times="".join(f"{second} {size} attempts/1/rank-{rank}.log\n" for second, size, rank in times),
        **{f"rank_{rank}": text for rank, text in texts.items()})  # fmt: skip
    got = shown(one).splitlines(keepends=True)
    if sum(map(bool, texts.values())) > 0:
        for rank, text in texts.items():
            assert "".join(line[3:] for line in got if line.startswith(f"{rank}| ")) == text


def test_times_that_are_damaged_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"1 5 a\n2 4 a\n3 9 a\nx y z\n4 7\n5 8 \xff\n")
    assert read_times(tmp_path / "t")["a"] == [(5, 1), (9, 3)]


def test_ranks_are_numbers_lists_and_ranges() -> None:
    assert parse_ranks("0,3,8-10") == (0, 3, 8, 9, 10)
    for text in ("x", "1-", "-1", "1,,2", "3-1"):
        with pytest.raises(RunnerError):
            parse_ranks(text)


def test_a_run_that_has_not_started_has_no_ranks(run: Run) -> None:
    with pytest.raises(RunnerError) as caught:
        check_ranks(replace(run, nodes=1), (0,))
    assert "not started" in caught.value.what


def test_the_last_lines_and_a_single_attempt(run: Run) -> None:
    """Read from the end of each file, whatever is cut."""
    for number in (1, 2):
        (run.folder / f"attempts/{number}").mkdir(parents=True, exist_ok=True)
    lines = [
        f"job.sbatch: attempt {n} on nid001\n" + "".join(f"{n}:{k} {'x' * 50}\n" for k in range(3000)) for n in (1, 2)
    ]
    run.log.write_text("".join(lines))
    whole = b"".join(merged(run)).splitlines(keepends=True)
    for count in (1, 2, 2999, 3001, 4000, 9000):
        assert last_lines(merged(run, tail=count), count) == b"".join(whole[-count:])
        assert b"".join(merged(run, tail=count)).count(b"\n") == 2 * min(count, 3001)  # no more of each is read
    assert b"".join(merged(run, attempt=1)).decode() == lines[0]
    assert last_lines(merged(run, attempt=1, tail=1), 1).startswith(b"1:2999 ")


def test_the_states_of_a_progress_bar_are_one_line() -> None:
    assert last_lines((b"a\nb\n", b" 10%\r 20%\r 30%\nend"), 3) == b"b\n 10%\r 20%\r 30%\nend"


@pytest.mark.parametrize(
    ("words", "code", "out", "error"),
    [
        (("--tail", "2"), 0, b"2b\n2c\n", ""),
        (("-n", "2", "--attempt", "1"), 0, b"1b\n1c\n", ""),
        (("--attempt", "2"), 0, b"job.sbatch: attempt 2 on a\n2a\n2b\n2c\n", ""),
        (("--attempt", "3"), 1, b"", "attempts: 1, 2"),
        (("--tail", "0"), 2, b"", "--tail 0 must be 1 or more"),
        (("-f", "--attempt", "1"), 2, b"", "--follow does not work with --tail or --attempt"),
    ],
)
def test_the_verb_prints_the_lines_that_its_options_name(
    words: Sequence[str], code: int, out: bytes, error: str, run: Run
) -> None:
    save(run)
    for number in (1, 2):
        (run.folder / f"attempts/{number}").mkdir(parents=True)
    run.log.write_text("".join(f"job.sbatch: attempt {n} on a\n{n}a\n{n}b\n{n}c\n" for n in (1, 2)))
    argv = (sys.executable, "-m", "runner", "logs", str(run.folder), "--site", "local", *words)
    done = subprocess.run(argv, capture_output=True)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert error in done.stderr.decode()
