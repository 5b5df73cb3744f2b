"""From a checkpoint to a Hugging Face model: read, write, check, and only then rename to its final name."""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import files
from training.converting import adapters, comparing, models, trained, writing
from training.converting.shards import Shards, Stored, open_shards
from training.converting.trained import Trained
from training.errors import JobError

RECORD = "converted.json"


@dataclass(frozen=True)
class Source:
    """What is converted: the weights by the model's names, and the model without them."""

    trained: Trained
    what: str
    weights: Mapping[str, Stored]
    blank: Any  # the model without weights, or the merged model itself
    merged: bool  # an adapter was merged: `blank` holds the weights, and `reference` came from the unmerged one
    tokens: Any
    reference: Any | None  # logits of the unmerged adapter


def convert(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Path:
    """Return the folder of the new model. It appears only if it passed the check; otherwise JobError is raised."""
    max_shard_bytes = writing.parse_size(arguments.max_shard_size)
    found = trained.find(arguments.checkpoint, environment, shards_first=True, config=arguments.config)
    for note in found.notes:
        say(note)
    output = output_folder(arguments.output, found, environment)
    if output.exists() and not arguments.overwrite:
        raise JobError(
            f"{str(output)!r} exists", "a model is only replaced on request", "--overwrite, or another --output"
        )
    _quiet()
    source = _open(found, arguments)
    dtype_name = arguments.dtype or models.dtype_name(source.blank.config)
    dtype = models.torch_type(dtype_name)
    size = sum(writing.size_bytes(stored, dtype) for stored in source.weights.values())
    writing.check_room(output.parent, size)
    say(f"{found}: {source.what}, {len(source.weights)} weights; {size / 1e9:.2f} GB in {dtype_name}")
    partial = files.unfinished(output)
    partial.mkdir(parents=True)
    try:
        shards = _write(source, arguments, partial, dtype, max_shard_bytes)
        verdict = _check(source, arguments, partial, shards, dtype_name)
        _record(partial, source, dtype_name, verdict)
        files.replace_folder(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{len(shards)} shards in {output}")
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
            "it is a Hub name, not a local folder",
            "give --output FOLDER",
        )
    return path.with_name(f"{path.name}-model")


def say(line: str) -> None:
    print(f"convert: {line}", file=sys.stderr, flush=True)


def _open(found: Trained, arguments: argparse.Namespace) -> Source:
    """Return names, shapes and readers of all weights. Raises JobError if they do not fit the model."""
    shards = open_shards(found.kind, Path(found.weights)) if found.sharded else None
    if found.adapter:
        return _merged(found, shards, arguments)
    model = models.blank(found, arguments.trust_remote_code)
    shards = shards or _of_safetensors(found)
    weights = models.match(models.expected(model), shards, found.weights)
    return Source(found, shards.what, weights, model, False, _tokens(found, arguments, model.config), None)


def _of_safetensors(found: Trained) -> Shards:
    """Read a Hugging Face model with transformers, which also knows older files and names."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(found.weights, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        raise models.unreadable("model", found.weights, error) from error
    return Shards(f"{model.dtype}".replace("torch.", ""), _of_model(model))


def _of_model(model: Any) -> dict[str, Stored]:
    return {
        name: Stored(tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]
        for name, value in model.state_dict().items()
    }


def _merged(found: Trained, shards: Shards | None, arguments: argparse.Namespace) -> Source:
    """Merge an adapter into its base model in fp32. Needs memory for the whole model."""
    model = adapters.with_adapter(found, shards, "float32")
    tokens = _tokens(found, arguments, model.config)
    reference = comparing.logits(model, tokens, arguments.device)
    merged = model.to("cpu").merge_and_unload()
    what = f"adapter of {shards.what if shards else 'a Hugging Face folder'}, merged into {adapters.base_name(found)}"
    weights = models.match(models.expected(merged), Shards(what, _of_model(merged)), found.weights)
    return Source(found, what, weights, merged, True, tokens, reference)


def _write(source: Source, arguments: argparse.Namespace, folder: Path, dtype: Any, max_shard_bytes: int) -> list[Path]:
    name = str(dtype).replace("torch.", "")
    if source.merged:
        source.blank.config.save_pretrained(str(folder))
        if getattr(source.blank, "generation_config", None) is not None:
            source.blank.generation_config.save_pretrained(str(folder))
    elif not Path(source.trained.model).is_dir():
        source.blank.config.save_pretrained(str(folder))
    if needs_renaming(source.blank):
        shards = _write_by_transformers(source, folder, dtype, arguments.max_shard_size)
    else:
        shards = writing.write_weights(folder, source.weights, dtype, max_shard_bytes)
    model = Path(source.trained.model)
    for note in writing.write_rest(model if model.is_dir() else folder, folder, name):
        say(note)
    if arguments.tokenizer or not model.is_dir():
        _load_tokenizer(arguments.tokenizer or source.trained.model).save_pretrained(str(folder))
    return shards


def needs_renaming(model: Any) -> bool:
    """Return whether transformers 5 renames this model's weights on disk (mostly mixtures of experts)."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return False
    try:
        return bool(get_model_conversion_mapping(model, add_legacy=False))
    except TypeError:
        return bool(get_model_conversion_mapping(model))


def _write_by_transformers(source: Source, folder: Path, dtype: Any, max_shard_size: str) -> list[Path]:
    say("this model's weights have other names on disk: transformers writes it, with the whole model in memory")
    model = source.blank if source.merged else models.filled(source.blank, source.weights, dtype)
    model.to(dtype).save_pretrained(str(folder), max_shard_size=max_shard_size)
    return sorted(folder.glob("*.safetensors"))


def _check(source: Source, arguments: argparse.Namespace, folder: Path, shards: list[Path], dtype: str) -> str:
    """Return the result of the check. Raises JobError if the new model differs from the checkpoint."""
    if arguments.check == "weights" and not needs_renaming(source.blank):
        return _read_back(source, shards, dtype)
    from transformers import AutoModelForCausalLM

    device = arguments.device
    reference = source.reference
    if reference is None:
        model = models.filled(source.blank, source.weights, models.torch_type("float32"), device)
        reference = comparing.logits(model, source.tokens, device)
        del model
    source.blank.to("meta")
    gc.collect()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=arguments.trust_remote_code, dtype="float32"
        )
    except (OSError, ValueError, KeyError) as error:
        raise models.unreadable("new model", str(folder), error) from error
    usual = max(comparing.TOLERANCES[dtype], comparing.MERGED_TOLERANCE if source.merged else 0.0)
    tolerance = usual if arguments.tolerance is None else arguments.tolerance
    verdict = comparing.compare(reference, comparing.logits(model.eval(), source.tokens, device), tolerance, dtype)
    say(verdict)
    return verdict


