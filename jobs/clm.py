"""Causal language modelling, from scratch or continued, on GPUs or CPU, with torchrun, srun, accelerate or no launcher.

    torchrun --nproc-per-node 2 jobs/clm.py                     the demo: a tiny Llama, a tokenizer made on the spot
    torchrun --nproc-per-node 8 jobs/clm.py --model_type gpt2 --config_overrides n_embd=1024,n_head=16,n_layer=24 \
        --tokenizer_name openai-community/gpt2 --train_file corpus.jsonl --block_size 1024 --global_batch_size 512

Arguments: those of transformers' run_clm with the same names (also `--config FILE.yaml`), and a few more: see `--help`.
Without --do_train and --do_eval it trains. `--deepspeed` takes a preset (zero0 ... zero3) or a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import job as contract
from training.arguments import TINY_MODEL
from training.errors import JobError
from training.job import Job
from training.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Train. Return 0 when done, or 75 to ask for another attempt that resumes from the checkpoint."""
    with contract.start("clm") as job:
        return train(argv, job)


def train(argv: Sequence[str], job: Job) -> int:
    from transformers import TrainingArguments

    from training import clm_arguments, probe, resume

    # Arguments. Making the TrainingArguments starts the process group.
    settings, batch = clm_arguments.read(argv, job)
    config = contract.configure(TrainingArguments, settings, job)
    checkpoint = contract.find_checkpoint(settings, config, job)

    # Tokenizer, data, model, trainer
    trainer = make_trainer(settings, config, job)
    contract.attach(trainer, settings, batch, checkpoint, job)
    if probe.probing():  # a child of `--micro_batch auto`
        return probe.probe(trainer, settings["block_size"])
    if not settings["do_train"]:
        return evaluate_only(trainer, settings, job)

    # Train, or leave the rest to the next attempt
    finished = resume.is_finished(checkpoint, config)
    if not finished:
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    if job.stop.reason:
        return contract.leave(trainer, job)

    # The final model, and its perplexity
    final, results = contract.save_final(trainer, checkpoint, job), {}
    if settings["do_eval"] and not finished:
        results = evaluate(trainer, final, job)
    elif settings["do_eval"] and job.processes.first:
        print(
            "the model was not evaluated, because its training was already complete; "
            f"to evaluate it: --do_eval --model_name_or_path {final}",
            flush=True,
        )
    return contract.finish(trainer, settings, final, job, results)


def make_trainer(settings: Settings, config: Any, job: Job) -> Any:
    """Return transformers' Trainer with the model, the blocks of tokens and the callbacks that runner needs."""
    from transformers import default_data_collator

    from training import blocks, models
    from training.perplexity import BlockTrainer

    tokenizer = load_tokenizer(settings, job)
    train_blocks, eval_blocks = blocks.prepare(settings, tokenizer, job)
    model = load_model(settings, tokenizer, config)
    if config.ddp_find_unused_parameters is None and not models.has_experts(model):
        config.ddp_find_unused_parameters = False  # searching for them costs a traversal of the graph at every step
    return BlockTrainer(
        model=model,
        args=config,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=contract.callbacks(job),
    )


def load_tokenizer(settings: Settings, job: Job) -> Any:
    from training import demo, models

    name = settings["tokenizer_name"] or settings["model_name_or_path"]
    if name == TINY_MODEL:
        return demo.load_tokenizer(job.run.cache, settings["vocabulary_size"], job.processes)
    tokenizer = models.load_tokenizer(settings)
    if settings["append_eos"] and tokenizer.eos_token_id is None:
        raise JobError(
            f"the tokenizer of {name!r} has no end token",
            "--append_eos puts an end token after each document",
            "remove --append_eos",
        )
    return tokenizer


def load_model(settings: Settings, tokenizer: Any, config: Any) -> Any:
    from training import demo, models

    if settings["model_name_or_path"] == TINY_MODEL:
        return demo.tiny_llama(tokenizer, settings["block_size"], config.seed)
    return models.load(settings, tokenizer, config.seed)


def evaluate_only(trainer: Any, settings: Settings, job: Job) -> int:
    from training import files, models

    results = evaluate(trainer, Path(models.name_of(settings)), job)
    if job.processes.first:
        files.write_json(job.run.summary, results)
    return 0


def evaluate(trainer: Any, name: Path, job: Job) -> dict[str, Any]:
    """Return loss and perplexity of the validation text."""
    found = trainer.evaluate()
    loss, perplexity = found["eval_loss"], found["eval_perplexity"]
    if job.processes.first:
        print(f"evaluated {name}: loss {loss:.4f}, perplexity {perplexity:.3f}", flush=True)
    return {"eval_loss": loss, "perplexity": perplexity}


if __name__ == "__main__":
    contract.end_process(main(sys.argv[1:]))
