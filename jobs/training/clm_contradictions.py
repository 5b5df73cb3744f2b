"""Arguments that cannot be meant together, refused before anything slow starts."""

from __future__ import annotations

from training.errors import JobError
from training.settings import Settings
from training.text import named
from training.token_cache import documents


def refuse(settings: Settings) -> None:
    """Raise JobError for the first contradiction."""
    _model(settings)
    _data(settings)
    _numbers(settings)


def _model(settings: Settings) -> None:
    name, scratch = settings["model_name_or_path"], settings["config_name"] or settings["model_type"]
    if not name and not scratch:
        raise JobError(
            "no model is named",
            "there are data, but nothing to train on them",
            "--model_name_or_path NAME|FOLDER to continue, --model_type gpt2 or --config_name NAME from scratch",
        )
    if name and settings["config_overrides"]:
        raise JobError(
            "--config_overrides and --model_name_or_path are both given",
            "weights that exist have the shape they have",
            "leave the overrides out, or train from scratch: --model_type or --config_name",
        )
    if name and settings["model_type"]:
        raise JobError(
            "--model_type and --model_name_or_path are both given",
            "the one begins from scratch, the other from weights that exist",
            "leave one out",
        )
    if settings["config_name"] and settings["model_type"]:
        raise JobError(
            "--model_type and --config_name are both given", "either says what kind of model it is", "leave one out"
        )
    if not name and not settings["tokenizer_name"]:
        raise JobError(
            "no tokenizer is named",
            "a model from scratch brings none",
            "--tokenizer_name NAME|FOLDER, or tiny-llama for one made on the spot",
        )


def _data(settings: Settings) -> None:
    files = [settings[name] for name in ("train_file", "validation_file") if settings[name]]
    if not settings["dataset_name"] and not files:
        raise JobError(
            "no data are named",
            f"the model is {settings['model_name_or_path'] or settings['config_name'] or settings['model_type']!r}",
            "--train_file FILE, or --dataset_name NAME|FOLDER|python-docs",
        )
    if settings["dataset_name"] and files:
        raise JobError(
            f"--dataset_name and {files[0]!r} are both given", "the text comes from one of them", "leave one out"
        )
    if settings["do_train"] and not settings["dataset_name"] and not settings["train_file"]:
        raise JobError("there is no text to train on", "only --validation_file is given", "--train_file, or --do_eval")
    for name in files:
        _check_file(name)
    if settings["streaming"] and settings["do_train"] and settings["max_steps"] <= 0:
        raise JobError(
            "--streaming without --max_steps", "nobody knows where a stream ends", "--max_steps N, or no --streaming"
        )
    if settings["streaming"] and settings["data_percentage"] < 100:
        raise JobError(
            "--streaming with --data_percentage", "nobody knows how long a stream is", "--max_steps N bounds it too"
        )


def _check_file(name: str) -> None:
    found = named(name)
    if not found or not found[0].exists():
        what = f"no file matches {name!r}" if "*" in name else f"there is no file {name!r}"
        raise JobError(what, "it is looked for in the container", "is its folder mounted, and its name right?")
    for path in found:
        documents.kind_of(path)


def _numbers(settings: Settings) -> None:
    for name, low, high in (("validation_split_percentage", 0, 100), ("data_percentage", 0, 100)):
        value = settings[name]
        if not low < value <= high or (name.startswith("validation") and value == high):
            raise JobError(f"--{name} {value:g}", "it is a share of the whole", "a number above 0, and up to 100")
    for name in ("block_size", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
        if settings[name] is not None and settings[name] < (2 if name == "block_size" else 1):
            least = "a block has a token to learn from and one to learn" if name == "block_size" else "it counts things"
            raise JobError(f"--{name} {settings[name]}", least, f"--{name} {2 if name == 'block_size' else 1} or more")
