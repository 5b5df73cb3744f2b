"""The arguments of `clm`: those of transformers' run_clm by their own names, a few of ours, and the demo's values.

Source of the names: transformers 5.23, examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training import clm_contradictions as contradictions
from training import clm_model as model
from training import course_arguments
from training.batch import Batch
from training.course_arguments import PYTHON_DOCS, TINY_MODEL
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings


def said(text: str, default: Any = None, **more: Any) -> Any:
    """Return a field with its line of help."""
    return field(default=default, metadata={"help": text, **more})


@dataclass
class ModelArguments:
    model_name_or_path: str | None = said(f"Weights to continue from: a name, a folder, or {TINY_MODEL}.")
    model_type: str | None = said("From scratch: the kind of model, e.g. gpt2, llama.")
    config_overrides: str | None = said("From scratch: n_embd=1024,n_head=16,... over the defaults.")
    config_name: str | None = said("From scratch: the name or folder of a configuration.")
    tokenizer_name: str | None = said(f"A name or folder; {TINY_MODEL}: the one made on the spot.")
    cache_dir: str | None = said("Where downloads are kept; default: HF_HOME.")
    use_fast_tokenizer: bool = said("The tokenizer written in Rust.", True)
    model_revision: str = said("Branch, tag or commit of the model.", "main")
    token: str | None = said("Access token of the hub; default: HF_TOKEN or what `hf auth login` has kept.")
    trust_remote_code: bool = said("Run the model's own Python code.", False)
    dtype: str | None = said(
        "Type of the weights.", aliases=["--torch_dtype"], choices=["auto", "bfloat16", "float16", "float32"]
    )
    low_cpu_mem_usage: bool = said("Load without a second copy in memory; always so from transformers 5 on.", False)
    attn_implementation: str | None = said("eager, sdpa, flash_attention_2, flash_attention_3, flex_attention ...")


@dataclass
class DataArguments:
    dataset_name: str | None = said(f"A dataset of the hub, a folder of save_to_disk, or {PYTHON_DOCS}.")
    dataset_config_name: str | None = said("Which configuration of the dataset.", aliases=["--dataset_config"])
    train_file: str | None = said("Text, JSONL, Parquet or CSV; `*` stands for several files.")
    validation_file: str | None = said("The same, for --do_eval.")
    text_column: str | None = said("The column to train on; default: text, or the only one.")
    validation_split_percentage: float = said("Held out of the training data where there is nothing else.", 5)
    data_percentage: float = said("The share of the training documents that is used, from the first on.", 100)
    max_train_samples: int | None = said("Train on the first N blocks only.")
    max_eval_samples: int | None = said("Evaluate on the first N blocks only.")
    streaming: bool = said("Read while training; wants --max_steps.", False)
    block_size: int | None = said("Tokens per sequence; default: what the model takes, at most 1024.")
    append_eos: bool = said("Put the end token behind each document.", False)
    keep_linebreaks: bool = said("Keep the line breaks of text files.", True)
    overwrite_cache: bool = said("Tokenize again.", False)
    preprocessing_num_workers: int | None = said("Processes that tokenize.")


@dataclass
class OurArguments(course_arguments.OurArguments):
    """Arguments that run_clm does not have."""

    loss_path: str = said(
        "plain: the model makes all logits at once; auto: head and loss in pieces where the model's head allows it.",
        "auto",
        choices=["auto", "plain"],
    )


@dataclass
class OverwriteArgument:
    """Taken out of TrainingArguments by transformers 5; people have it in their scripts."""

    overwrite_output_dir: bool = said("Begin anew where checkpoints are; a later attempt of the run resumes.", False)


DATA = ("dataset_name", "train_file", "validation_file")
DEMO = {**course_arguments.DEMO, "append_eos": True, "block_size": 128}


def read(argv: Sequence[str], run: RunFolder, peers: Processes) -> tuple[Settings, Batch]:
    """Return the settings and the batch. Raises JobError for what can be known before any process group exists."""
    settings = course_arguments.read("clm", types(), argv)
    course_arguments.fit_machine(settings, run)
    settings.default({"logging_steps": 10, "remove_unused_columns": False}, "script")
    if not any(settings.get(name) for name in ("model_name_or_path", "model_type", "config_name", *DATA)):
        settings.default({"model_name_or_path": TINY_MODEL, "dataset_name": PYTHON_DOCS, **DEMO}, "demo default")
    _choose_work(settings, run)
    contradictions.refuse(settings)
    model.settle_block_size(settings)
    batch = course_arguments.plan_batch(settings, peers, settings["block_size"])
    course_arguments.plan_deepspeed(settings, batch)
    _choose_precision(settings)
    return settings, batch


def types() -> tuple[type, ...]:
    """Return the dataclasses whose fields are the arguments."""
    from transformers import TrainingArguments

    ours: tuple[type, ...] = (TrainingArguments, ModelArguments, DataArguments, OurArguments)
    there = any(known.name == "overwrite_output_dir" for known in dataclasses.fields(TrainingArguments))
    return ours if there else (*ours, OverwriteArgument)


def _choose_work(settings: Settings, run: RunFolder) -> None:
    evaluates = str(getattr(settings["eval_strategy"], "value", settings["eval_strategy"])) != "no"
    if evaluates:
        settings.default({"do_eval": True}, "from eval_strategy")
    if not settings["do_train"] and (evaluates or not settings["do_eval"]):
        settings.default({"do_train": True}, "script: nothing else is asked for")
    if not settings["do_train"]:
        settings.derive("resume_from_checkpoint", "false", "script: nothing is trained")
    # a later attempt goes on from what the first has saved
    elif settings.get("overwrite_output_dir") and not settings["resume_from_checkpoint"] and run.attempt_number == 1:
        settings.derive("resume_from_checkpoint", "false", "from overwrite_output_dir")


def _choose_precision(settings: Settings) -> None:
    """Compute in bf16 where the GPU has it and nothing else is asked for; keep the weights that are updated in fp32."""
    import torch

    from training import deepspeed as deepspeed_config

    path = settings["deepspeed"]
    config = deepspeed_config.read(Path(path)) if path else {}
    if path and not settings["do_train"] and deepspeed_config.stage(config) != 3:
        settings.derive("deepspeed", None, "script: nothing is trained, and only ZeRO-3 helps to evaluate")
    fixed = config.get("bf16", {}).get("enabled", "auto") != "auto" or config.get("fp16", {}).get("enabled") is True
    asked = settings.given("bf16") or settings["fp16"] or fixed or settings["dtype"] in ("float16", "float32")
    if not asked and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        settings.default({"bf16": True}, "script: this GPU has bf16")
    if settings["dtype"] is None:
        kept = settings["deepspeed"] and (settings["bf16"] or settings["fp16"] or fixed)
        if settings["model_name_or_path"] and (kept or not settings["do_train"]):
            settings.derive("dtype", "auto", "script: DeepSpeed keeps fp32 copies" if kept else "script: as saved")
        else:
            settings.derive("dtype", "float32", "script: weights that are updated")
