"""Supervised fine-tuning with TRL, on GPUs or CPU, with torchrun, srun, accelerate or no launcher.

    torchrun --nproc-per-node 2 jobs/sft.py                     the demo: a tiny Llama, a tokenizer made on the spot
    torchrun --nproc-per-node 4 jobs/sft.py --model_name_or_path meta-llama/Llama-3.1-8B \
        --dataset_name trl-lib/Capybara --deepspeed zero3 --global_batch_size 128 --packing

Arguments: those of TRL's SFTConfig, ScriptArguments and ModelConfig with the same names (also `--config FILE.yaml`),
and --global_batch_size, --micro_batch, --loss_path and more. `--deepspeed` is a preset (zero0 ... zero3) or a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training import arguments, dataset, models, resume, rows
from training.arguments import JobArguments
from training.errors import JobError
from training.job import Job, end_process, start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import ModelConfig, ScriptArguments, SFTConfig


def main(argv: Sequence[str], job: Job) -> int:
    """Train. Return 0 when done, or 75 to ask for another attempt that resumes from the checkpoint."""
    from trl import SFTConfig, get_peft_config, get_quantization_config

    from training.sft_trainer import SFTTrainer

    # Arguments. Making the SFTConfig starts the process group.
    script_args, model_args, sft_args = read_arguments(arguments.or_demo(argv, job), job)
    training_args = job.training_arguments(SFTConfig)
    training_args.model_init_kwargs = models.loading_options(model_args, training_args)
    checkpoint = job.find_checkpoint(training_args)

    # Data and tokenizer, checked before the model is loaded
    train_rows, eval_rows = load_rows(script_args, training_args, job)
    kind = rows.check(train_rows, script_args.dataset_name, training_args)
    tokenizer = load_tokenizer(model_args, training_args, kind)

    # Trainer, which loads the model. Add your own callbacks or data collator here.
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        callbacks=job.callbacks(),
        dataset_name=script_args.dataset_name,
        loss_path=sft_args.loss_path,
    )
    job.attach(trainer, checkpoint)

    # Train, or leave the rest to the next attempt
    if not resume.is_finished(checkpoint, training_args):
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    if job.stop.reason:
        return job.leave(trainer)

    # The final model
    return job.finish(trainer, job.save_final(trainer, checkpoint))


@dataclass
class SftArguments(JobArguments):
    """Arguments that TRL does not have."""

    loss_path: str = field(
        default="auto",
        metadata={
            "help": "plain: the loss of transformers; trl: the loss of TRL, with entropy and accuracy of each batch; "
            "auto: plain on a CPU if it is the same loss, because that of TRL is slow there, and otherwise trl.",
            "choices": ["auto", "plain", "trl"],
        },
    )


def read_arguments(argv: Sequence[str], job: Job) -> tuple[ScriptArguments, ModelConfig, SftArguments]:
    """Return all arguments but the SFTConfig, whose process group would hide the errors that are found here."""
    from trl import ModelConfig, ScriptArguments, SFTConfig

    settings = arguments.read((ScriptArguments, SFTConfig, ModelConfig, SftArguments), argv, job)
    arguments.fit_machine(settings, job)
    arguments.choose_attention(settings)
    script_args, model_args = settings.build(ScriptArguments), settings.build(ModelConfig)
    if not script_args.dataset_name:
        raise JobError("no dataset is given", "the script has no rows to train on", "--dataset_name NAME|FOLDER|FILE")
    if not model_args.model_name_or_path:
        raise JobError("no model is given", "the script has no model to train", "--model_name_or_path NAME|FOLDER")
    arguments.plan_step(settings, job, settings["max_length"])
    return script_args, model_args, settings.build(SftArguments)


def load_rows(script_args: ScriptArguments, training_args: SFTConfig, job: Job) -> tuple[Any, Any]:
    """Return the rows for training, and those for evaluation or None."""
    beat = job.heartbeat.beat
    train_rows = dataset.load_on_all(script_args, script_args.dataset_train_split, job.processes, beat)
    if training_args.eval_strategy == "no":
        return train_rows, None
    return train_rows, dataset.load_on_all(script_args, script_args.dataset_test_split, job.processes, beat)


def load_tokenizer(model_args: ModelConfig, training_args: SFTConfig, kind: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raises JobError if it cannot write rows of this kind, or not rows of this length."""
    name, options = model_args.model_name_or_path, models.hub_options(model_args, training_args)
    tokenizer = models.load_tokenizer(name, **options)
    models.check_tokenizer(tokenizer, name, training_args.chat_template_path, needs_template=kind == "messages")
    shape = models.configuration(name, **options)
    models.check_length("--max_length", training_args.max_length, shape, name)
    return tokenizer


if __name__ == "__main__":
    with start("sft") as job:
        code = main(sys.argv[1:], job)
    end_process(code)
