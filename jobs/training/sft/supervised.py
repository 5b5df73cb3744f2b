"""Supervised fine-tuning: what TRL's trainer is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from training.course import Course
from training.course_arguments import PYTHON_DOCS, TINY_MODEL
from training.data import reading
from training.models import loading
from training.processes import Processes
from training.run_folder import RunFolder
from training.sft import arguments


def train(argv: Sequence[str], run: RunFolder, peers: Processes) -> int:
    """Return 0 when the training is done, 75 when it was asked to save and leave before its end."""
    started = time.monotonic()
    settings, batch = arguments.read(argv, run, peers)
    from trl import SFTConfig

    return Course(SFTConfig, settings, batch, run, peers, started).train(_trainer)


def _trainer(course: Course) -> Any:
    from trl import ModelConfig, get_peft_config, get_quantization_config

    from training.sft.trainer import CountingTrainer, choose_loss

    settings, config, batch = course.settings, course.config, course.batch
    rows, held_out, model, tokenizer = _model_and_data(course)
    model_arguments = settings.build(ModelConfig)
    tokens = batch.micro * batch.length if batch.length else None
    experts = bool(
        getattr(model, "num_experts", None) or getattr(getattr(model, "config", None), "num_local_experts", None)
    )
    plain, why = choose_loss(
        settings["loss_path"], tokens, len(tokenizer), getattr(config, "loss_type", "nll"), experts
    )
    if course.peers.first:
        print(f"loss: {'the model itself' if plain else 'TRL, in chunks'} ({why})", flush=True)
    return CountingTrainer(
        model=model,
        args=config,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_arguments),
        callbacks=course.callbacks(),
        counter=course.counter,
        plain_loss=plain,
        **_quantization(get_quantization_config(model_arguments)),
    )


def _quantization(config: Any) -> dict[str, Any]:
    """Return the argument only where it is used: older TRL does not know it."""
    return {"quantization_config": config} if config is not None else {}


def _model_and_data(course: Course) -> tuple[Any, Any, Any, Any]:
    """Return training rows, held-out rows or None, a model or its name, and the tokenizer."""
    settings, config, run, peers = course.settings, course.config, course.run, course.peers
    name, dataset = settings["model_name_or_path"], settings["dataset_name"]
    docs_folder = None
    if dataset == PYTHON_DOCS:
        rows, docs_folder = reading.python_docs(run.cache, peers)
        held_out = None
    else:
        load = (dataset, settings.get("dataset_config"))
        streaming = bool(settings.get("dataset_streaming"))
        rows = reading.load_on_all(peers, *load, settings["dataset_train_split"], streaming)
        evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
        split = settings["dataset_test_split"]
        held_out = reading.load_on_all(peers, *load, split, streaming) if evaluates else None
    kind = reading.check(rows, dataset, settings["dataset_text_field"])
    if name == TINY_MODEL:
        folder = docs_folder or reading.python_docs(run.cache, peers)[1]
        tokenizer = loading.demo_tokenizer(folder, settings["vocabulary_size"], run, peers)
        return rows, held_out, loading.tiny_llama(tokenizer, config.max_length or 512, config.seed), tokenizer
    tokenizer = loading.load_tokenizer(name, settings, kind)
    loading.prepare_loading(name, settings, config)
    return rows, held_out, name, tokenizer
