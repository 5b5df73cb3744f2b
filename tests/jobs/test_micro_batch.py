"""`--micro_batch auto` finds the largest micro batch that fits: the same as trying all, with nothing of a try left."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.jobs.conftest import JOBS, SMALL, Attempt, Launcher, free_port
from training.batch import micro_batch, probe, tries
from training.batch.search import Search, divisors, doubling
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings


def search(number: int, limit: int, false_alarms: frozenset[int] = frozenset()) -> tuple[int, list[tuple[int, ...]]]:
    """The answer and the rounds taken, where `limit` is the largest that fits.

    `false_alarms` fail unless they come first: a process that has taken several tries is not like a fresh one.
    """
    state, rounds = Search(divisors(number)), []
    while round_ := state.next_round():
        fitted = 0
        while fitted < len(round_) and round_[fitted] <= limit and (fitted == 0 or round_[fitted] not in false_alarms):
            fitted += 1
        rounds.append(round_)
        state = state.after(round_, fitted)
    return state.fits, rounds


@given(
    number=some.integers(1, 400),
    limit=some.integers(0, 500),
    false_alarms=some.frozensets(some.integers(1, 400), max_size=5),
)
def test_the_search_finds_what_trying_all_finds(number: int, limit: int, false_alarms: frozenset[int]) -> None:
    found, rounds = search(number, limit, false_alarms)
    assert found == max((one for one in divisors(number) if one <= limit), default=0)
    assert len(rounds) <= 3 + len(false_alarms) + len(divisors(number)).bit_length()


def test_one_process_is_enough_where_all_fit_and_two_where_doubling_meets_the_end() -> None:
    assert search(32, 100) == (32, [(1, 2, 4, 8, 16, 32)])
    assert search(32, 8) == (8, [(1, 2, 4, 8, 16, 32), (16, 32)])
    assert search(24, 9) == (8, [(1, 2, 4, 8, 24), (24,), (12,)])
    assert doubling((2, 3, 4, 6, 12), 1) == (3, 6, 12)


def settings(**values: object) -> Settings:
    given = {name: "command line" for name, value in values.items() if value is not None}
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "global_batch_size": None}
    return Settings({**defaults, "deepspeed": None, **values}, given)


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, path / "attempts" / "1", path / "flag", path / "cache", by_hand=False)


ALONE = Processes(0, 0, 1, 1, "alone")


def test_a_number_is_the_size_per_device(tmp_path: Path) -> None:
    chosen = settings(micro_batch="3")
    micro_batch.settle(chosen, run_folder(tmp_path), ALONE, 128)
    assert chosen["per_device_train_batch_size"] == 3


@pytest.mark.parametrize(
    ("values", "length", "expected"),
    [
        ({"micro_batch": "many"}, 128, "'many' is no number"),
        ({"micro_batch": "0"}, 128, "'0' is no number"),
        ({"micro_batch": "4", "per_device_train_batch_size": 4}, 128, "are both given"),
        ({"micro_batch": "auto", "global_batch_size": 8}, None, "does not know how long"),
        ({"micro_batch": "auto", "global_batch_size": 8, "gradient_accumulation_steps": 2}, 128, "is given beside"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, values: dict[str, object], length: int | None, expected: str
) -> None:
    with pytest.raises(JobError) as caught:
        micro_batch.settle(settings(**values), run_folder(tmp_path), ALONE, length)
    assert expected in caught.value.what


def test_a_file_that_says_the_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 4}')
    with pytest.raises(JobError, match="says train_micro_batch_size_per_gpu = 4"):
        micro_batch.settle(settings(micro_batch="auto", deepspeed=str(path)), run_folder(tmp_path), ALONE, 128)


def test_a_row_is_drawn_out_to_the_full_length() -> None:
    row = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "text": "words", "seq_lengths": [2, 1], "other": [1]}
    assert probe.full_length(row, 7) == {
        "input_ids": [5, 6, 7, 5, 6, 7, 5],
        "completion_mask": [0, 1, 1, 0, 1, 1, 0],
        "seq_lengths": [7],
    }
    with pytest.raises(JobError, match="no tokens"):
        probe.full_length({"text": "words"}, 7)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([tries.Ended(3, "all"), tries.Ended(3, "all")], (3, -1)),
        ([tries.Ended(2, "stopped"), tries.Ended(2, "memory")], (2, 1)),
        ([tries.Ended(1, "stopped"), tries.Ended(2, "memory")], (2, 1)),  # rank 0 fell before it had noted the second
        ([tries.Ended(1, "memory"), tries.Ended(2, "memory")], (1, 0)),
    ],
)
def test_ranks_agree_on_what_fitted(tmp_path: Path, ends: Sequence[tries.Ended], expected: tuple[int, int]) -> None:
    assert tries.agreed(ends, tmp_path / "log") == expected


def test_another_error_of_a_try_is_told_in_its_own_words(tmp_path: Path) -> None:
    text = "sft: no column 'txt'\n  because: the data has text\n  try:     --dataset_text_field text\n"
    with pytest.raises(JobError) as caught:
        tries.agreed([tries.Ended(0, "error", text), tries.Ended(0, "stopped")], tmp_path / "log")
    assert (caught.value.what, caught.value.fix) == ("no column 'txt'", "--dataset_text_field text")


def test_an_answer_counts_for_its_own_question_only_and_the_runs_own_comes_first(tmp_path: Path) -> None:
    run, cache = tmp_path / "run.json", tmp_path / "cache.json"
    key = {"length": 512, "device": {"name": "cpu"}}
    assert micro_batch.remembered((run, cache), key) is None
    cache.write_text(json.dumps({"micro_batch": 8, "for": key}))
    assert micro_batch.remembered((run, cache), key) == 8
    run.write_text(json.dumps({"micro_batch": 4, "for": key}))
    assert micro_batch.remembered((run, cache), key) == 4
    assert micro_batch.remembered((run, cache), {**key, "length": 1024}) is None
    run.write_text("{")
    assert micro_batch.remembered((run, cache), key) == 8


# 50 MB per sequence: the logits of 512 tokens over 8192 words, three times in fp32; in pieces they would be fewer.
LONG = (
    "--loss_path=plain",
    *(word for word in SMALL if not word.startswith(("--vocabulary_size", "--max_length", "--per_device"))),
    *("--vocabulary_size=8192", "--max_length=512", "--global_batch_size=8", "--max_steps=1", "--save_strategy=no"),
)
SEQUENCE_BYTES = 512 * 8192 * 4 * 3


def start_alone(launcher: Launcher, run: Path, limit: int | None, *words: str) -> tuple[Attempt, int]:
    """One process, which may map `limit` bytes at most; how it ended, and the most it had mapped."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    environment = {**launcher.environment(run), "MALLOC_ARENA_MAX": "1"}
    log = run / "output"
    with log.open("wb") as stream:
        command = (sys.executable, str(JOBS / "sft.py"), *LONG, *words)
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, preexec_fn=limited)
        peak = 0
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmPeak" in line)])
            time.sleep(0.02)
    return Attempt(process.returncode, log.read_text(), run), peak


