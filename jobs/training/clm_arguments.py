"""The arguments of clm: those of transformers' run_clm and run_clm_no_trainer by their own names, and a few more.

Source of the names: transformers 5.23, examples/pytorch/language-modeling/run_clm.py and run_clm_no_trainer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import arguments, clm_models, deepspeed, models
from training.arguments import JobArguments
from training.errors import JobError
from training.settings import Settings
from training.text import named
from training.token_cache import documents

if TYPE_CHECKING:
    from training.job import Job

LONGEST_BY_DEFAULT = 1024


def described(text: str, default: Any = None, **more: Any) -> Any:
    """Return a field with its line of help."""
    return field(default=default, metadata={"help": text, **more})


@dataclass
class ModelArguments:
    model_name_or_path: str | None = described("Weights to continue from: a name or a folder.")
    model_type: str | None = described("For training from scratch: the type of model, for example gpt2 or llama.")
    config_overrides: str | None = described(
        "For training from scratch: values that replace defaults of the model type: n_embd=1024,n_head=16 ..."
    )
    config_name: str | None = described("For training from scratch: the name or folder of a configuration.")
    tokenizer_name: str | None = described("A name or folder; default: the model's own.")
    cache_dir: str | None = described("Where downloads are kept; default: HF_HOME.")
    use_fast_tokenizer: bool = described(
        "Use the tokenizer written in Rust. No effect with transformers 5, which has no other.", True
    )
    model_revision: str = described("Branch, tag or commit of the model.", "main")
    token: str | None = described("Access token for the hub; default: HF_TOKEN, or the token of `hf auth login`.")
    trust_remote_code: bool = described("Run the model's own Python code.", False)
    dtype: str | None = described(
        "Type of the weights.", aliases=["--torch_dtype"], choices=["auto", "bfloat16", "float16", "float32"]
    )
    low_cpu_mem_usage: bool = described("Has no effect: transformers now always loads models this way.", False)
    attn_implementation: str | None = described("eager, sdpa, flash_attention_2, flash_attention_3, flex_attention ...")


@dataclass
class DataArguments:
    dataset_name: str | None = described("A dataset on the hub, or a folder written by save_to_disk.")
    dataset_config_name: str | None = described("The configuration of the dataset.", aliases=["--dataset_config"])
    train_file: str | None = described("Text, JSONL, Parquet or CSV; `*` matches several files.")
    validation_file: str | None = described("Text, JSONL, Parquet or CSV for --do_eval.")
    text_column: str | None = described("The column to train on; default: `text`, or the only column.")
    validation_split_percentage: float = described(
        "Percentage of the training data to hold out if there is no validation data.", 5
    )
    data_percentage: float = described("Percentage of the training documents to use, starting with the first.", 100)
    max_train_samples: int | None = described("Train on the first N blocks only.")
    max_eval_samples: int | None = described("Evaluate on the first N blocks only.")
    streaming: bool = described("Read the data while training; needs --max_steps.", False)
    block_size: int | None = described("Tokens per sequence; default: the model's maximum, but at most 1024.")
    append_eos: bool = described("Put the end token after each document.", False)
    keep_linebreaks: bool = described("Keep the line breaks of text files.", True)
    overwrite_cache: bool = described("Tokenize again, even if the cache contains the tokens.", False)
    preprocessing_num_workers: int | None = described("Number of processes that tokenize.")


@dataclass
class NoTrainerArguments:
    """Arguments of run_clm_no_trainer that have another name in TrainingArguments."""

    max_train_steps: int | None = described("The same as --max_steps.")
    num_warmup_steps: int | None = described("The same as --warmup_steps.")
    checkpointing_steps: str | None = described("A number: the same as --save_steps; `epoch`: --save_strategy epoch.")
    with_tracking: bool = described("The same as --report_to all, unless --report_to is given.", False)
    use_slow_tokenizer: bool = described("The same as --no_use_fast_tokenizer.", False)


@dataclass
class OverwriteArgument:
    """Removed from TrainingArguments by transformers 5, but still in people's scripts."""

    overwrite_output_dir: bool = described(
        "Start from the beginning despite checkpoints; later attempts of the run resume.", False
    )


