"""Arguments that every training has, and defaults that fit the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training import deepspeed as deepspeed_config
from training import micro_batch
from training import run as run_folder
from training.batch import Batch, plan
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings, parse

if TYPE_CHECKING:
    from transformers import HfArgumentParser

TINY_MODEL = "tiny-llama"  # made from a config
PYTHON_DOCS = "python-docs"  # made from the running Python's own documentation
# What both trainings' demos have: minutes on a laptop.
DEMO = {
    "per_device_train_batch_size": 2,
    "max_steps": 100,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "logging_steps": 1,
    "deepspeed": "zero2",
}


@dataclass
class OurArguments:
    """Arguments that neither transformers nor TRL has."""

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Sequences per optimizer step over all processes; gradient accumulation follows from it."},
    )
    micro_batch: str | None = field(
        default=None,
        metadata={
            "help": "Sequences of one process in one forward pass: a number, or `auto`: the largest "
            "that fits, found by trying before the training starts."
        },
    )
    vocabulary_size: int = field(default=8192, metadata={"help": f"Tokens of the tokenizer made for {TINY_MODEL}."})
    variables: list[str] = field(
        default_factory=list,
        metadata={"help": "VARIABLE=argument ...: where the environment variable is set, it is the argument's value."},
    )
    peak_flops: float | None = field(
        default=None,
        metadata={"help": "What one process could compute in a second, for MFU; by default that of its GPU, by name."},
    )


def read(script: str, types: Sequence[type], argv: Sequence[str]) -> Settings:
    """Return the settings of a command line whose arguments are the fields of `types`, by their own names.

    What a variable of `--variables` says comes last, so that `sbatch --export` has the last word.
    """
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool

    parser = HfArgumentParser(tuple(types), prog=f"{script}.py", allow_abbrev=False)
    for action in parser._actions:
        if action.type is string_to_bool and action.nargs is None:  # `--bf16` alone means true, as other switches do
            action.nargs, action.const = "?", True
    _take_newer_name(parser)
    settings = parse(parser, argv)
    values = from_variables(settings["variables"], os.environ)
    if values:
        settings = parse(parser, [*argv, *(f"--{name}={value}" for name, (_, value) in values.items())])
        settings.sources.update({name: f"variable {variable}" for name, (variable, _) in values.items()})
    settings.script, settings.words = script, tuple(argv)
    return settings


def _take_newer_name(parser: HfArgumentParser) -> None:
    """Let a job file say `activation_checkpointing`, which is gradient_checkpointing before transformers 5.23."""
    known = parser._option_string_actions
    older, newer = "--gradient_checkpointing", "--activation_checkpointing"
    if older in known and newer not in known:
        known[newer] = known[older]
        known[older].option_strings.append(newer)


def from_variables(pairs: Sequence[str], environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return variable and value by argument, of each `VARIABLE=argument` whose variable is set and not empty."""
    for pair in pairs:
        if not re.fullmatch(r"\w+=\w+", pair):
            raise JobError(f"--variables: cannot read {pair!r}", "each is VARIABLE=argument", "EPOCHS=num_train_epochs")
    split = (pair.partition("=") for pair in pairs)
    return {name: (variable, environment[variable]) for variable, _, name in split if environment.get(variable)}


def fit_machine(settings: Settings, run: RunFolder) -> None:
    """Set what follows from the machine and the run folder, where the user has not said it."""
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


def plan_batch(settings: Settings, peers: Processes, length: int | None) -> Batch:
    """Return the batch of a step; where the global one is given, the accumulation follows from it."""
    if settings["global_batch_size"] is not None and settings.given("gradient_accumulation_steps"):
        raise JobError(
            "--global_batch_size and --gradient_accumulation_steps are both given",
            "the second follows from the first",
            "drop one",
        )
    micro_batch.settle(settings, _run(settings), peers, length)
    wanted = settings["global_batch_size"]
    micro, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    batch = plan(micro, accumulation, peers.world_size, length, wanted)
    if wanted is not None:
        settings.derive("gradient_accumulation_steps", batch.accumulation, "from global_batch_size")
    return batch


def plan_deepspeed(settings: Settings, batch: Batch) -> None:
    """Put the path of the checked configuration in the place of a preset's name; `none` turns DeepSpeed off."""
    for line in deepspeed_config.settle(settings, batch, _run(settings)):
        if os.environ.get("RANK", "0") == "0":
            print(f"note: {line}", flush=True)


def _run(settings: Settings) -> RunFolder:
    return run_folder.from_environment(os.environ, settings.script)
