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
from typing import Any

from training import job as contract
from training.arguments import DEMO, PYTHON_DOCS, TINY_MODEL, JobArguments
from training.batch import Batch
from training.errors import JobError
from training.job import Job
from training.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Train. Return 0 when done, or 75 to ask for another attempt that resumes from the checkpoint."""
    with contract.start("sft") as job:
        return train(argv, job)


def train(argv: Sequence[str], job: Job) -> int:
    # Arguments. Making the SFTConfig starts the process group.
    settings, batch = read_arguments(argv, job)
    from trl import SFTConfig

    from training import probe, resume

    config = contract.configure(SFTConfig, settings, job)
    checkpoint = contract.find_checkpoint(settings, config, job)

    # Data, tokenizer, model, trainer
    trainer = make_trainer(settings, config, job)
    contract.attach(trainer, settings, batch, checkpoint, job)
    if probe.probing():  # a child of `--micro_batch auto`
        return probe.probe(trainer, config.max_length or 0)

    # Train, or leave the rest to the next attempt
    if not resume.is_finished(checkpoint, config):
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    if job.stop.reason:
        return contract.leave(trainer, job)

    # The final model
    final = contract.save_final(trainer, checkpoint, job)
    return contract.finish(trainer, settings, final, job)


def make_trainer(settings: Settings, config: Any, job: Job) -> Any:
    """Return TRL's SFTTrainer with the model, the rows and the callbacks that runner needs. Add your own here."""
    from trl import ModelConfig, get_peft_config, get_quantization_config

    from training import loss, models, rows

    name = settings["dataset_name"]
    train_rows, eval_rows = load_data(settings, config, job)
    model, tokenizer = load_model(settings, config, train_rows, job)
    model_config = settings.build(ModelConfig)
    adapter, quantization = get_peft_config(model_config), get_quantization_config(model_config)
    if adapter is not None and not isinstance(model, str):
        model = keep_base(model, tokenizer, job)
    with rows.explained(train_rows, name, settings):
        trainer = loss.Trainer(
            model=model,
            args=config,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=contract.callbacks(job),
            # older versions of TRL do not have this argument
            **({"quantization_config": quantization} if quantization else {}),
        )
    trainer.plain_loss = loss.is_plain(settings["loss_path"], trainer.model, config)
    if config.ddp_find_unused_parameters is None and not models.has_experts(trainer.model):
        # searching for them costs a traversal of the graph at every step
        trainer.args.ddp_find_unused_parameters = False
    cut = rows.check_prepared(trainer, name, len(train_rows) if hasattr(train_rows, "__len__") else None)
    if cut and job.processes.first:
        print(f"note: {cut}", flush=True)
    return trainer


@dataclass
class SftArguments(JobArguments):
    """Arguments that TRL does not have."""

    loss_path: str = field(
        default="auto",
        metadata={
            "help": "plain: the loss of transformers; trl: the loss of TRL, with entropy and accuracy of each batch; "
            "auto: plain on a CPU, where the loss of TRL is slow, and otherwise trl.",
            "choices": ["auto", "plain", "trl"],
        },
    )


SFT_DEMO = {
    **DEMO,
    "max_length": 128,
    "packing": True,
    "packing_strategy": "wrapped",
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}


def read_arguments(argv: Sequence[str], job: Job) -> tuple[Settings, Batch]:
    """Return settings and batch. Raises JobError for errors that can be found before a process group exists."""
    from trl import ModelConfig, ScriptArguments, SFTConfig

    from training import arguments
    from training import settings as settings_module

    settings = settings_module.read("sft", (ScriptArguments, SFTConfig, ModelConfig, SftArguments), argv)
    arguments.fit_machine(settings, job)
    model, dataset = settings.get("model_name_or_path"), settings.get("dataset_name")
    if not model and not dataset:
        settings.default({"model_name_or_path": TINY_MODEL, "dataset_name": PYTHON_DOCS, **SFT_DEMO}, "demo default")
    elif not dataset:
        fix = f"--dataset_name NAME|FOLDER|FILE, or --dataset_name {PYTHON_DOCS} for the demo dataset"
        raise JobError(
            "no dataset is given",
            f"the demo dataset is used only if no model is given, but the model {model} is given",
            fix,
        )
    elif not model:
        fix = f"--model_name_or_path NAME|FOLDER, or --model_name_or_path {TINY_MODEL} for the demo model"
        raise JobError(
            "no model is given",
            f"the demo model is used only if no dataset is given, but the dataset {dataset} is given",
            fix,
        )
    batch = arguments.plan_batch(settings, job, settings["max_length"])
    arguments.plan_deepspeed(settings, batch, job)
    arguments.choose_attention(settings)
    return settings, batch


def load_data(settings: Settings, config: Any, job: Job) -> tuple[Any, Any]:
    """Return the rows for training, and those for evaluation or None. The first rows are checked."""
    from training import dataset, demo, rows

    name = settings["dataset_name"]
    if name == PYTHON_DOCS:
        return demo.python_docs(job.run.cache, job.processes)[0], None
    train_rows = dataset.load_on_all(settings, settings["dataset_train_split"], job.processes)
    rows.check(train_rows, name, settings)
    evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
    split = settings["dataset_test_split"]
    return train_rows, dataset.load_on_all(settings, split, job.processes) if evaluates else None


def load_model(settings: Settings, config: Any, train_rows: Any, job: Job) -> tuple[Any, Any]:
    """Return the model, or its name if TRL is to load it, and the tokenizer."""
    from training import demo, models, rows

    name = settings["model_name_or_path"]
    if name == TINY_MODEL:
        tokenizer = demo.load_tokenizer(job.run.cache, settings["vocabulary_size"], job.processes)
        return demo.tiny_llama(tokenizer, config.max_length or 512, config.seed), tokenizer
    tokenizer = models.load_tokenizer(settings)
    kind = rows.kind_of(train_rows, settings["dataset_name"], settings["dataset_text_field"])
    models.check_tokenizer(tokenizer, settings, needs_template=kind == "messages")
    models.check_length("--max_length", config.max_length, models.configuration(settings), name)
    config.model_init_kwargs = {**models.loading_options(settings), **(config.model_init_kwargs or {})}
    return name, tokenizer


def keep_base(model: Any, tokenizer: Any, job: Job) -> str:
    """Save the demo's base model and return its folder, because an adapter is useless without its base model."""
    from training import files
    from training.processes import once

    folder = job.run.path / "base"

    def save() -> None:
        if not folder.is_dir():
            with files.whole_folder(folder) as partial:
                model.save_pretrained(str(partial))
                tokenizer.save_pretrained(str(partial))

    once(job.processes, save)
    return str(folder)


if __name__ == "__main__":
    contract.end_process(main(sys.argv[1:]))
