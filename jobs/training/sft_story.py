"""Supervised fine-tuning: what TRL's trainer is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from training import dataset as reading
from training import files
from training import models as loading
from training import rows as rows_module
from training import sft_arguments as arguments
from training.choices.choices import Choice
from training.course import Course
from training.course_arguments import PYTHON_DOCS, TINY_MODEL
from training.errors import JobError
from training.processes import Processes, once
from training.run import RunFolder


def train(argv: Sequence[str], run: RunFolder, peers: Processes) -> int:
    """Return 0 when the training is done, 75 when it was asked to save and leave before its end."""
    started = time.monotonic()
    settings, batch = arguments.read(argv, run, peers)
    from trl import SFTConfig

    return Course(SFTConfig, settings, batch, run, peers, started).train(_trainer)


def _trainer(course: Course) -> Any:
    from transformers import set_seed
    from trl import ModelConfig, get_peft_config, get_quantization_config

    from training.sft_trainer import CountingTrainer

    settings, config, batch = course.settings, course.config, course.batch
    rows, held_out, model, tokenizer = _model_and_data(course)
    model_arguments = settings.build(ModelConfig)
    adapter = get_peft_config(model_arguments)
    if adapter is not None and not isinstance(model, str):
        model = _keep_base(model, tokenizer, course)
    set_seed(config.seed)  # an adapter begins with random weights, and TRL seeds them from version 1 on only
    trainer = refused_by_trl(
        CountingTrainer,
        model=model,
        args=config,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=course.callbacks(),
        counter=course.counter,
        wanted_loss=settings["loss_path"],
        tokens=batch.micro * batch.length if batch.length else None,
        **_quantization(get_quantization_config(model_arguments)),
    )
    rows_module.check_prepared(trainer, trainer.model, settings["dataset_name"])
    course.choices.append(Choice("loss", trainer.path.name, trainer.path.why))
    return trainer


def refused_by_trl(make: Callable[..., Any], **arguments: Any) -> Any:
    """Return what `make` gives; what TRL or a chat template refuses is the user's to mend, in their own words."""
    from jinja2 import TemplateError

    try:
        return make(**arguments)
    except (ValueError, TemplateError) as error:
        raise JobError(
            "TRL refuses these arguments with this data and model"
            if isinstance(error, ValueError)
            else "the chat template refuses a conversation of the dataset",
            " ".join(str(error).split()) or type(error).__name__,
            "change the argument that is named, or the rows that the template does not take",
        ) from error


def _keep_base(model: Any, tokenizer: Any, course: Course) -> str:
    """Return the folder of the demo's model: an adapter is worth nothing without the weights that it was trained on."""
    folder = course.run.path / "base"

    def save() -> None:
        if not folder.is_dir():
            with files.whole_folder(folder) as partial:
                model.save_pretrained(str(partial))
                tokenizer.save_pretrained(str(partial))

    once(course.peers, save)
    return str(folder)


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
    rows_module.check(rows, dataset, bool(settings.get("assistant_only_loss")))
    if name == TINY_MODEL:
        folder = docs_folder or reading.python_docs(run.cache, peers)[1]
        tokenizer = loading.demo_tokenizer(folder, settings["vocabulary_size"], run, peers)
        return rows, held_out, loading.tiny_llama(tokenizer, config.max_length or 512, config.seed), tokenizer
    tokenizer = loading.load_tokenizer(name, settings, kind)
    loading.prepare_loading(name, settings, config)
    return rows, held_out, name, tokenizer
