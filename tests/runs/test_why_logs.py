"""Logs that real programs left: each gives its cause, with the rank and the frame of the user's code; clean ones none.

recorded/ was provoked (torch 2.13, transformers 5.23, deepspeed 0.19, Slurm 22.05, podman 4.3, Python 3.11; paths
shortened); expected.txt says what each must give: file, cause, rank, frame, line (`-`: none).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.runs.why import log as logs
from runner.runs.why.explain import explain_logs

FOLDER = Path(__file__).parent / "why"
EXPECTED = [line.split() for line in (FOLDER / "expected.txt").read_text().splitlines()]
CLEAN = sorted((FOLDER / "clean").glob("*.log"))

WATCHDOG = (
    "[rank{rank}]:[E321 02:17:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600060 milliseconds before timing out.\n"
)
TRACEBACK = """\
2026-11-21 10:{minute}:00 working
Traceback (most recent call last):
  File "/home/u/train.py", line {line}, in main
    step()
KeyError: 'a{rank}'
"""
ECC = "[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(("name", "code", "rank", "frame", "line"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_a_recorded_failure_gives_its_cause(name: str, code: str, rank: str, frame: str, line: str) -> None:
    answer = explain_logs([FOLDER / "recorded" / f"{name}.log"])
    assert answer.cause is not None
    found = answer.first.frame if answer.first else None
    assert (
        answer.cause.code,
        "-" if answer.rank is None else str(answer.rank),
        f"{Path(found.file).name}:{found.line}" if found else "-",
        str(answer.first.number if answer.first else 0),
    ) == (code, rank, frame, line)


def test_every_recorded_log_is_expected() -> None:
    assert {row[0] for row in EXPECTED} == {path.stem for path in (FOLDER / "recorded").glob("*.log")}
    assert len({row[1] for row in EXPECTED}) >= 60  # causes that a real program was made to say


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_a_clean_log_gives_no_cause(path: Path) -> None:
    assert explain_logs([path]).cause is None


WORDINGS = [tuple(line.split(": ", 1)) for line in (FOLDER / "wordings.txt").read_text().splitlines()]


def test_a_line_as_other_versions_and_libraries_word_it_gives_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    wrong = []
    for code, line in WORDINGS:
        log.write_text(f"{line}\n")
        cause = explain_logs([log]).cause
        if cause is None or cause.code != code:
            wrong.append((line, code, cause and cause.code))
    assert len(WORDINGS) >= 541 and not wrong


def test_a_cause_wins_over_a_symptom_in_the_same_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("FATAL:   container creation failed: while mounting image x.sif: unable to mount\n")
    cause = explain_logs([log]).cause
    assert cause is not None and cause.code == "image-mount"


def test_there_are_thirty_clean_logs() -> None:
    assert len(CLEAN) >= 30


def test_the_first_failing_rank_is_named_not_the_loudest(tmp_path: Path) -> None:
    """One rank says it once, ten minutes earlier; seven others shout about the consequence, in lines before it."""
    log = tmp_path / "job.log"
    early = "[rank5]:[E321 02:07:01.101 x.cpp:1] shutting down\n" + ECC
    log.write_text("".join(WATCHDOG.format(rank=rank) for rank in range(5) for _ in range(50)) + early)
    answer = explain_logs([log])
    assert answer.cause is not None and answer.cause.code == "gpu-ecc" and answer.rank == 5
    assert answer.evidence == f"{log}:252"
    assert [(each.cause.code, each.place) for each, _ in answer.followed] == [("nccl-timeout", f"{log}:1")]


def test_of_several_logs_the_earliest_by_time_counts(tmp_path: Path) -> None:
    found = []
    for rank, minute in ((0, "30"), (1, "10"), (2, "20")):
        log = tmp_path / f"rank-{rank}.log"
        log.write_text(TRACEBACK.format(minute=minute, line=rank + 1, rank=rank))
        found.append(log)
    answer = explain_logs(found)
    assert answer.rank == 1 and answer.line.endswith("'a1'")
    assert answer.first is not None and answer.first.frame is not None and answer.first.frame.line == 2


def test_interleaved_tracebacks_of_two_ranks_are_kept_apart(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    one = ["Traceback (most recent call last):", '  File "/home/u/a.py", line 7, in f', "    x()", "ValueError: bad"]
    two = ["Traceback (most recent call last):", '  File "/home/u/b.py", line 9, in g', "    y()", "TypeError: worse"]
    mixed = [f"[rank{rank}]: {line}" for pair in zip(one, two, strict=True) for rank, line in enumerate(pair)]
    log.write_text("\n".join(mixed) + "\n")
    answer = explain_logs([log])
    assert answer.first is not None and answer.first.frame is not None
    assert (answer.rank, answer.first.frame.file, answer.first.number) == (0, "/home/u/a.py", 7)


def test_a_traceback_that_ray_prints_for_its_worker_names_the_users_frame(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/u/reward.py", line 7, in f',
        "    x()",
        "ValueError: bad",
    ]
    log.write_text("".join(f"(WorkerDict pid=4711, ip=10.0.0.1) {line}\n(raylet) noise\n" for line in lines))
    answer = explain_logs([log])
    assert answer.first is not None and answer.first.frame is not None
    assert (answer.first.frame.file, answer.line.endswith("ValueError: bad")) == ("/home/u/reward.py", True)


@pytest.mark.parametrize(
    "prefix",
    [
        "[nid001:{}]:",
        "[nid001:{}]:[rank{}]: ",
        "[15:{}]:",
        "[trainer{}]:",
        "[worker3|{}]:",
        "[0] [{}] ",
        "  | 2024-08-23T22:22:58.879Z | [rank{}]: ",
        "2025-10-31 03:11:02,478 - Trainer - INFO - [rank{}]: ",
    ],
)
def test_a_traceback_is_read_behind_what_a_launcher_puts_before_each_line(tmp_path: Path, prefix: str) -> None:
    """torchrun's --role, Monarch, a collector of logs; the lines of two ranks are mixed."""
    log = tmp_path / "job.log"
    lines = ["Traceback (most recent call last):", '  File "/home/u/a.py", line 7, in main', "    x()", "KeyError: 'b'"]
    log.write_text("".join(f"{prefix.format(rank, rank)}{line}\n" for line in lines for rank in (5, 6)))
    answer = explain_logs([log])
    assert answer.cause is not None and answer.first is not None and answer.first.frame is not None
    assert (answer.cause.code, answer.first.frame.line) == ("key-missing", 7)