def _read_back(source: Source, shards: list[Path], dtype: str) -> str:
    import torch

    names = set()
    for name, read in writing.read_back(shards):
        names.add(name)
        if not torch.equal(read(), writing.cast(source.weights[name].read(), models.torch_type(dtype))):
            raise JobError(f"{name} differs from what was written", "the disk changed it", "try again on another disk")
    if names != set(source.weights):
        raise JobError(
            "the new model lacks weights", f"{len(names)} of {len(source.weights)} were written", "try again"
        )
    verdict = f"{len(names)} weights read back bit by bit; logits were not compared"
    say(verdict)
    return verdict


def _record(folder: Path, source: Source, dtype: str, verdict: str) -> None:
    """Write where the model comes from."""
    record = {"checkpoint": source.trained.weights, "kind": source.trained.kind, "weights": source.what,
              "dtype": dtype, "check": verdict}  # fmt: skip
    files.write_json(folder / RECORD, record)


def _tokens(found: Trained, arguments: argparse.Namespace, config: Any) -> Any:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    tokenizer = None
    folder = Path(arguments.tokenizer or found.model)
    if arguments.tokenizer or any(folder.glob("tokenizer*")):
        tokenizer = _load_tokenizer(str(folder))
    return comparing.sample(tokenizer, text.vocab_size, getattr(text, "max_position_embeddings", None))


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise models.unreadable("tokenizer", name, error) from error


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