def types() -> tuple[type, ...]:
    """Return the dataclasses whose fields are the arguments."""
    from transformers import TrainingArguments

    ours: tuple[type, ...] = (TrainingArguments, ModelArguments, DataArguments, NoTrainerArguments, JobArguments)
    there = any(known.name == "overwrite_output_dir" for known in dataclasses.fields(TrainingArguments))
    return ours if there else (*ours, OverwriteArgument)


def read(argv: Sequence[str], job: Job) -> tuple[ModelArguments, DataArguments]:
    """Return all arguments but transformers'. Raises JobError for what can be known before a process group exists."""
    settings = arguments.read(types(), argv, job)
    _rename(settings)
    arguments.fit_machine(settings, job)
    settings.default({"logging_steps": 10, "remove_unused_columns": False}, "script")
    _choose_work(settings, job)
    _refuse_contradictions(settings)
    _choose_block_size(settings)
    arguments.plan_step(settings, job, settings["block_size"])
    _choose_precision(settings)
    return settings.build(ModelArguments), settings.build(DataArguments)


def _rename(settings: Settings) -> None:
    """Set the arguments of the trainer from those of run_clm_no_trainer. Raises JobError if both names are given."""
    saves = settings["checkpointing_steps"]
    for old, new, value in (
        ("max_train_steps", "max_steps", settings["max_train_steps"]),
        ("num_warmup_steps", "warmup_steps", settings["num_warmup_steps"]),
        ("use_slow_tokenizer", "use_fast_tokenizer", not settings["use_slow_tokenizer"]),
        ("checkpointing_steps", "save_strategy", "epoch" if saves == "epoch" else "steps"),
        ("checkpointing_steps", "save_steps", int(saves) if str(saves).isdigit() else None),
        ("with_tracking", "report_to", ["all"] if settings["with_tracking"] else None),
    ):
        if not settings.given(old) or value is None or (old == "with_tracking" and settings.given(new)):
            continue
        if settings.given(new):
            why = "both are names of the same setting"
            raise JobError(f"--{old} and --{new} are both given", why, f"remove --{old}")
        settings.derive(new, value, settings.sources[old])
    if saves is not None and saves != "epoch" and not saves.isdigit():
        why = "it must be a number of steps, or `epoch`"
        raise JobError(f"--checkpointing_steps cannot be {saves!r}", why, "--checkpointing_steps epoch")


def _choose_work(settings: Settings, job: Job) -> None:
    evaluates = str(getattr(settings["eval_strategy"], "value", settings["eval_strategy"])) != "no"
    if evaluates:
        settings.default({"do_eval": True}, "from eval_strategy")
    if not settings["do_train"] and (evaluates or not settings["do_eval"]):
        settings.default({"do_train": True}, "script: --do_eval is not set")
    overwrite = settings.get("overwrite_output_dir") and not settings["resume_from_checkpoint"]
    if not settings["do_train"]:
        settings.derive("resume_from_checkpoint", "false", "script: nothing is trained")
    elif overwrite:  # a later attempt resumes what the first has saved: resume.began_at
        settings.derive("resume_from_checkpoint", "false", "from overwrite_output_dir")


def _choose_block_size(settings: Settings) -> None:
    shape = clm_models.configuration(settings.build(ModelArguments))
    positions = models.positions_of(shape)
    if settings["block_size"] is None:
        longest = min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
        settings.derive(
            "block_size",
            longest,
            f"script: {f'the model has {positions} positions' if positions else 'the model has no maximum length'}",
        )
    models.check_length("--block_size", settings["block_size"], shape, models.name_of(shape))


