"""Supervised fine-tuning from the arguments to the final model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import files
from training import settings as settings_module
from training.batch.batches import Batch
from training.checkpoints import resume, stopping
from training.data import reading
from training.data import tokenizer as made_tokenizer
from training.errors import JobError
from training.measuring import loss_picture, metrics
from training.models import loading
from training.processes import Processes, barrier, once
from training.run_folder import RunFolder
from training.settings import Settings
from training.sft import arguments
from training.zero import deepspeed_config


def train(argv: Sequence[str], run: RunFolder, peers: Processes) -> int:
    """Return 0 when the training is done, 75 when it was asked to save and leave before its end."""
    started = time.monotonic()
    settings, batch = arguments.read(argv, run, peers)
    _quiet_libraries()
    if peers.first:
        print("settings (value, source)", *settings_module.show(settings, run.path / "settings.json"), sep="\n")
        print(f"batch: {batch}", flush=True)
    config = _training_config(settings)  # starts the process group
    checkpoint = _choose_checkpoint(settings, config, run, peers)
    trainer, stop = _trainer(settings, config, batch, run, peers)
    if peers.first:
        print(f"ready to train after {time.monotonic() - started:.1f} s", flush=True)
    ended = checkpoint if checkpoint and resume.at_the_end(checkpoint, config) else None
    if ended is None:
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    elif peers.first:
        print(f"step {ended.step} was the last one: nothing is left to train", flush=True)
    if stop.reason:
        return _leave(trainer, stop, run, peers)
    final = save_final(trainer, ended, Path(config.output_dir) / "final", peers)
    if peers.first:
        _finish(run, final, settings)
    barrier(peers)
    return 0


def _quiet_libraries() -> None:
    """Turn off bars that redraw themselves, and what the libraries say to each other on every rank."""
    import warnings

    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|transformers|accelerate")


def _training_config(settings: Settings) -> Any:
    from trl import SFTConfig

    try:
        config = settings.build(SFTConfig)
        if settings["deepspeed"]:
            from deepspeed.comm import init_distributed

            deepspeed_config.leave_out_what_is_not_built()
            # On the CPU accelerate has started torch's group only; ZeRO-3 asks DeepSpeed's for the world size.
            init_distributed(auto_mpi_discovery=False, verbose=False)
        return config
    except ValueError as error:
        raise JobError(
            "TRL refuses the arguments", " ".join(str(error).split()), "change the argument that is named"
        ) from error


def _choose_checkpoint(settings: Settings, config: Any, run: RunFolder, peers: Processes) -> resume.Checkpoint | None:
    """Return where to resume, the same on all ranks; say what was skipped and why."""
    wanted = settings.get("resume_from_checkpoint")
    config.resume_from_checkpoint = None
    folder = Path(config.output_dir)
    checkpoint, skipped = once(peers, lambda: resume.choose(folder, wanted, automatic=not run.by_hand))
    stage = (
        deepspeed_config.stage(deepspeed_config.read(Path(settings["deepspeed"]))) if settings["deepspeed"] else None
    )
    if checkpoint:
        resume.refuse_other_world_size(checkpoint, peers, stage)
    if peers.first:
        for line in skipped:
            print(line)
        if checkpoint:
            print(f"resuming from {checkpoint.path} (step {checkpoint.step})", flush=True)
    return checkpoint


def _trainer(
    settings: Settings, config: Any, batch: Batch, run: RunFolder, peers: Processes
) -> tuple[Any, stopping.SaveAndExit]:
    from transformers import PrinterCallback, ProgressCallback
    from trl import ModelConfig, get_peft_config, get_quantization_config

    from training.sft.trainer import CountingTrainer, choose_loss

    rows, held_out, model, tokenizer = _model_and_data(settings, config, run, peers)
    model_arguments = settings.build(ModelConfig)
    tokens = batch.micro * batch.length if batch.length else None
    experts = bool(
        getattr(model, "num_experts", None) or getattr(getattr(model, "config", None), "num_local_experts", None)
    )
    plain, why = choose_loss(
        settings["loss_path"], tokens, len(tokenizer), getattr(config, "loss_type", "nll"), experts
    )
    keep, config.save_total_limit = config.save_total_limit, None  # ours counts complete checkpoints only
    counter = metrics.TokenCounter()
    stop = stopping.SaveAndExit(run, peers)
    trainer = CountingTrainer(
        model=model,
        args=config,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_arguments),
        callbacks=[metrics.Metrics(run, peers, counter), stop, resume.CompleteCheckpoints(peers, keep)],
        counter=counter,
        plain_loss=plain,
        **_quantization(get_quantization_config(model_arguments)),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if peers.first:
        attention = trainer.model.config._attn_implementation
        print(f"model: {loading.parameters(trainer.model):,} parameters, {attention} attention")
        print(f"loss: {'the model itself' if plain else 'TRL, in chunks'} ({why})", flush=True)
    return trainer, stop


def _quantization(config: Any) -> dict[str, Any]:
    """Return the argument only where it is used: older TRL does not know it."""
    return {"quantization_config": config} if config is not None else {}


def _model_and_data(settings: Settings, config: Any, run: RunFolder, peers: Processes) -> tuple[Any, Any, Any, Any]:
    """Return training rows, held-out rows or None, a model or its name, and the tokenizer."""
    name, dataset = settings["model_name_or_path"], settings["dataset_name"]
    docs_folder = None
    if dataset == arguments.PYTHON_DOCS:
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
    if name == arguments.TINY_MODEL:
        folder = docs_folder or reading.python_docs(run.cache, peers)[1]
        tokenizer = _own_tokenizer(folder, settings["vocabulary_size"], run, peers)
        return rows, held_out, loading.tiny_llama(tokenizer, config.max_length or 512, config.seed), tokenizer
    tokenizer = loading.load_tokenizer(name, settings, kind)
    loading.prepare_loading(name, settings, config)
    return rows, held_out, name, tokenizer


def _own_tokenizer(folder: Path, vocabulary: int, run: RunFolder, peers: Processes) -> Any:
    from transformers import AutoTokenizer

    from training.data import corpus

    path = once(peers, lambda: made_tokenizer.build(run.cache, corpus.texts(folder), folder.name, vocabulary))
    return AutoTokenizer.from_pretrained(str(path))


def _leave(trainer: Any, stop: stopping.SaveAndExit, run: RunFolder, peers: Processes) -> int:
    step = trainer.state.global_step
    checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    if peers.first:
        stopping.leave_note(run, step, checkpoint, stop.reason)
        print(
            f"saved step {step} because of {stop.reason}; leaving with exit code {stopping.CONTINUE}: continue me",
            flush=True,
        )
    barrier(peers)
    return stopping.CONTINUE


def save_final(trainer: Any, ended: resume.Checkpoint | None, path: Path, peers: Processes) -> Path:
    """Write the Hugging Face model, tokenizer and chat template; an older final gives way only to a whole one.

    Of a training that had `ended` before this start, the weights are those of its last checkpoint.
    """
    partial = path.with_name(f".{path.name}.partial")
    once(peers, lambda: _clear(partial))
    if ended is not None:
        once(peers, lambda: resume.copy_model(ended.path, partial))
    else:
        trainer.save_model(str(partial))
    barrier(peers)
    once(peers, lambda: files.replace_folder(partial, path))
    return path


def _clear(folder: Path) -> None:
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


def _finish(run: RunFolder, final: Path, settings: Settings) -> None:
    entries = metrics.read(run.metrics)
    summary = {**metrics.summarise(entries), "final": str(final)}
    files.write_json(run.summary, summary)
    title = f"{run.path.name}: {settings['model_name_or_path']} on {settings['dataset_name']}"
    drawn = loss_picture.draw(entries, run.picture, title)
    print(f"final model {final}")
    print(f"picture {run.picture}" if drawn else "no picture: matplotlib is not in this image")
    first, last = summary["first_loss"], summary["last_loss"]
    if entries:
        print(
            f"done: {summary['steps']} steps, loss {first:.3f} -> {last:.3f}, {summary['tokens_per_second']} tok/s",
            flush=True,
        )
