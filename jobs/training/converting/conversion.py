"""From a checkpoint to a Hugging Face model: load, write, check, and only then rename to its final name."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from training import files
from training.converting import comparing, models, trained
from training.converting.trained import Trained
from training.errors import JobError

# Files of a checkpoint's folder that are not copied into the model, or that transformers writes.
NOT_OF_THE_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "zero_to_*.py"),
    *("config.json", "adapter_config.json", "README.md", "optimizer.*", "rng_state*", "trainer_state.json", "latest*"),
    *("complete.json", "metrics.jsonl", "converted.json", ".*"),
)


def convert(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Path:
    """Return the folder of the new model. It appears only if it passed the check; otherwise JobError is raised."""
    import torch
    from transformers.utils import logging

    found = trained.find(arguments.checkpoint, environment, shards_first=True, config=arguments.config)
    for note in found.notes:
        say(note)
    output = output_folder(arguments.output, found, environment)
    if output.exists() and not arguments.overwrite:
        raise JobError(
            f"the output folder {str(output)!r} already exists",
            "an existing model is replaced only with --overwrite",
            "add --overwrite, or choose another --output",
        )
    logging.disable_progress_bar()
    dtype = arguments.dtype or models.dtype_name(found, arguments.trust_remote_code)
    checked, reference = arguments.check == "logits", None
    model, what = models.load(found, "float32" if checked else dtype, trust_remote_code=arguments.trust_remote_code)
    say(f"{found} ({what}, {model.num_parameters():,} parameters); the new model will have the dtype {dtype}")
    tokenizer = _tokenizer(found, arguments)
    if checked:
        tokens = comparing.sample(tokenizer, model.config)
        reference = comparing.logits(model, tokens, arguments.device)
    if found.adapter:
        model = model.to("cpu").merge_and_unload()
    partial = files.unfinished(output)
    partial.mkdir(parents=True)
    try:
        _write(model.to("cpu", getattr(torch, dtype)), found, arguments, partial)
        if arguments.tokenizer or not Path(found.model).is_dir():
            tokenizer.save_pretrained(str(partial))
        del model
        verdict = _check(reference, tokens, partial, dtype, found.adapter, arguments) if checked else "not checked"
        record = {"checkpoint": found.weights, "kind": found.kind, "weights": what, "dtype": dtype, "check": verdict}
        files.write_json(partial / "converted.json", record)
        files.replace_folder(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(str(output))
    return output


def output_folder(named: Path | None, found: Trained, environment: Mapping[str, str]) -> Path:
    """Return the folder to write: model-STEP in the run's folder, else beside the checkpoint.

    With `launch --after` the other run is read-only: then it is this run's own final model, for the next one to find.
    """
    if named is not None:
        return named.absolute()
    path = Path(found.weights).absolute()
    before, own = environment.get("RUNNER_AFTER"), environment.get("RUNNER_RUN")
    if before and own and path.is_relative_to(before):
        return Path(own) / "checkpoints" / "final"
    step = next((match[1] for part in (path.name, path.parent.name) if (match := re.search(r"(\d+)", part))), "")
    for parent in path.parents:
        if parent.name == "checkpoints":
            return parent.parent / (f"model-{step}" if step else "model")
    if not path.is_dir():
        raise JobError(
            f"cannot choose an output folder for {found.weights!r}",
            "that is a name on the hub, not a local folder",
            "give --output FOLDER",
        )
    return path.with_name(f"{path.name}-model")


def say(line: str) -> None:
    print(f"convert: {line}", file=sys.stderr, flush=True)


def _tokenizer(found: Trained, arguments: argparse.Namespace) -> Any:
    """Return the tokenizer, or None if the checkpoint has none."""
    folder = Path(found.model)
    if arguments.tokenizer is None and folder.is_dir() and not any(folder.glob("tokenizer*")):
        say("the checkpoint has no tokenizer: add one with --tokenizer FOLDER|NAME")
        return None
    return models.load_tokenizer(arguments.tokenizer or found.model, arguments.trust_remote_code)


def _write(model: Any, found: Trained, arguments: argparse.Namespace, folder: Path) -> None:
    """Write weights and config, and copy tokenizer, chat template, generation config and the model's own code."""
    model.config.use_cache = True  # activation checkpointing turns it off
    model.save_pretrained(str(folder), max_shard_size=arguments.max_shard_size)
    source = Path(found.model)
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in NOT_OF_THE_MODEL):
            shutil.copyfile(path, folder / path.name)


def _check(reference: Any, tokens: Any, folder: Path, dtype: str, merged: bool, arguments: argparse.Namespace) -> str:
    """Return the result of the check. Raises JobError if the new model answers differently."""
    new = Trained(trained.HUGGING_FACE, str(folder), str(folder))
    model, _ = models.load(new, "float32", trust_remote_code=arguments.trust_remote_code)
    usual = max(comparing.TOLERANCES[dtype], comparing.MERGED_TOLERANCE if merged else 0.0)
    tolerance = usual if arguments.tolerance is None else arguments.tolerance
    verdict = comparing.compare(reference, comparing.logits(model, tokens, arguments.device), tolerance, dtype)
    say(verdict)
    return verdict