def test_a_traceback_in_a_box_or_with_stamped_lines_names_the_users_frame(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    for lines in (
        ["╭── Traceback (most recent call last) ──╮", "│ /home/u/a.py:7 in main   │", "│ ❱ 7 │ x()  │", "╰──╯",
         "ValueError: bad"],
        ["2026-11-21T10:00:00.1Z Traceback (most recent call last):",
         '2026-11-21T10:00:00.2Z   File "/home/u/a.py", line 7, in main', "2026-11-21T10:00:00.3Z     x()",
         "2026-11-21T10:00:00.4Z ValueError: bad"],
        ["[1,3]<stderr>:Traceback (most recent call last):", '[1,3]<stderr>:  File "/home/u/a.py", line 7, in main',
         "[1,3]<stderr>:    x()", "[1,3]<stderr>:ValueError: bad"],
    ):  # fmt: skip
        log.write_text("\n".join(lines) + "\n")
        answer = explain_logs([log])
        assert answer.first is not None and answer.first.frame is not None
        frame = answer.first.frame
        assert (frame.file, frame.line, frame.function) == ("/home/u/a.py", 7, "main")
        assert answer.line.endswith("ValueError: bad")


def test_an_error_that_the_program_survived_is_not_the_cause(tmp_path: Path) -> None:
    """A traceback that was handled, an hour of training, then the real end."""
    log = tmp_path / "job.log"
    handled = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    x()\nKeyError: 'cache'\n"
    training = "".join(f"{{'loss': {3 - step / 100}, 'grad_norm': 1.0}}\n" for step in range(40))
    log.write_text(handled + training)
    assert explain_logs([log]).cause is None
    log.write_text(handled + training + "OSError: [Errno 28] No space left on device\n")
    answer = explain_logs([log])
    assert answer.cause is not None and (answer.cause.code, answer.evidence) == ("disk-full", f"{log}:45")


SHARDS = "".join(f"Loading checkpoint shards:  {i}%|#| {i}/40 [00:{i}<00:40,  1.02s/it]\n" for i in range(40))
ALONE = """\
Traceback (most recent call last):
  File "/home/u/generate.py", line 3, in main
    f()
FileNotFoundError: [Errno 2] No such file or directory: '/data/x.json'
"""


def labelled(rank: int, text: str) -> str:
    return "".join(f"{rank}: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (SHARDS + ALONE + SHARDS, "file-missing"),
        (labelled(0, SHARDS) + labelled(1, ALONE) + labelled(0, SHARDS), "file-missing"),
        (labelled(0, ALONE) + labelled(0, SHARDS), "task-exit"),  # task 0 survived it
        (ALONE + SHARDS + "[rank0]: RuntimeError: [/x/pair.cc:534] Connection closed by peer\n", "peer-closed"),
    ],
)
def test_the_exception_of_the_rank_that_srun_names_counts_where_the_others_went_on(
    log: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.log"
    path.write_text(log + "srun: error: nid001: task 1: Exited with exit code 1\n")
    cause = explain_logs([path]).cause
    assert cause is not None and cause.code == expected
    path.write_text(ALONE + SHARDS)
    assert explain_logs([path]).cause is None


def test_gpu_and_host_out_of_memory_are_told_apart(tmp_path: Path) -> None:
    gpu, host = tmp_path / "gpu.log", tmp_path / "host.log"
    gpu.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.\n")
    host.write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\n"
    )
    codes = [answer.cause.code for answer in map(explain_logs, ([gpu], [host])) if answer.cause]
    assert codes == ["gpu-out-of-memory", "host-out-of-memory"]


