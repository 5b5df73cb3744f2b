"""A rank is killed in trainings other than trainer.py: our jobs, and stand-ins for other people's."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.faults import account, by_hand
from tests.faults.case import SAVE_EVERY, STEP_SECONDS, Case, Outcome, command
from tests.jobs import small

TRAININGS = Path(__file__).with_name("trainings")
JOBS = Path(__file__).resolve().parents[2] / "jobs"
SFT = (
    *(f"--model_name_or_path={small.MODEL}", f"--dataset_name={small.CONVERSATIONS}", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--activation_checkpointing=false", "--gradient_checkpointing=false"),
)
CLM = (
    *("--model_type=gpt2", "--config_overrides=n_embd=32,n_head=2,n_layer=2,vocab_size=512,n_positions=64"),
    *(f"--tokenizer_name={small.MODEL}", "--block_size=32", "--do_train", "--train_file={corpus}"),
)
BOTH = ("--per_device_train_batch_size=1", "--logging_steps=1", f"--save_steps={SAVE_EVERY}", "--max_steps={steps}")


def stand_in(name: str, case: Case) -> Outcome:
    """Of a training that writes down the same as ours."""
    case.keeps = True
    use_stand_in(name, case)
    return by_hand.rank_killed(case)


def helper_killed(case: Case) -> Outcome:
    """Every third time, the steps of the training are read from its log."""
    if case.number % 3 == 2:
        use_stand_in("like_megatron.py", case)
    return by_hand.helper_killed(case)


def use_stand_in(name: str, case: Case) -> None:
    case.code = {name: (TRAININGS / name).read_text()}
    case.launcher, case.trainer = "torchrun", None
    if name == "like_megatron.py":
        case.launcher, case.trainer = "srun", "megatron-lm"
        folders = ("--save", str(case.run / "checkpoints"), "--load", str(case.run / "checkpoints"))
        numbers = ("--train-iters", case.steps, "--save-interval", SAVE_EVERY, "--seconds-per-step", STEP_SECONDS)
        case.arguments = (*folders, *map(str, numbers))
    case.environ = python()


def our_job(name: str, case: Case) -> Outcome:
    """Of one of our jobs, which writes metrics.jsonl: what happened is read from there."""
    case.keeps = True
    use_our_job(name, case, *(SFT if name == "sft.py" else CLM), *BOTH)
    case.start()
    os.kill(min(ranks(name, case, case.held_nodes()[1])), signal.SIGKILL)
    return case.outcome()


def use_our_job(name: str, case: Case, *words: str) -> None:
    """The words are its arguments; {corpus}, {steps} and {small} are replaced."""
    corpus = case.folder / "corpus.jsonl"
    texts = ("".join(f"{i} times {j} is {i * j}.\n" for j in range(i % 7)) for i in range(300))
    corpus.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    paths = (path for path in JOBS.rglob("*") if path.suffix in {".py", ".json"})
    case.code = {name: "", **{str(path.relative_to(JOBS)): path.read_text() for path in paths}}
    words = small.filled(words, case.folder)
    case.arguments = tuple(word.format(corpus=corpus, steps=case.steps) for word in words)
    case.launcher = "torchrun"
    case.environ = {**python(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(case.folder / "hub")}
    case.read_lines = lambda: lines_of_job(case)


def ranks(script: str, case: Case, node: str) -> list[int]:
    """The processes of the ranks on a node, without torchrun."""
    return [pid for name, pid in case.job_processes() if name == node and is_rank(script, pid)]


def python() -> dict[str, str]:
    """Variables for a job that imports what these tests can import."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def is_rank(script: str, pid: int) -> bool:
    """Whether the process is a rank, and not torchrun."""
    return script in command(pid) and "torchrun" not in command(pid) and "torch.distributed.run" not in command(pid)


def lines_of_job(case: Case) -> tuple[account.Line, ...]:
    """What metrics.jsonl tells, as our own training would have recorded it."""
    found: list[account.Line] = []
    texts = (case.run / "metrics.jsonl").read_text().split("\n")[:-1] if case.begun() else ()
    for entry in map(json.loads, texts):
        attempt, step = entry.get("attempt", 0), entry.get("step", 0)

        def line(
            what: str, word: object, moment: float = entry.get("time", 0), attempt: int = attempt, rank: int = 0
        ) -> None:
            found.append(account.Line(attempt, rank, 0, what, str(word), moment, "-"))

        if "loss" in entry:
            if not found or found[-1].attempt != attempt:
                for rank in (1, 0):
                    line("begins", step - 1, rank=rank)
            line("step", step)
        elif "checkpoint_seconds" in entry:
            line("saved", step)
    taken = {line.step for line in found if line.what == "step"}
    if taken == set(range(1, case.steps + 1)) and case.causes()[-1] == "done":
        found.append(account.Line(found[-1].attempt, 0, 0, "finished", account.state_after(case.steps), 0, "-"))
    return tuple(found)