@pytest.mark.slow
@pytest.mark.training
def test_under_a_limit_auto_finds_what_trying_all_finds_and_trains_the_same(launcher: Launcher, tmp_path: Path) -> None:
    """The limit lies between what 4 and what 8 sequences need: 4 is found, 8 alone runs out, the loss is that of 4."""
    pytest.importorskip("torch")
    given, peak = start_alone(launcher, tmp_path / "given", None, "--micro_batch=4")
    assert given.code == 0, given.output
    limit = peak + 2 * SEQUENCE_BYTES
    found, _ = start_alone(launcher, tmp_path / "found", limit, "--micro_batch=auto")
    assert found.code == 0, found.output
    assert "micro batch: 4; 8 runs out of memory on rank 0" in found.output
    assert "batch: 4 per process x 2 accumulation x 1 processes = 8 sequences per step" in found.output
    assert found.losses == given.losses
    assert not list((found.run / "attempts" / "1" / "probe").rglob("*.safetensors"))
    too_many, _ = start_alone(launcher, tmp_path / "too-many", limit, "--micro_batch=8")
    assert too_many.code != 0
    assert probe.is_out_of_memory(too_many.output)


CHILD = """
import json, os, sys, time
from pathlib import Path
order = Path(os.environ["RUNNER_PROBE"])
for size in json.loads(order.read_text())["candidates"]:
    if size > 2:
        if os.environ["RANK"] == "1":
            sys.exit(86)  # out of memory
        time.sleep(300)  # as in a collective that the other rank never joins
    with order.with_suffix(".fitted").open("a") as file:
        file.write(json.dumps({"micro_batch": size, "peak_bytes": 1}) + "\\n")
"""
PARENT = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from training import processes, run as run_folder
from training.batch import tries
from training.batch.search import Search, divisors
sys.argv[0] = sys.argv[1]
talk, search, number = tries.Peers(processes.from_environment(os.environ), os.environ), Search(divisors(8)), 0
run = run_folder.from_environment(os.environ, "sft")
while round_ := search.next_round():
    fitted, rank = tries.take(number, round_, 2, (), run, talk, None)
    search, number = search.after(round_, fitted), number + 1
talk.gather("end", True)
print(search.fits, search.fails, rank)
"""


@pytest.mark.training
def test_memory_that_runs_out_on_one_rank_is_the_answer_of_all_and_nobody_hangs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    port = str(free_port())
    parents = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**Launcher(tmp_path / "cache").environment(tmp_path / "run"), **own}
        command = (sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "child.py"), str(JOBS))
        parents.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [parent.communicate(timeout=120)[0].strip() for parent in parents]
    assert answers == ["2 4 1", "2 4 1"]
