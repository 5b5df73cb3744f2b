"""Causal language modelling: what its trainer is made of, and its evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import blocks, files
from training import clm_arguments as arguments
from training import clm_model as model
from training.choices.choices import Choice
from training.course import Course
from training.processes import Processes, barrier
from training.run import RunFolder


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
    from transformers import default_data_collator

    from training.perplexity import CountingTrainer, Numbered

    tokenizer = model.load_tokenizer(course)
    train_blocks, eval_blocks = blocks.prepare(course, tokenizer)
    made = model.make(course, tokenizer)
    if course.config.ddp_find_unused_parameters is None and not model.has_experts(made):
        course.config.ddp_find_unused_parameters = False  # every weight has its gradient; looking costs a pass
    trainer = CountingTrainer(
        model=made,
        args=course.config,
        train_dataset=train_blocks,
        eval_dataset=Numbered(eval_blocks) if hasattr(eval_blocks, "__len__") else eval_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=course.callbacks(),
        counter=course.counter,
        wanted_loss=course.settings["loss_path"],
    )
    why = trainer.whole_logits or "the same loss and gradients, logits made once and never kept"
    course.choices.append(Choice("loss", "plain" if trainer.whole_logits else "pieces", why))
    return trainer


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
