"""Arguments that sft and clm share, and values that follow from the machine, the run folder and other arguments."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training import deepspeed
from training import settings as settings_module
from training.batch import Batch, plan
from training.errors import JobError
from training.records import headers
from training.run import probing
from training.settings import Settings

if TYPE_CHECKING:
    from training.job import Job

# Arguments that choose a model or data, or a config that may do so: with one of them, it is not the demo.
CHOICES = frozenset(
    ("model_name_or_path", "model_type", "config_name", "dataset_name", "train_file", "validation_file", "config")
)
MANY_CORES = 4  # with this many cores per process, some are free to load data


@dataclass
class JobArguments:
    """Arguments that neither transformers nor TRL has."""

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Sequences per optimizer step over all processes; sets the gradient accumulation steps."},
    )
    micro_batch: str | None = field(
        default=None,
        metadata={
            "help": "Sequences per process and forward pass: a number, or `auto` for the largest number that fits "
            "into memory, which a search finds before the training starts."
        },
    )
    variables: list[str] = field(
        default_factory=list,
        metadata={"help": "VARIABLE=argument ...: if this environment variable is set, the argument gets its value."},
    )
    peak_flops: float | None = field(
        default=None,
        metadata={"help": "Peak FLOP/s of one process, for computing MFU; default: looked up by the GPU's name."},
    )
    verify_checkpoint: bool = field(
        default=False,
        metadata={"help": "Before resuming, read every file of the checkpoint and compare its hash."},
    )
    allow_old_torch_load: bool = field(
        default=False,
        metadata={
            "help": "Allow resuming with torch older than 2.6, whose loader can run code from a crafted file. Use this "
            "only if you trust everybody who can write to the run folder."
        },
    )


def or_demo(argv: Sequence[str], job: Job) -> list[str]:
    """Return the arguments; if they choose neither a model nor data, with the demo's `--config` in front of them.

    A variable of `--variables` chooses as well.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--variables", nargs="*", default=[])
    found, _ = before.parse_known_args(argv)
    names = {word.split("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("-")}
    names.update(settings_module.from_variables(found.variables, os.environ))
    if names & CHOICES or names & {"h", "help"}:
        return list(argv)
    from training import demo

    return ["--config", str(demo.config(job)), *argv]


def read(types: Sequence[type], argv: Sequence[str], job: Job) -> Settings:
    """Return the settings of a command line whose arguments are the fields of `types`. They are also the job's.

    Raises JobError for a word or a value that is not valid.
    """
    job.settings = settings_module.read(job.script, types, argv)
    job.options = job.settings.build(JobArguments)
    return job.settings


def has_bf16() -> bool:
    """Whether the GPU itself computes in bf16. torch.cuda.is_bf16_supported() also counts emulation, as on a V100."""
    import torch

    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)


def fit_machine(settings: Settings, job: Job) -> None:
    """Set what follows from the machine and the run folder, unless the user has set it."""
    import torch

    deepspeed.take_arguments(settings)
    run, cuda = job.run, torch.cuda.is_available()
    if cuda and settings.get("bf16") is not False and not settings.get("fp16") and not has_bf16():
        if settings.given("bf16"):
            file = settings.sources["bf16"].startswith("DeepSpeed file")
            fix = 'write "auto" for bf16.enabled in the DeepSpeed file' if file else "--fp16 true --bf16 false"
            raise JobError("this GPU does not support bf16", torch.cuda.get_device_name(), fix)
        settings.default({"bf16": False, "fp16": True}, "script: the GPU does not support bf16")
    if not cuda:
        settings.default({"use_cpu": True, "dataloader_pin_memory": False}, "script: no GPU")
        settings.default({"bf16": False}, "script: no GPU, and fp32 is as fast on CPUs")
    settings.default({"output_dir": str(run.checkpoints)}, "RUNNER_RUN" if not run.by_hand else "script: run by hand")
    settings.default({"disable_tqdm": True, "report_to": ["none"]}, "script: plain lines and metrics.jsonl")
    if str(getattr(settings.get("optim"), "value", settings.get("optim"))) == "adamw_torch":
        settings.default({"optim": "adamw_torch_fused"}, "script: computes the same update in one kernel")
    if cuda and len(os.sched_getaffinity(0)) // job.processes.local_world_size >= MANY_CORES:
        settings.default({"dataloader_num_workers": 2}, "script: there are spare CPU cores")
    if os.environ.get("RUNNER_SAVE_EVERY"):
        settings.default({"save_total_limit": 2}, "script: save_every writes many checkpoints")
        if not settings.given("save_steps") and not settings.get("load_best_model_at_end"):
            settings.default({"save_strategy": "no"}, "script: save_every decides when to save")
    _prepare_trackers(settings, job)


def choose_attention(settings: Settings) -> None:
    """Take flash-attention for rows with several documents, where torch's sdpa pays for tokens x tokens."""
    import torch

    several = not (settings.get("packing") and settings.get("packing_strategy") == "wrapped")
    half, cuda = settings.get("bf16") or settings.get("fp16"), torch.cuda.is_available()
    wanted = several and half and settings.get("attn_implementation") is None and importlib.util.find_spec("flash_attn")
    if wanted and cuda and torch.cuda.get_device_capability() >= (8, 0):
        settings.default({"attn_implementation": "flash_attention_2"}, "script: flash_attn is installed")
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
    if several and settings.get("packing") and old and "flash" not in str(settings.get("attn_implementation")):
        raise JobError(
            f"--packing_strategy {settings['packing_strategy']} cannot be used with torch {torch.__version__}",
            "without flash-attention, torch before 2.6 lets documents in the same row attend to each other",
            "--packing_strategy wrapped, or --attn_implementation flash_attention_2 on a GPU",
        )


def plan_step(settings: Settings, job: Job, length: int | None) -> None:
    """Set what makes a step: the batch of the job, and DeepSpeed's configuration, which has to agree with it.

    length   tokens of a sequence at most; None: unknown
    """
    job.batch = plan_batch(settings, job, length)
    for line in deepspeed.settle(settings, job.batch, job.run):
        if job.processes.first:
            print(f"note: {line}", flush=True)


def plan_batch(settings: Settings, job: Job, length: int | None) -> Batch:
    """Return the batch of a step. With a global batch size, gradient accumulation follows from it."""
    both = settings["global_batch_size"] is not None and settings.given("gradient_accumulation_steps")
    if both and not settings.overrides("global_batch_size", "gradient_accumulation_steps"):
        raise JobError(
            "--global_batch_size and --gradient_accumulation_steps are both given",
            "gradient accumulation is computed from the global batch size",
            "remove one of them",
        )
    world_size = job.processes.world_size
    # an attempt on fewer nodes (min_nodes) runs, with another batch if need be, and so does one that continues it
    resized = int(os.environ.get("RUNNER_NODES") or 1) < int(os.environ.get("RUNNER_REQUESTED_NODES") or 1)
    if settings["global_batch_size"] is not None and not resized and job.run.attempt_number > 1:
        # only where it matters: the metrics of a long run are large
        before = {each.get("processes", world_size) for each in headers(job.run.metrics)}
        resized = before not in (set(), {world_size})
    if settings["micro_batch"] is not None or probing():
        from training import micro_batch

        micro_batch.settle(settings, job.run, job.processes, length, resized)
    wanted = settings["global_batch_size"]
    micro, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    batch = plan(micro, accumulation, world_size, length, wanted, nearest=resized)
    if wanted not in (None, batch.sequences) and job.processes.first:
        print(
            f"warning: a step has {batch.sequences} sequences, because --global_batch_size {wanted} is not a multiple"
            f" of {micro} per process x {world_size} processes",
            flush=True,
        )
    if wanted is not None:
        settings.derive("gradient_accumulation_steps", batch.accumulation, "from global_batch_size")
    return batch


def _prepare_trackers(settings: Settings, job: Job) -> None:
    """Let all attempts write to one W&B run and one TensorBoard folder."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.run.path / "tensorboard"))
    if "wandb" in str(settings.get("report_to")).lower():
        os.environ.setdefault("WANDB_RUN_ID", job.run.path.name)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_DIR", str(job.run.path))
        settings.default({"run_name": job.run.path.name}, "RUNNER_RUN")
