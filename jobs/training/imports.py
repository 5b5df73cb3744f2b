"""A quicker start: optional packages that a command line does not use are not looked at, and nothing is collected.

transformers and accelerate import each of peft, datasets (with pandas and pyarrow), scikit-learn and deepspeed where it
is installed, whether it is used or not: a quarter of the time to import a Trainer. Measured with transformers 5.23.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from training import processes


class _Hidden(importlib.abc.MetaPathFinder):
    """Says to libraries that some packages are not installed; what the scripts themselves import is there."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package in self.names:
            if not _asked_by_us():
                raise ModuleNotFoundError(f"{name} is left out: this command line does not use it", name=name)
            self.names.clear()  # one may need the other
        return None


def _asked_by_us() -> bool:
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("training", "__main__")


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
    """Import what every training needs; to libraries the `unused` packages are not there, now and later."""
    hide(unused)
    gc.disable()  # the objects of modules stay; each collection would look at all of them again
    try:
        processes.settle_device(os.environ)
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
    hidden = _Hidden(set(names) - set(sys.modules))
    if not hidden.names:
        return
    sys.meta_path.insert(0, hidden)
    look = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in hidden.names else look(name, package)

    importlib.util.find_spec = find_spec
