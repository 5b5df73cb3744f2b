"""`--micro_batch auto` finds the largest micro batch that fits: the same as trying all, with nothing of a try left."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.jobs import small
from tests.jobs.conftest import JOBS, SMALL, Attempt, Launcher, free_port
from training import demo, micro_batch, probe
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings


def search(number: int, memory: Callable[[int], int], limit: int, short: int | None = None) -> tuple[int, list[int]]:
    """The answer and the sizes tried; from `short` on a try runs out of memory."""
    found = probe.Search([size for size in range(1, number + 1) if number % size == 0])
    tried = [found.size]
    while short is None or found.size < short:
        if found.done(memory(found.size), limit):
            return found.size, tried
        tried.append(found.size)
    return max(found.used, default=0), tried


@given(
    number=some.integers(1, 400), weights=some.integers(0, 50), each=some.integers(1, 9), limit=some.integers(80, 3000)
)
def test_the_search_never_tries_a_size_that_does_not_fit(number: int, weights: int, each: int, limit: int) -> None:
    """Memory grows evenly with the size; the first two sizes are tried to see by how much."""
    found, tried = search(number, lambda size: weights + each * size, limit)
    divisors = [one for one in range(1, number + 1) if number % one == 0]
    fitting = [one for one in divisors if weights + each * one <= limit]
    assert found == max(fitting[-1], divisors[:2][-1])
    assert set(tried) <= {*fitting, *divisors[:2]}


@given(number=some.integers(1, 400), short=some.integers(1, 500))
def test_if_a_size_runs_out_all_the_same_the_one_before_is_the_answer(number: int, short: int) -> None:
    found, tried = search(number, lambda size: 10, 1000, short)
    assert found == max([0, *(size for size in tried if size < short)])
    assert all(size < short for size in tried[:-1])


def test_sizes_are_doubled() -> None:
    assert search(32, lambda size: size, 100) == (32, [1, 2, 4, 8, 16, 32])
    assert search(24, lambda size: size, 13) == (12, [1, 2, 4, 8, 12])
    assert search(32, lambda size: 0, 100, 16) == (8, [1, 2, 4, 8, 16])
    assert search(24, lambda size: 0, 100, 12) == (8, [1, 2, 4, 8, 12])


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
        ({"micro_batch": "many"}, 128, "--micro_batch cannot be 'many'"),
        ({"micro_batch": "0"}, 128, "--micro_batch cannot be '0'"),
        ({"micro_batch": "4", "per_device_train_batch_size": 4}, 128, "are both given"),
        ({"micro_batch": "auto", "global_batch_size": 8}, None, "needs a maximum sequence length"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, values: dict[str, object], length: int | None, expected: str
) -> None:
    with pytest.raises(JobError) as caught:
        micro_batch.settle(settings(**values), run_folder(tmp_path), ALONE, length)
    assert expected in caught.value.what


def test_a_row_is_drawn_out_to_the_full_length() -> None:
    row = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "text": "words", "seq_lengths": [2, 1], "other": [1]}
    tokens = [5, 6, 7, 5, 6, 7, 5]
    assert probe.full_length(row, 7) == {"input_ids": tokens, "labels": tokens}
    with pytest.raises(JobError, match="no tokens"):
        probe.full_length({"text": "words"}, 7)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL timeout, tearing the process down"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_only_a_failed_allocation_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert probe.is_out_of_memory(error) is expected


@pytest.mark.training
@pytest.mark.parametrize(("ending", "code"), [("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9), ("sys.exit(3)", 3)])
def test_a_try_that_dies_is_an_error_and_no_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, code: int
) -> None:
    """A library that aborts, say after a timeout of NCCL, says nothing about memory."""
    child = tmp_path / "child.py"
    child.write_text(f"import os, sys\nprint('NCCL timeout, tearing the process down', flush=True)\n{ending}\n")
    monkeypatch.setattr(sys, "argv", [str(child)])
    chosen = settings(micro_batch="auto", global_batch_size=8)
    with pytest.raises(JobError, match=f"failed on rank 0 with exit code {code}") as caught:
        micro_batch.settle(chosen, run_folder(tmp_path), ALONE, 128)
    assert "NCCL timeout" in caught.value.why
    assert not (tmp_path / "micro_batch.json").exists() and not list((tmp_path / "cache").glob("**/*.json"))


class Store:
    """What the ranks share; `late` arrives while somebody waits."""

    def __init__(self, late: dict[str, str], **values: str) -> None:
        self.values, self.late = values, late
        self.get, self.set = self.values.__getitem__, self.values.__setitem__

    def check(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)

    def wait(self, names: list[str], limit: object) -> None:
        self.values.update(self.late)
        if not self.check(names):
            raise RuntimeError("nothing came in time")


@pytest.mark.parametrize("ending", ["time.sleep(60)", "sys.exit(1)"])
def test_another_rank_that_ran_out_of_memory_is_the_answer_of_a_child_that_hangs_or_fails(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other children wait in a collective forever, or fail a moment before that rank has said why."""
    child = tmp_path / "child.py"
    child.write_text(f"import sys, time\n{ending}\nopen(sys.argv[1], 'w')\n")
    monkeypatch.setattr(sys, "argv", [str(child)])
    answer, hangs = {micro_batch.OUTCOME: "2"}, "sleep" in ending
    store = Store({} if hangs else answer, port="1", **(answer if hangs else {}))
    words = Settings({}, {}, "sft", (str(tmp_path / "whole"),))
    assert micro_batch.search([1, 2, 4], words, run_folder(tmp_path), ALONE, store) == 2
    assert not (tmp_path / "whole").exists(), "the child was not ended"