def test_a_killed_rank_is_explained_by_the_memory_that_slurm_speaks_of_later(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "  time      : 2026-11-21_16:51:48\n  traceback : Signal 9 (SIGKILL) received by PID 15241\n"
        "[2026-11-21T16:51:50] slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks "
        "have been OOM Killed.\n"
    )
    answer = explain_logs([log])
    assert answer.cause is not None and answer.cause.code == "host-out-of-memory"
    assert [each.cause.code for each, _ in answer.followed] == ["killed-rank"]


def test_what_is_not_known_is_said_with_the_most_telling_lines(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1\nINFO: 0 errors so far\nquux: fatal: the flux capacitor failed on nid007\nbye\n")
    answer = explain_logs([log])
    assert answer.cause is None and not answer.known
    assert [each.place for each in answer.telling] == [f"{log}:3"]


def test_colours_and_progress_bars_hide_nothing(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    bars = b"10%|x| 1/10\r20%|x| 2/10\r"
    log.write_bytes(bars + b"\x1b[31mRuntimeError: CUDA error: an illegal memory access was encountered\x1b[0m\n")
    answer = explain_logs([log])
    assert answer.cause is not None and answer.cause.code == "gpu-illegal-access"
    assert answer.line == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match=r"none\.log"):
        explain_logs([tmp_path / "none.log"])


def test_a_log_of_hundreds_of_megabytes_is_read_with_little_memory(tmp_path: Path) -> None:
    """30 MiB here: one error, then noise; the line number is right, and memory does not grow with the log."""
    log = tmp_path / "big.log"
    block = "".join(f"step {i}/9000 loss 1.{i:04} 12,345 tokens/s on node {i % 7}\n" for i in range(20000)).encode()
    noise = WATCHDOG.format(rank=1).encode() * 4000
    with log.open("wb") as file:
        for _ in range(25):
            file.write(block)
        file.write(ECC.encode())
        file.write(noise * 20)
    code = (
        "import json, sys; from pathlib import Path\n"
        "from runner.runs.why.explain import explain_logs\n"
        "answer = explain_logs([Path(sys.argv[1])])\n"
        # not ru_maxrss: a child begins with that of the process that made it
        "peak = int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]) >> 10\n"
        "print(json.dumps([answer.record(), peak]))"
    )
    done = subprocess.run((sys.executable, "-c", code, log), capture_output=True, text=True, check=True, timeout=600)
    record, peak_mib = json.loads(done.stdout)
    assert record["cause"]["code"] == "gpu-ecc" and record["evidence"]["number"] == 25 * 20000 + 1
    assert record["rank"] == 5 and peak_mib < 80
    os.truncate(log, 0)  # it need not wait for pytest's own tidying


def test_of_a_larger_log_head_and_tail_are_read_and_the_lines_between_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "HEAD_BYTES", 4096)
    monkeypatch.setattr(logs, "TAIL_BYTES", 4096)
    monkeypatch.setattr(logs, "PIECE_BYTES", 1000)
    log = tmp_path / "job.log"
    log.write_text("step\n" * 5000 + ECC)
    answer = explain_logs([log])
    assert answer.evidence == f"{log}:5001" and "in the middle were not read" in answer.notes[0]


