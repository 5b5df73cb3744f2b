"""The course of a training, whatever is trained: settings shown, resumed, trained, left or finished."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training import checkpoints as saving
from training import deepspeed as deepspeed_config
from training import (
    files,
    loss_picture,
    metrics,
    probe,
    publishing,
    records,
    resume,
    same_model,
    trackers,
    universal,
)
from training import models as loading
from training import save_and_exit as stopping
from training import settings as settings_module
from training.batch import Batch
from training.choices import report
from training.choices.choices import Choice
from training.errors import JobError
from training.heartbeat import Heartbeat
from training.processes import Processes, barrier, once
from training.run import RunFolder
from training.settings import Settings

BEAT_SECONDS = 20.0


class Course:
    """One start of a training. Made once the arguments are read; making it starts the process group.

    settings, batch   what was asked, and the sizes of a step
    run, peers        the folder of the run, and who this process is
    config            transformers' TrainingArguments, or a library's own kind of it
    checkpoint        where this start resumes, or None
    counter           counts the tokens trained on; the trainer adds to it
    choices           what `make_trainer` chose itself, to be said with the others
    stop              the callback that saves and leaves when asked
    trainer           there once `make_trainer` has given it
    """

    trainer: Any

    def __init__(
        self, config_type: type, settings: Settings, batch: Batch, run: RunFolder, peers: Processes, started: float
    ) -> None:
        self.settings, self.batch, self.run, self.peers, self.started = settings, batch, run, peers, started
        self.choices: list[Choice] = []
        self.heartbeat = Heartbeat(run, peers)  # before anything that may hang
        _quiet_libraries()
        trackers.check(settings)
        report.settle(settings, peers)
        if peers.first:
            print("settings (value, source)", *settings_module.show(settings, run.path / "settings.json"), sep="\n")
            print(f"batch: {batch}", flush=True)
        self.config = _configure(config_type, settings)  # starts the process group
        self.publication = publishing.take_over(self.config)
        wanted, self.config.resume_from_checkpoint = settings.get("resume_from_checkpoint"), None
        folder = Path(self.config.output_dir)
        self.checkpoint = resume.settle(folder, wanted, automatic=not run.by_hand, peers=peers)
        universal.prepare(self.checkpoint, self.config, peers)
        self.counter = metrics.TokenCounter()
        self.meter = metrics.Metrics(run, peers, self.counter)
        self.stop = stopping.SaveAndExit(run, peers)
        self.saver = saving.CompleteCheckpoints(run, peers)

    def callbacks(self) -> list[Any]:
        """Return what `make_trainer` gives to its trainer: metrics, leaving in order, checkpoints, signs of life."""
        return [self.meter, self.stop, self.saver, self.heartbeat]

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """Give signs of life while one piece of work lasts that has no steps, such as making a token cache."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT_SECONDS):
                self.heartbeat.beat()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def prepare(self, make_trainer: Callable[[Course], Any]) -> Any:
        """Return the trainer, ready: without the callbacks that redraw lines, its model described."""
        from transformers import PrinterCallback, ProgressCallback

        self.trainer = make_trainer(self)
        self.trainer.remove_callback(ProgressCallback)
        self.trainer.remove_callback(PrinterCallback)
        same_model.refuse_other_model(self.checkpoint, self.trainer.model)
        self.saver.attach(self.trainer)
        if not probe.probing():
            self.meter.attach(self.trainer, self.settings)
        report.report(self.settings, self.trainer.model, self.peers, self.choices)
        if self.peers.first:
            print(f"model: {loading.parameters(self.trainer.model):,} parameters")
            print(f"ready after {time.monotonic() - self.started:.1f} s", flush=True)
        return self.trainer

    def train(
        self,
        make_trainer: Callable[[Course], Any],
        evaluate: Callable[[Course, Path, bool], dict[str, Any]] | None = None,
    ) -> int:
        """Return 0 when the training is done, 75 when it was asked to save and leave before its end.

        `evaluate(course, final, trained)` runs on all ranks after the final model is written and returns what the
        summary is to hold too; `trained` is false where an earlier start had taken the last step.
        """
        trainer = self.prepare(make_trainer)
        if probe.probing():  # started to try micro batches: no checkpoint, no final model
            return probe.probe(trainer, self.batch.length or 0)
        ended = self.checkpoint if self.checkpoint and resume.at_the_end(self.checkpoint, self.config) else None
        if ended is None:
            resume.let_it_be_read()
            trainer.train(resume_from_checkpoint=str(self.checkpoint.path) if self.checkpoint else None)
        elif self.peers.first:
            print(f"step {ended.step} was the last one: nothing is left to train", flush=True)
        if self.stop.reason:
            return self._leave()
        final = save_final(trainer, ended, Path(self.config.output_dir) / "final", self.peers)
        found = evaluate(self, final, ended is None) if evaluate else {}
        if self.peers.first:
            self._finish(final, found)
        barrier(self.peers)
        return 0

    @property
    def title(self) -> str:
        """E.g. `sft-0007: tiny-llama on python-docs`."""
        model = self.settings.get("model_name_or_path") or self.settings.get("model_type")
        data = self.settings.get("dataset_name") or self.settings.get("train_file")
        return f"{self.run.path.name}: {model} on {data}"

    def _leave(self) -> int:
        step = self.trainer.state.global_step
        if self.peers.first:
            checkpoint = Path(self.config.output_dir) / f"checkpoint-{step}"
            stopping.leave_note(self.run, step, checkpoint, self.stop.reason)
            because = f"saved step {step} because of {self.stop.reason}"
            print(f"{because}; leaving with exit code {stopping.CONTINUE}: continue me", flush=True)
        barrier(self.peers)
        return stopping.CONTINUE

    def _finish(self, final: Path, found: dict[str, Any]) -> None:
        entries = records.read(self.run.metrics)
        summary = {**records.summarise(entries), "final": str(final), **found}
        files.write_json(self.run.summary, summary)
        drawn = loss_picture.draw(entries, self.run.picture, self.title)
        print(f"final model {final}")
        print(f"picture {self.run.picture}" if drawn else "no picture: matplotlib is not in this image")
        if entries:
            losses = f"loss {summary['first_loss']:.3f} -> {summary['last_loss']:.3f}"
            print(f"done: {summary['steps']} steps, {losses}, {summary['tokens_per_second']} tok/s", flush=True)
        if self.publication:
            address = publishing.publish(self.publication, final)
            files.write_json(self.run.summary, {**summary, "pushed": address})


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


def _quiet_libraries() -> None:
    """Turn off bars that redraw themselves, and what the libraries say to each other on every rank."""
    import warnings

    from transformers.utils import logging

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # not imported for this alone: it is slow
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|transformers|accelerate")


def _configure(config_type: type, settings: Settings) -> Any:
    try:
        config = settings.build(config_type)
        if settings["deepspeed"]:
            from deepspeed.comm import init_distributed

            deepspeed_config.leave_out_what_is_not_built()
            # On the CPU accelerate has started torch's group only; ZeRO-3 asks DeepSpeed's for the world size.
            init_distributed(auto_mpi_discovery=False, verbose=False)
        return config
    except ValueError as error:
        why = " ".join(str(error).split())
        raise JobError(
            f"{config_type.__name__} refuses the arguments", why, "change the argument that is named"
        ) from error