@pytest.mark.training
def test_another_error_of_a_try_is_shown_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    child = tmp_path / "child.py"
    child.write_text("import sys\nsys.exit('noise\\nsft: no text\\n  because: A\\n  try:     B')\n")
    monkeypatch.setattr(sys, "argv", [str(child)])
    with pytest.raises(JobError) as caught:
        micro_batch.settle(settings(micro_batch="auto"), run_folder(tmp_path), ALONE, 128)
    assert caught.value.why == "sft: no text because: A try:     B"


@pytest.mark.training
def test_an_answer_counts_for_its_own_question_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child here stands for a probe: it finds room forevery size, and notes that it was started."""
    pytest.importorskip("torch")
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os\nopen(os.environ['STARTS'], 'a').write('x')\n"
        "size = json.loads(os.environ['RUNNER_PROBE'])['sizes'][-1]\n"
        "open(os.environ['RUNNER_ATTEMPT'] + '/fits', 'w').write(str(size))\n"
    )
    monkeypatch.setattr(sys, "argv", [str(child)])
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    for length, starts in ((128, 1), (128, 1), (256, 2)):
        chosen = settings(micro_batch="auto", global_batch_size=8)
        micro_batch.settle(chosen, run_folder(tmp_path), ALONE, length)
        assert (chosen["per_device_train_batch_size"], chosen["gradient_accumulation_steps"]) == (8, 1)
        assert (tmp_path / "starts").read_text() == "x" * starts
    for starts, damaged in enumerate(('{"micro_batch": ', "[]", "{}", '{"micro_batch": 8}'), 3):
        (tmp_path / "micro_batch.json").write_text(damaged)  # as a full disk or an editor leaves it
        micro_batch.settle(settings(micro_batch="auto", global_batch_size=8), run_folder(tmp_path), ALONE, 256)
        assert (tmp_path / "starts").read_text() == "x" * starts


# 50 MB per sequence: the logits of 512 tokens over 8192 words, three times in fp32; in pieces they would be fewer.
LONG = (
    "--loss_path=plain",
    *(word for word in SMALL if not word.startswith(("--model_name", "--max_length", "--per_device"))),
    *("--model_name_or_path={large}/tiny-llama", "--max_length=512", "--global_batch_size=8", "--max_steps=1"),
    "--save_strategy=no",
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
        large = launcher.cache / "large"
        demo.write(large, vocabulary=8192)
        typed = small.filled((word.replace("{large}", str(large)) for word in (*LONG, *words)), launcher.cache)
        command = (sys.executable, str(JOBS / "sft.py"), *typed)
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, preexec_fn=limited)
        peak = 0
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmPeak" in line)])
            time.sleep(0.02)
    return Attempt(process.returncode, log.read_text(), run), peak


@pytest.mark.slow
@pytest.mark.training
def test_under_torchrun_the_search_leaves_the_rendezvous_of_the_training_alone(
    launcher: Launcher, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    words = [word for word in SMALL if not word.startswith("--per_device")]
    words += ["--micro_batch=auto", "--global_batch_size=8", "--max_steps=1", "--save_strategy=no", "--deepspeed=zero2"]
    first = launcher.sft(tmp_path / "run", *words)
    assert first.code == 0, first.output
    assert "micro batch: 4; one pass takes all sequences of a step" in first.output
    again = launcher.sft(tmp_path / "run", *words, attempt=2)
    assert "micro batch: 4, from an earlier search" in again.output


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
    assert "micro batch: 4; a larger size needs too much memory" in found.output
    assert "batch: 4 per process x 2 accumulation x 1 processes = 8 sequences per step" in found.output
    assert found.losses == given.losses
    assert not list((found.run / "attempts" / "1" / "probe").rglob("*.safetensors"))
    too_many, _ = start_alone(launcher, tmp_path / "too-many", limit, "--micro_batch=8")
    assert too_many.code != 0
    assert probe.is_out_of_memory(RuntimeError(too_many.output))


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed
from training import probe
torch.distributed.init_process_group("gloo")
search = probe.Search([1, 2, 4, 8])
while True:
    if search.size > 2 and os.environ["RANK"] == "1":
        probe.out_of_memory(search, RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    torch.distributed.all_reduce(torch.zeros(1))  # the other rank waits here forever, or fails
    search.done(1, 100)
"""
PARENT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from training import micro_batch, processes, run, settings
sys.argv[0] = sys.argv[1]
peers, folder = processes.from_environment(os.environ), run.from_environment(os.environ, "sft")
with micro_batch.shared_store(peers) as store:
    if peers.first:
        store.set("port", str(processes.free_port("")))
    words = settings.Settings({}, {}, "sft", tuple(sys.argv[2:]))
    print(micro_batch.search([1, 2, 4, 8], words, folder, peers, store))
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
    answers = [parent.communicate(timeout=600)[0].splitlines()[-1] for parent in parents]
    assert answers == ["2", "2"]
