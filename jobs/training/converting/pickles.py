"""Files of torch.save, opened without running anything that they name.

A checkpoint of DeepSpeed is a pickle that names DeepSpeed's own classes (a loss scaler, say). Here they become empty
shells: nothing of the file is executed, DeepSpeed is not needed, and tensors stay on disk until they are read.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

from training.errors import JobError

REAL = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("_codecs", "encode"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"),
    *(("builtins", name) for name in ("set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "slice")),
}


class Shell:
    """Stands for an object that is of no use here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.words = args  # of an enumeration its value

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in REAL or _is_of_tensors(module, name):
            return super().find_class(module, name)
        return type(name, (Shell,), {})


def _is_of_tensors(module: str, name: str) -> bool:
    """Storages, dtypes, and the functions that put a tensor together."""
    if module == "torch._utils":
        return name.startswith("_rebuild_")
    return module in ("torch", "torch.storage") and (name.endswith("Storage") or name.islower())


_PICKLES: Any = types.ModuleType("pickles")
_PICKLES.Unpickler = _Unpickler
_PICKLES.UnpicklingError = pickle.UnpicklingError


def load(path: Path) -> Any:
    """Return what a file holds; its tensors are views of the file. Raises JobError where it cannot be read."""
    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLES)
    except FileNotFoundError as error:
        raise JobError(f"{path} is missing", "the checkpoint is not whole", "name another checkpoint") from error
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JobError(f"cannot read {path}", lines[0], "is it whole? name another checkpoint") from error
