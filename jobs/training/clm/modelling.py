"""Causal language modelling: what its trainer is made of, and its evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import files
from training.clm import arguments, blocks, model, text
from training.course import Course
from training.errors import JobError
from training.processes import Processes, barrier
from training.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(argv: Sequence[str], run: RunFolder, peers: Processes) -> int:
    """Return 0 when the work is done, 75 when it was asked to save and leave before its end."""
    started = time.monotonic()
    settings, batch = arguments.read(argv, run, peers)
    from transformers import TrainingArguments

    course = Course(TrainingArguments, settings, batch, run, peers, started)
    if settings["do_train"]:
        return course.train(_trainer, _evaluate if settings["do_eval"] else None)
    course.prepare(_trainer)
    found = _evaluate(course, Path(model.name_of(settings)), True)
    if peers.first:
        files.write_json(run.summary, found)
    barrier(peers)
    return 0


def _trainer(course: Course) -> Any:
    from training.clm.trainer import CountingTrainer, collate

    settings = course.settings
    training, held_out = text.find(course)
    tokenizer = model.load_tokenizer(course)
    train_blocks = _blocks(course, training, tokenizer, "train", settings["max_train_samples"])
    eval_blocks = _blocks(course, held_out, tokenizer, "validation", settings["max_eval_samples"])
    return CountingTrainer(
        model=model.make(course, tokenizer),
        args=course.config,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        data_collator=collate,
        callbacks=course.callbacks(),
        counter=course.counter,
    )


def _blocks(
    course: Course, found: text.Text | None, tokenizer: PreTrainedTokenizerBase, split: str, most: int | None
) -> Any:
    """Return the blocks of a split, no more than asked for; say how many. Raises JobError where there is not one."""
    from torch.utils.data import Subset

    if found is None:
        return None
    settings, length = course.settings, course.settings["block_size"]
    if settings["streaming"]:
        return blocks.Stream(found, tokenizer, length, settings["append_eos"], most)
    made = blocks.build(found, tokenizer, length, settings["append_eos"], course.run.cache, course.peers)
    tokens = len(made.tokens)
    if len(made) == 0:
        raise JobError(
            f"the text for {split} is shorter than one block",
            f"{len(found.rows)} documents hold {tokens} tokens, a block is {length}",
            "a smaller --block_size, or more text",
        )
    if course.peers.first:
        left = f"{tokens - len(made) * length} tokens left over"
        kept = f", of which {most} are used" if most and most < len(made) else ""
        print(f"{split}: {len(found.rows)} documents, {len(made)} blocks of {length} tokens{kept}, {left}", flush=True)
    return Subset(made, range(most)) if most and most < len(made) else made


def _evaluate(course: Course, of: Path, ready: bool) -> dict[str, Any]:
    """Return loss and perplexity of the held-out text; `ready` is false where the weights are not the trained ones."""
    if not ready:
        if course.peers.first:
            print(f"not evaluated, since nothing was left to train: --do_eval --model_name_or_path {of}", flush=True)
        return {}
    found = course.trainer.evaluate()
    if course.peers.first:
        print(f"evaluated {of}: loss {found['eval_loss']:.4f}, perplexity {found['eval_perplexity']:.3f}", flush=True)
    return {"eval_loss": found["eval_loss"], "perplexity": found["eval_perplexity"]}
