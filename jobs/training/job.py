"""The contract of a training script with the batch script: one start of a run, from its folders to its exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from training import deepspeed, errors, files, models, pictures, processes, records, resume
from training import run as run_module
from training.errors import JobError
from training.processes import Processes, barrier, once
from training.resume import Checkpoint
from training.run import RunFolder
from training.settings import Settings

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from training.arguments import JobArguments
    from training.batch import Batch
    from training.checkpoints import CompleteCheckpoints
    from training.heartbeat import Heartbeat
    from training.metrics import Metrics
    from training.save_and_exit import SaveAndExit


@dataclass
class Job:
    """One start of a training script, and what the batch script expects of it.

    script           its name, without .py
    run, processes   the folder of the run, and this process among its peers
    heartbeat        signs of life, from the start on
    settings, options, batch  all arguments with their sources, those of runner, and the batch of a step, once
                     arguments.py has read them
    metrics, stop, saver   the other callbacks, once `callbacks` has made them
    began            where --resume_from_checkpoint lets the training begin (resume.began_at)
    """

    script: str
    run: RunFolder
    processes: Processes
    heartbeat: Heartbeat
    started: float = field(default_factory=time.monotonic)
    settings: Settings = field(init=False)
    options: JobArguments = field(init=False)
    batch: Batch = field(init=False)
    metrics: Metrics = field(init=False)
    stop: SaveAndExit = field(init=False)
    saver: CompleteCheckpoints = field(init=False)
    began: list[str] = field(default_factory=list)

    def training_arguments(self, config_type: type) -> Any:
        """Return the training arguments; making them starts the process group. All settings go to settings.json."""
        if self.processes.first:
            self.settings.write(self.run.path / "settings.json")
        try:
            config: Any = self.settings.build(config_type)
        except ValueError as error:
            why = " ".join(str(error).split())
            raise JobError(
                f"{config_type.__name__} does not accept the arguments", why, "change the argument named above"
            ) from error
        if config.deepspeed:
            from deepspeed.comm import init_distributed

            deepspeed.skip_unbuilt_shm_comm()
            # On a CPU accelerate has started torch's group only; ZeRO-3 asks DeepSpeed's for the world size.
            init_distributed(auto_mpi_discovery=False, verbose=False)
        if config.push_to_hub:  # transformers would ask the hub now, and push at each checkpoint; `finish` pushes once
            if not config.hub_model_id:
                raise JobError(
                    "--push_to_hub needs --hub_model_id",
                    "the repository on the hub needs a name",
                    "--hub_model_id ORGANISATION/NAME",
                )
            config.push_to_hub = False
            if config.hub_token:
                os.environ["HF_TOKEN"] = config.hub_token
        return config

    def find_checkpoint(self, config: TrainingArguments) -> Checkpoint | None:
        """Return the checkpoint to resume from, ready for this number of processes, or None. A collective."""
        wanted, config.resume_from_checkpoint = config.resume_from_checkpoint, None
        folder, automatic = Path(config.output_dir), not self.run.by_hand
        self.began = resume.began_at(self.run.path, wanted)
        before = self.began if automatic and self.run.attempt_number > 1 else []
        verify = self.options.verify_checkpoint
        checkpoint = resume.find_own(folder, before, self.processes, verify) or resume.find(
            folder, wanted, automatic, self.processes, verify
        )
        if checkpoint is not None:
            from training import universal

            resume.check_old_torch(self.options.allow_old_torch_load)
            universal.prepare(checkpoint, config, self.processes, self.heartbeat.beat)
        return checkpoint

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks: metrics, save and exit, complete checkpoints, signs of life, saves by time."""
        from training.checkpoints import CompleteCheckpoints
        from training.metrics import Metrics
        from training.save_and_exit import SaveAndExit

        self.metrics = Metrics(self.run, self.processes)
        self.stop = SaveAndExit(self.run, self.processes)
        self.saver = CompleteCheckpoints(self.run, self.processes)
        if not os.environ.get("RUNNER_SAVE_EVERY") or run_module.probing():
            return [self.metrics, self.stop, self.saver, self.heartbeat]
        from training import save_every

        every = save_every.from_environment(os.environ, self.run, self.processes)
        self.stop.save_is_due, self.saver.saved = every.due, every.saved
        return [self.metrics, self.stop, every, self.saver, self.heartbeat]

    def attach(self, trainer: Trainer, checkpoint: Checkpoint | None) -> None:
        """Let the callbacks measure and save this trainer; print what is trained, in a few lines.

        A process that `--micro_batch auto` has started tries its sizes here, and ends.
        """
        from transformers import PrinterCallback, ProgressCallback

        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        if trainer.args.ddp_find_unused_parameters is None and not models.has_experts(trainer.model.config):
            # searching for them costs a traversal of the graph at every step
            trainer.args.ddp_find_unused_parameters = False
        if checkpoint is not None:
            from training import same_model

            same_model.check(checkpoint.path, trainer.model)
        self.saver.attach(trainer, checkpoint.step if checkpoint else 0, self.began)
        if not run_module.probing():
            self.metrics.attach(trainer, self.options.peak_flops, self.saver.take_seconds)
        if self.processes.first:
            print(*summary(trainer, self), sep="\n")
            print(f"ready after {time.monotonic() - self.started:.1f} s", flush=True)
        run_module.note_time(self.run, self.processes, "loaded")
        if run_module.probing():
            from training import probe

            probe.probe(trainer, self.batch.length or 0)
            self.close()
            end_process(0)

    def leave(self, trainer: Trainer) -> int:
        """Return 75, the exit code for save and exit: start again."""
        from training import save_and_exit

        step = trainer.state.global_step
        if self.processes.first:
            checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{step}"
            save_and_exit.write_note(self.run, step, checkpoint, self.stop.reason)
            code = save_and_exit.CONTINUE
            print(
                f"saved step {step} because of {self.stop.reason}; exiting with code {code};"
                " start the run again to resume",
                flush=True,
            )
        barrier(self.processes)
        return save_and_exit.CONTINUE

    def save_final(self, trainer: Trainer, checkpoint: Checkpoint | None) -> Path:
        """Write the model, tokenizer and chat template to `final`, which replaces an older one once it is complete.

        If an earlier start took the last step, the weights are those of its checkpoint, or of its best one.
        """
        path = Path(trainer.args.output_dir) / "final"
        partial = path.with_name(f".{path.name}.partial")
        once(self.processes, lambda: shutil.rmtree(partial, ignore_errors=True))
        if resume.is_finished(checkpoint, trainer.args) and checkpoint:
            ended = checkpoint
            if self.processes.first:
                print(f"step {ended.step} was the last step, so no training is left to do", flush=True)
            once(self.processes, lambda: resume.copy_model(resume.model_at_end(ended, trainer.args), partial))
        else:
            trainer.save_model(str(partial))
        barrier(self.processes)
        once(self.processes, lambda: files.replace_folder(partial, path))
        run_module.note_time(self.run, self.processes, "final")
        return path

    def finish(self, trainer: Trainer, final: Path, results: Mapping[str, Any] | None = None) -> int:
        """Write summary.json, with `results`, and loss.png; push the model if asked to; and return 0."""
        run = self.run
        if self.processes.first:
            entries = records.read(run.metrics)
            table = {**records.summarise(entries), "final": str(final), **(results or {})}
            files.write_json(run.summary, table)
            print(f"final model {final}")
            if pictures.draw_loss(entries, run.picture, f"{run.path.name}: {self._subject(trainer)}"):
                print(f"picture {run.picture}")
            elif not pictures.available():
                print("no picture was made: this image has no matplotlib")
            if entries:
                losses = f"loss {table['first_loss']:.3f} -> {table['last_loss']:.3f}"
                print(f"done: {table['steps']} steps, {losses}, {table['tokens_per_second']} tok/s", flush=True)
            if self.settings["push_to_hub"]:
                files.write_json(run.summary, {**table, "pushed": _push(trainer.args, final)})
        barrier(self.processes)
        return 0

    def _subject(self, trainer: Trainer) -> str:
        """Return `MODEL on DATA`, of folders and files their names only."""
        data = str(self.settings.get("dataset_name") or self.settings.get("train_file"))
        names = (models.name_of(trainer.model.config), data)
        return " on ".join(Path(name).name if Path(name).exists() else name for name in names)

    def close(self) -> None:
        """End the process group and release the lock of the run."""
        processes.leave_group()
        if self.processes.first:
            run_module.release_lock(self.run)


