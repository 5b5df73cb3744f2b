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
from typing import TYPE_CHECKING

from training import arguments, clm_arguments, clm_models, files, models, resume
from training.job import Job, end_process, start

if TYPE_CHECKING:
    from transformers import Trainer


def main(argv: Sequence[str], job: Job) -> int:
    """Train. Return 0 when done, or 75 to ask for another attempt that resumes from the checkpoint."""
    from transformers import TrainingArguments, default_data_collator

    from training import blocks
    from training.perplexity import BlockTrainer

    # Arguments. Making the TrainingArguments starts the process group.
    model_args, data_args = clm_arguments.read(arguments.or_demo(argv, job), job)
    training_args = job.training_arguments(TrainingArguments)
    checkpoint = job.find_checkpoint(training_args)

    # Tokenizer, data, model
    tokenizer = clm_models.load_tokenizer(model_args, data_args.append_eos)
    train_blocks, eval_blocks = blocks.prepare(data_args, model_args, training_args, tokenizer, job)
    model = clm_models.load(model_args, tokenizer, training_args.seed)

    # Trainer. Add your own callbacks or data collator here.
    trainer = BlockTrainer(
        model=model,
        args=training_args,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=job.callbacks(),
    )
    job.attach(trainer, checkpoint)

    # Evaluate only
    if not training_args.do_train:
        results = evaluate(trainer, models.name_of(model.config), job)
        if job.processes.first:
            files.write_json(job.run.summary, results)
        return 0

    # Train, or leave the rest to the next attempt
    finished = resume.is_finished(checkpoint, training_args)
    if not finished:
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    if job.stop.reason:
        return job.leave(trainer)

    # The final model, and its perplexity
    final = job.save_final(trainer, checkpoint)
    results = {}
    if training_args.do_eval and not finished:
        results = evaluate(trainer, str(final), job)
    elif training_args.do_eval and job.processes.first:
        print(
            "the model was not evaluated, because its training was already complete; "
            f"to evaluate it, with the same data: --do_eval --model_name_or_path {final}, without --do_train",
            flush=True,
        )
    return job.finish(trainer, final, results)


def evaluate(trainer: Trainer, name: str, job: Job) -> dict[str, float]:
    """Return loss and perplexity of the validation text."""
    found = trainer.evaluate()
    loss, perplexity = found["eval_loss"], found["eval_perplexity"]
    if job.processes.first:
        print(f"evaluated {name}: loss {loss:.4f}, perplexity {perplexity:.3f}", flush=True)
    return {"eval_loss": loss, "perplexity": perplexity}


if __name__ == "__main__":
    with start("clm") as job:
        code = main(sys.argv[1:], job)
    end_process(code)