def _choose_precision(settings: Settings) -> None:
    """Compute in bf16 if the GPU has it and nothing else is asked for; keep weights that are updated in fp32."""
    import torch

    path = settings["deepspeed"]
    if path and not settings["do_train"] and deepspeed.stage(deepspeed.read(Path(path))) != 3:
        settings.derive("deepspeed", None, "script: nothing is trained, and only ZeRO-3 helps to evaluate")
    chosen = settings.given("bf16") or settings["fp16"] or settings["dtype"] in ("float16", "float32")
    if not chosen and torch.cuda.is_available() and arguments.has_bf16():
        settings.default({"bf16": True}, "script: this GPU supports bf16")
    if settings["dtype"] is None:
        copies = settings["deepspeed"] and (settings["bf16"] or settings["fp16"])
        if settings["model_name_or_path"] and (copies or not settings["do_train"]):
            settings.derive("dtype", "auto", "script: DeepSpeed keeps fp32 copies" if copies else "script: as saved")
        else:
            settings.derive("dtype", "float32", "script: weights that are updated")


def _refuse_contradictions(settings: Settings) -> None:
    """Raise JobError for the first arguments that contradict each other."""
    model, data = settings.build(ModelArguments), settings.build(DataArguments)
    name, scratch = model.model_name_or_path, model.config_name or model.model_type
    files = [file for file in (data.train_file, data.validation_file) if file]
    for found, what, why, fix in (
        (not name and not scratch, "no model is given", "the script has no model to train",
         "--model_name_or_path NAME|FOLDER, or from scratch: --model_type gpt2 or --config_name NAME"),
        (name and model.config_overrides, "--config_overrides and --model_name_or_path are both given",
         "the shape of existing weights cannot change",
         "remove one of the two, or train from scratch: --model_type or --config_name"),
        (name and model.model_type, "--model_type and --model_name_or_path are both given",
         "--model_type trains from scratch, --model_name_or_path continues from weights", "remove one of the two"),
        (model.config_name and model.model_type, "--model_type and --config_name are both given",
         "both set the type of model", "remove one of the two"),
        (not name and not model.tokenizer_name, "no tokenizer is given", "a model from scratch has no tokenizer",
         "--tokenizer_name NAME|FOLDER"),
        (not data.dataset_name and not files, "no data is given", f"only the model {name or scratch!r} is given",
         "--train_file FILE, or --dataset_name NAME|FOLDER"),
        (data.dataset_name and files, "--dataset_name and a file are both given",
         "the text can come from only one of the two", "remove one of the two"),
        (settings["do_train"] and not data.dataset_name and not data.train_file, "there is no text to train on",
         "only --validation_file is given", "--train_file FILE, or --do_eval alone"),
        (data.streaming and settings["do_train"] and settings["max_steps"] <= 0, "--streaming needs --max_steps",
         "the script cannot know the length of a stream", "add --max_steps N, or remove --streaming"),
        (data.streaming and data.data_percentage < 100, "--streaming and --data_percentage are both given",
         "the script cannot know the length of a stream", "remove --data_percentage, and limit --max_steps"),
    ):  # fmt: skip
        if found:
            raise JobError(what, why, fix)
    for file in files:
        _check_file(file)
    for key, low, high in (
        ("validation_split_percentage", 0.01, 99.99),
        ("data_percentage", 0.01, 100),
        ("block_size", 2, None),
        ("max_train_samples", 1, None),
        ("max_eval_samples", 1, None),
        ("preprocessing_num_workers", 0, None),
    ):
        if settings[key] is not None and (settings[key] < low or (high and settings[key] > high)):
            limits = f"it must be from {low:g} to {high:g}" if high else f"it must be {low} or more"
            raise JobError(
                f"--{key} cannot be {settings[key]:g}", limits, f"--{key} {1024 if key == 'block_size' else 10}"
            )


def _check_file(name: str) -> None:
    found = named(name)
    if not found or not found[0].exists():
        what = f"no file matches {name!r}" if "*" in name else f"there is no file {name!r}"
        raise JobError(what, "the file must be visible in the container", "check the name, and mount the file's folder")
    for path in found:
        documents.kind_of(path)