@contextlib.contextmanager
def start(script: str) -> Iterator[Job]:
    """Set folders, caches and threads before anything slow is imported; report what is raised as one error."""
    with errors.reported(script):
        peers = processes.from_environment(os.environ)
        run = run_module.from_environment(os.environ, script)
        run_module.make(run)
        run_module.point_caches(run, os.environ)
        threads = processes.set_threads(os.environ, peers)
        _quiet_libraries()  # imports torch and transformers, which read what was set above
        from training.heartbeat import Heartbeat

        run_module.note_time(run, peers, "imported")
        if peers.first:
            run_module.take_lock(run)
            print(
                f"{script}: processes: {peers.world_size}, launcher: {peers.launcher}, threads per process: {threads}, "
                f"run folder: {run.path}",
                flush=True,
            )
        job = Job(script, run, peers, Heartbeat(run, peers))
        yield job
        job.close()


def summary(trainer: Trainer, job: Job) -> list[str]:
    """Return what decides speed and result, a line each; settings.json has all values and their sources."""
    args, model = trainer.args, trainer.model
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    recompute = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", False)
    optimizer = str(getattr(args.optim, "value", args.optim))
    sharding = f", DeepSpeed {Path(args.deepspeed).stem}" if args.deepspeed else ""
    peak = job.metrics.peak
    return [
        f"model: {models.name_of(model.config)}, {models.parameters(model):,} parameters",
        f"batch: {job.batch}",
        f"precision: {precision}; attention: {getattr(model.config, '_attn_implementation', '?')};"
        f" activations: {'recomputed' if recompute else 'kept'}",
        f"optimizer: {optimizer}, learning_rate {args.learning_rate:g} {getattr(args.lr_scheduler_type, 'value', '')}"
        f"{sharding}",
        *([f"MFU against {peak.flops / 1e12:g} TFLOP/s per process ({peak.source})"] if peak else []),
        f"settings: {job.run.path / 'settings.json'} has all of them with their sources",
    ]


def end_process(code: int) -> NoReturn:
    """Run the exit handlers, then end this process with `code` without tearing down the interpreter.

    DeepSpeed keeps its process groups, so gloo's threads outlive `leave_group`. A thread that releases a tensor while
    Python is torn down aborts the process, and the launcher takes a finished job for a failed one.
    Source: https://github.com/pytorch/pytorch/issues/190489, torch 2.13.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # those of W&B, TensorBoard and multiprocessing
    errors.leave(code)


def _push(config: Any, final: Path) -> str | None:
    """Return the address of the pushed model; if the hub cannot be reached, print how to push it later."""
    from training.converting import hub

    repository, private = config.hub_model_id, bool(config.hub_private_repo)
    try:
        return hub.push(final, repository, private=private, branch=None, message=final.name)
    except JobError as error:
        print(f"the model was not pushed to {repository}: {error.what}, because {error.why}")
        program = Path(sys.argv[0]).with_name("push.py")
        print(f"to push it later: python {program} {final} --repo {repository}{' --private' if private else ''}")
        return None


def _quiet_libraries() -> None:
    """Turn off progress bars, and warnings that every rank repeats; tell DeepSpeed if there is no GPU."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|transformers|accelerate")
