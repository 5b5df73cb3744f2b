"""Where a trained model is, and in which form."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.errors import JobError

HUGGING_FACE, ADAPTER, ZERO = "Hugging Face model", "LoRA adapter", "ZeRO checkpoint"
MARKER = "complete.json"  # as checkpoints/marker.py writes it
MODEL_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Trained:
    """A trained model on disk, or a name on the hub."""

    kind: str  # one of the three above
    weights: str  # the folder that the weights are read from; or the name on the hub
    model: str  # the folder with config.json (and the adapter's), tokenizer and chat template; or the name
    notes: tuple[str, ...] = ()  # for the user: checkpoints that were skipped

    @property
    def adapter(self) -> bool:
        """Return whether it is a LoRA adapter; its base is named in adapter_config.json."""
        return self.kind == ADAPTER

    def __str__(self) -> str:
        return f"{self.kind} {self.weights}"


def find(
    named: str | Path | None,
    environment: Mapping[str, str],
    *,
    shards_first: bool = False,
    config: str | Path | None = None,
    base: str | None = None,
) -> Trained:
    """Return the named model, else that of RUNNER_AFTER or RUNNER_RUN. Raises JobError.

    `named` may be a run's folder (its final model, or its newest complete checkpoint), a `checkpoint-N`, the folder of
    the shards themselves, a Hugging Face model, a LoRA adapter, or a name on the hub.
    `shards_first`: prefer DeepSpeed's fp32 weights to the 16-bit ones beside them. `config`: replaces the checkpoint's
    configuration; `base`: is used if the checkpoint has none.
    """
    if named is None:
        named = environment.get("RUNNER_AFTER") or environment.get("RUNNER_RUN")
        if not named:
            raise JobError(
                "no checkpoint is given", "--checkpoint is missing, and RUNNER_RUN is not set", "--checkpoint FOLDER"
            )
    folder = Path(named)
    if not folder.is_dir():
        return _on_hub(str(named), folder)
    checkpoints = _checkpoints(folder)
    if checkpoints.is_dir():
        folder, notes = _of_run(checkpoints, shards_first)
        return _read(folder, shards_first, config, notes, chosen=True)
    if base and not config and not any(_configured(place) for place in _places(folder, _shards(folder) or folder)):
        config = base
    return _read(folder, shards_first, config, ())


def _on_hub(name: str, path: Path) -> Trained:
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or not HUB_NAME.fullmatch(name):
        raise JobError(
            f"there is no checkpoint {name!r}",
            "the path is a file" if path.exists() else "no folder of that name is visible to this process",
            "give the folder of a run, a checkpoint or a model",
        )
    return Trained(HUGGING_FACE, name, name)


def _checkpoints(run: Path) -> Path:
    """Return the folder of a run's checkpoints: `checkpoints`, or that of its --output_dir."""
    usual = run / "checkpoints"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if not usual.is_dir():
            settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
            return Path(settings["output_dir"]["value"])
    return usual


def _of_run(checkpoints: Path, shards_first: bool) -> tuple[Path, tuple[str, ...]]:
    """Return a run's final model or its newest complete checkpoint; with `shards_first` prefer the checkpoint."""
    from training import resume

    final = checkpoints / "final"
    if final.is_dir() and not shards_first:
        return final, ()
    skipped: list[str] = []
    for folder in resume.by_age(checkpoints):
        fault = _fault(folder, every_byte=shards_first)
        if fault is None:
            return folder, tuple(skipped)
        skipped.append(f"skipped {folder}: {fault}")
    if final.is_dir():
        return final, tuple(skipped)
    raise JobError(
        f"{str(checkpoints)!r} has neither a final model nor a complete checkpoint",
        "; ".join(skipped) or "the run has not saved a checkpoint yet",
        "pass another run" if skipped else "wait for the run's first checkpoint, or pass another run",
    )


def _fault(checkpoint: Path, every_byte: bool) -> str | None:
    """Return what is wrong with a checkpoint according to its marker, or None."""
    from training import marker

    return marker.missing_or_cut(checkpoint) or (marker.damaged(checkpoint, 0, 1, 1) if every_byte else None)


def _read(
    folder: Path, shards_first: bool, config: str | Path | None, notes: tuple[str, ...], chosen: bool = False
) -> Trained:
    notes = notes if chosen else _check_marker(folder, shards_first)
    shards = _shards(folder)
    plain = _plain(folder)
    if shards is not None and plain != ADAPTER and (shards_first or shards == folder or plain is None):
        model = Path(config) if config else _model_folder(folder, shards)
        if not (model / "adapter_config.json").is_file():
            return Trained(ZERO, str(shards), str(model), notes)
        folder, plain = model, _plain(model)
    if plain is None:
        raise JobError(
            f"{str(folder)!r} is neither a Hugging Face model nor a DeepSpeed checkpoint",
            "it has no *_model_states.pt, and no weights next to a config.json or adapter_config.json",
            "give the folder of a run, its `final` or `checkpoint-N`, or a folder of shards (`global_stepN`)",
        )
    return Trained(plain, str(folder), str(config or folder), notes)


def _check_marker(folder: Path, every_byte: bool) -> tuple[str, ...]:
    """Raise JobError if the marker says that the checkpoint is damaged; return a note if there is no marker."""
    from training import resume

    owner = next((path for path in (folder, folder.parent) if resume.FOLDER.fullmatch(path.name)), None)
    if owner is None:
        return ()
    if not (owner / MARKER).is_file():
        return (f"{owner} has no {MARKER}, so the checkpoint may be incomplete",)
    fault = _fault(owner, every_byte)
    if fault:
        raise JobError(
            f"the checkpoint {str(owner)!r} is damaged", fault, "give an older checkpoint, or the folder of the run"
        )
    return ()


def _shards(folder: Path) -> Path | None:
    """Return the folder of DeepSpeed's weights: this one, that which `latest` names, or that of the last step."""
    if any(folder.glob("*_model_states.pt")):
        return folder
    steps = [path for path in folder.glob("global_step*") if path.name[len("global_step") :].isdigit()]
    steps.sort(key=lambda path: int(path.name[len("global_step") :]), reverse=True)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        steps.insert(0, folder / (folder / "latest").read_text(encoding="utf-8").strip())
    return next((path for path in steps if any(path.glob("*_model_states.pt"))), None)


def _plain(folder: Path) -> str | None:
    if (folder / "adapter_config.json").is_file() and any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        return ADAPTER
    if (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in MODEL_WEIGHTS):
        return HUGGING_FACE
    return None


def _places(folder: Path, shards: Path) -> tuple[Path, ...]:
    """Return where a checkpoint's config can be: in the checkpoint, or in the run's final model."""
    return (folder, shards, shards.parent, shards.parent / "final", shards.parent.parent / "final")


def _configured(place: Path) -> bool:
    return (place / "config.json").is_file() or (place / "adapter_config.json").is_file()


def _model_folder(folder: Path, shards: Path) -> Path:
    """Return the folder with the model's config: the checkpoint's, or the run's final model."""
    places = _places(folder, shards)
    for place in places:
        if _configured(place):
            return place
    raise JobError(
        f"there is no config.json for the shards in {str(shards)!r}",
        f"these folders were searched: {', '.join(dict.fromkeys(str(place) for place in places[:3]))}",
        "give the configuration of the trained model: --config FOLDER|NAME (for generate: --model_name NAME)",
    )
