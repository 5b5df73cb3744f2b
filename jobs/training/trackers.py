"""TensorBoard and Weights & Biases: one run over all attempts, each step in it once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from training import files
from training.errors import JobError
from training.records import headers, lines
from training.run import RunFolder
from training.settings import Settings

TENSORBOARD, WANDB = "tensorboard", "wandb"
RECORD = "trackers.json"  # in the run's folder: the id that all attempts share
SKIPPED = ("step", "total_steps", "time", "attempt", "total_flos")


class Tracker:
    """Somebody who is told each entry. What goes wrong with it is said once and never ends a training."""

    name = ""

    def start(self, first_step: int) -> None:
        """Begin an attempt whose next step is `first_step` + 1."""
        self._try(lambda: self._start(first_step))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in SKIPPED
        }
        named = {
            f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in numbers.items()
        }
        self._try(lambda: self._write(step, named))

    def close(self) -> None:
        self._try(self._close)

    failed = False

    def _try(self, action: Any) -> None:
        if self.failed:
            return
        try:
            action()
        except Exception as error:
            self.failed = True
            lines = str(error).strip().splitlines() or [""]
            print(f"{self.name} is told nothing more ({type(error).__name__}: {lines[0]}); metrics.jsonl has it all")

    def _start(self, first_step: int) -> None:
        raise NotImplementedError

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """One folder for all attempts; what an earlier one wrote of steps that are taken again is hidden."""

    name = TENSORBOARD

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def _start(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = first_step + 1 if self.folder.is_dir() else None
        self.writer = SummaryWriter(log_dir=str(self.folder), purge_step=again, flush_secs=10)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WeightsAndBiases(Tracker):
    """One id for all attempts; steps taken again are not told again: a logged step cannot be changed."""

    name = WANDB

    def __init__(self, run: RunFolder, title: str, settings: Mapping[str, Any], identity: str, seen: int) -> None:
        self.folder, self.title, self.settings = run.path, title, settings
        self.identity, self.seen = identity, seen
        self.wandb: Any = None

    def _start(self, first_step: int) -> None:
        import wandb

        known: dict[str, Any] = {"id": self.identity, "resume": "allow", "dir": str(self.folder)}
        known["name"] = os.environ.get("WANDB_NAME") or self.title
        known["project"] = os.environ.get("WANDB_PROJECT") or "runner"
        known["config"] = dict(self.settings)
        try:
            self.wandb = wandb.init(**known)
        except wandb.errors.Error as error:
            reason = (str(error).strip().splitlines() or ["no answer"])[0]
            print(
                f"wandb: {reason}; offline now, `wandb sync {self.folder}/wandb/offline-*` sends it later", flush=True
            )
            self.wandb = wandb.init(**known, mode="offline")
        self.wandb.define_metric("train/global_step")
        self.wandb.define_metric("*", step_metric="train/global_step", step_sync=True)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.seen:
            self.wandb.log({**values, "train/global_step": step}, step=step)

    def _close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()


def wanted(settings: Settings) -> tuple[str, ...]:
    """Return those of the two that `--report_to` names; `all` means what is installed."""
    named = settings.get("report_to")
    words = {str(word).lower() for word in ([named] if isinstance(named, str) else named or ())}
    if "all" in words:
        return tuple(name for name in (TENSORBOARD, WANDB) if importlib.util.find_spec(name))
    return tuple(name for name in (TENSORBOARD, WANDB) if name in words)


def check(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Raise JobError where a tracker that is asked for could not work: at the start, not after the model is loaded."""
    for name in wanted(settings):
        if importlib.util.find_spec(name) is None:
            raise JobError(
                f"--report_to {name}: it is not in this image",
                f"there is no package {name!r}",
                f"add {name} to the image's pins, or leave it out: metrics.jsonl has all of it (`runner plot`)",
            )
    mode = environment.get("WANDB_MODE", "online").lower()
    if WANDB in wanted(settings) and mode == "online" and not _has_key(environment):
        raise JobError(
            "--report_to wandb: there is no key",
            "WANDB_API_KEY is not set, and ~/.netrc has none",
            "WANDB_API_KEY=…; or WANDB_MODE=offline, and `wandb sync` from a login node later",
        )


def make(settings: Settings, run: RunFolder) -> tuple[Tracker, ...]:
    """Return the trackers that are asked for. On rank 0 alone."""
    found: list[Tracker] = []
    for name in wanted(settings):
        if name == TENSORBOARD:
            found.append(TensorBoard(Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or run.path / "tensorboard")))
        else:
            identity, seen = run_id(run), last_told(run.metrics, WANDB)
            title = str(settings.get("run_name") or run.path.name)
            found.append(WeightsAndBiases(run, title, _shown(run), identity, seen))
            print(f"wandb: run id {identity}, kept in {run.path / RECORD}", flush=True)
    return tuple(found)


def run_id(run: RunFolder) -> str:
    """Return the id that all attempts share: WANDB_RUN_ID, else the one in the run's folder, made once."""
    path = run.path / RECORD
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["wandb_run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        kept = None
    identity = os.environ.get("WANDB_RUN_ID") or kept
    if not identity:
        identity = f"{re.sub(r'[^A-Za-z0-9_-]', '-', run.path.name)[:48]}-{os.urandom(4).hex()}"
    if identity != kept:
        files.write_json(path, {"wandb_run_id": identity})
    return str(identity)


def last_told(metrics: Path, name: str) -> int:
    """Return the last step that an earlier attempt has told a tracker; 0 where none has."""
    attempts = {header.get("attempt") for header in headers(metrics) if name in header.get("trackers", ())}
    steps = [entry["step"] for entry in lines(metrics) if "loss" in entry and entry.get("attempt") in attempts]
    return max(steps, default=0)


def replace_callbacks(trainer: Any) -> None:
    """Take out transformers' own two: they begin a new run with each attempt."""
    from transformers.integrations import TensorBoardCallback, WandbCallback

    for kind in (TensorBoardCallback, WandbCallback):
        trainer.remove_callback(kind)


def _shown(run: RunFolder) -> dict[str, Any]:
    """Return the settings as settings.json shows them: secrets hidden."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        table = json.loads((run.path / "settings.json").read_text(encoding="utf-8"))
        return {name: each["value"] for name, each in table.items()}
    return {}


def _has_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = environment.get("NETRC") or str(Path(environment.get("HOME") or "/") / ".netrc")
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(path).authenticators(host) is not None
    return False