def test_progress_bars_that_return_to_the_start_of_their_line_cost_no_more_than_lines(tmp_path: Path) -> None:
    """10 MiB without a newline, and the same as lines; both hold an error in the middle, and both are found."""
    bar = "Training:  {:3}%|{:33}| {}/99999 [{:02}:{:02}<{:02}:11, 9.31it/s, loss=0.{:04}]"
    bars = [bar.format(i % 100, "█" * (i % 100 // 3), i, i // 60 % 60, i % 60, i % 17, i) for i in range(100_000)]
    bars.insert(60_000, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.")
    seconds = []
    for end in ("\n", "\r"):
        log = tmp_path / "job.log"
        log.write_text(end.join(bars), newline="")
        start = time.process_time()
        answer = explain_logs([log])
        seconds.append(time.process_time() - start)
        assert answer.cause is None  # it was survived
        log.write_text(end.join([*bars[:60_001], *["." * 90] * 40_000]), newline="")
        answer = explain_logs([log])
        assert answer.cause is not None and answer.line == bars[60_000]
    assert seconds[1] < 3 * seconds[0] + 1


def test_a_line_of_many_megabytes_is_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """40 MiB without any line end: only its beginning and its end are searched."""
    log = tmp_path / "job.log"
    piece = random.Random(1).randbytes(1 << 20).replace(b"\n", b"x").replace(b"\r", b"x")
    with log.open("wb") as file:
        for _ in range(40):
            file.write(piece)
        file.write(b" torch.OutOfMemoryError: CUDA out of memory. Tried\n" + ECC.encode())
    start = time.process_time()
    answer = explain_logs([log])
    assert answer.cause is not None and answer.cause.code == "gpu-out-of-memory" and len(answer.line) <= 4096
    assert [each.place for each, _ in answer.followed] == [f"{log}:2"]
    assert time.process_time() - start < 2  # all words in all of it: 4 seconds and more


def test_one_line_without_end_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PIECE_BYTES", 1000)
    log = tmp_path / "job.log"
    log.write_bytes(b"x" * 100_500 + b" CUDA out of memory " + b"y" * 100_000)
    answer = explain_logs([log])
    assert answer.cause is not None and len(answer.line) <= 4096
