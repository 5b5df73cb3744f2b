"""The arguments of `sft`: TRL's own names, a few of ours, and defaults that fit the machine or the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.batch import batches
from training.batch.batches import Batch
from training.errors import JobError
from training.processes import Processes
from training.run_folder import RunFolder
from training.settings import Settings, parse
from training.zero import deepspeed_config

TINY_MODEL = "tiny-llama"  # made from a config
PYTHON_DOCS = "python-docs"  # made from the running Python's own documentation
LOSS_PATHS = ("auto", "plain", "trl")


@dataclass
class OurArguments:
    """Arguments that TRL does not have."""

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Sequences per optimizer step over all processes; gradient accumulation follows from it."},
    )
    vocabulary_size: int = field(default=8192, metadata={"help": f"Tokens of the tokenizer made for {TINY_MODEL}."})
    loss_path: str = field(
        default="auto",
        metadata={
            "help": "plain: the model's own loss; trl: TRL's chunked one, with entropy and accuracy, which needs less "
            "memory with a large vocabulary; auto: plain while the logits are small.",
            "choices": list(LOSS_PATHS),
        },
    )


DEMO = {
    "max_length": 128,
    "packing": True,
    "packing_strategy": "wrapped",
    "per_device_train_batch_size": 2,
    "max_steps": 100,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "logging_steps": 1,
    "deepspeed": "zero2",
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}


def read(argv: Sequence[str], run: RunFolder, peers: Processes) -> tuple[Settings, Batch]:
    """Return the settings and the batch. Raises JobError for what can be known before any process group exists."""
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool
    from trl import ModelConfig, ScriptArguments, SFTConfig

    types = (ScriptArguments, SFTConfig, ModelConfig, OurArguments)
    parser = HfArgumentParser(types, prog="sft.py", allow_abbrev=False)
    for action in parser._actions:
        if action.type is string_to_bool and action.nargs is None:  # `--bf16` alone means true, as other switches do
            action.nargs, action.const = "?", True
    settings = parse(parser, argv)
    _fit_machine(settings, run)
    _choose_model_and_data(settings)
    batch = _batch(settings, peers)
    _deepspeed(settings, batch)
    return settings, batch


def _fit_machine(settings: Settings, run: RunFolder) -> None:
    import torch

    cuda = torch.cuda.is_available()
    if cuda and settings.get("bf16") is not False and not settings.get("fp16") and not torch.cuda.is_bf16_supported():
        if settings.given("bf16"):
            raise JobError("this GPU has no bf16", torch.cuda.get_device_name(), "--fp16 true --bf16 false")
        settings.default({"bf16": False, "fp16": True}, "script: this GPU has no bf16")
    if not cuda:
        settings.default({"use_cpu": True, "dataloader_pin_memory": False}, "script: no GPU")
        settings.default({"bf16": False}, "script: no GPU, fp32 is as fast")
    settings.default({"output_dir": str(run.checkpoints)}, "RUNNER_RUN" if not run.by_hand else "script: run by hand")
    settings.default({"disable_tqdm": True, "report_to": ["none"]}, "script: plain lines and metrics.jsonl")


def _choose_model_and_data(settings: Settings) -> None:
    """Fill in the demo where nothing is named; refuse half of it, since a tiny model would be trained unasked."""
    model, dataset = settings.get("model_name_or_path"), settings.get("dataset_name")
    if not model and not dataset:
        settings.default({"model_name_or_path": TINY_MODEL, "dataset_name": PYTHON_DOCS, **DEMO}, "demo default")
    elif not dataset:
        raise JobError(
            "no dataset is named", f"the model is {model!r}", f"--dataset_name NAME|FOLDER|FILE, or {PYTHON_DOCS}"
        )
    elif not model:
        raise JobError(
            "no model is named", f"the dataset is {dataset!r}", f"--model_name_or_path NAME|FOLDER, or {TINY_MODEL}"
        )


def _batch(settings: Settings, peers: Processes) -> Batch:
    wanted = settings["global_batch_size"]
    if wanted is not None and settings.given("gradient_accumulation_steps"):
        raise JobError(
            "--global_batch_size and --gradient_accumulation_steps are both given",
            "the one follows from the other",
            "leave one out",
        )
    batch = batches.plan(
        settings["per_device_train_batch_size"],
        settings["gradient_accumulation_steps"],
        peers.world_size,
        settings["max_length"],
        wanted,
    )
    if wanted is not None:
        settings.derive("gradient_accumulation_steps", batch.accumulation, "from global_batch_size")
    return batch


def _deepspeed(settings: Settings, batch: Batch) -> None:
    """Put the path of the checked configuration in the place of a preset's name; `none` turns DeepSpeed off."""
    name = settings.get("deepspeed")
    if not name or str(name).lower() == "none":
        settings.derive("deepspeed", None, settings.sources.get("deepspeed", "library default"))
        return
    path = deepspeed_config.resolve(str(name))
    config = deepspeed_config.read(path)
    expected: dict[str, Any] = {
        "train_batch_size": batch.sequences,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": settings["max_grad_norm"],
    }
    deepspeed_config.batch_conflict(path, config, expected)
    source = settings.sources["deepspeed"]
    settings.derive("deepspeed", str(path), f"{source} {name!r}" if str(path) != name else source)
