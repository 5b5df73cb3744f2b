"""A quicker start: optional packages that a command line does not use are not looked at, and nothing is collected.

transformers and accelerate import each of peft, datasets (with pandas and pyarrow), scikit-learn and deepspeed where it
is installed, whether it is used or not: a quarter of the time to import a Trainer. Measured with transformers 5.23.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Hidden(importlib.abc.MetaPathFinder):
    """Says of some packages that they are not installed."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is left out: this command line does not use it", name=name)
        return None


def unused_by_clm(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the optional packages that a command line of clm does not need: only what is certain.

    The demo (no arguments) and a YAML file may ask for any of them.
    """
    given = {word.partition("=")[0].replace("-", "_").lstrip("_") for word in argv if word.startswith("--")}
    text_is_files = "train_file" in given and not given & {"dataset_name", "streaming"}
    from_scratch = not given & {"model_name_or_path"} and bool(given & {"config_name", "model_type"})
    if "config" in given or not (text_is_files or from_scratch):
        return ()
    return (
        *(("datasets",) if text_is_files else ()),
        *(("peft", "bitsandbytes") if from_scratch else ()),
        *(("deepspeed",) if "deepspeed" not in given else ()),
        "sklearn",
    )


def prepare(unused: Iterable[str]) -> None:
    """Import what every training needs, without the `unused` packages, for good: later imports of them fail."""
    hide(unused)
    gc.disable()  # the objects of modules stay; each collection would look at all of them again
    try:
        from transformers import (  # noqa: F401
            AutoConfig,
            AutoModelForCausalLM,
            AutoTokenizer,
            HfArgumentParser,
            Trainer,
            TrainingArguments,
            default_data_collator,
        )
    finally:
        gc.enable()
        gc.freeze()


def hide(names: Iterable[str]) -> None:
    """Let packages look as if they were not installed; those that are imported already stay."""
    hidden = frozenset(names) - set(sys.modules)
    if not hidden:
        return
    sys.meta_path.insert(0, _Hidden(hidden))
    look = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in hidden else look(name, package)

    importlib.util.find_spec = find_spec
