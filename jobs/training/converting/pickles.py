"""Read files of torch.save without running anything that they name.

A pickle can call any function that it names. This reader resolves the short list below, which is what tensors are made
of. Every other name, such as a class of DeepSpeed, becomes an empty `Placeholder`. DeepSpeed need not be installed,
and tensors stay on disk until they are read.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

from training.errors import JobError

BUILTINS = ("set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "slice", "bytearray")
REBUILD = ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
ALLOWED = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("_codecs", "encode"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "device"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"),
    *(("torch._utils", f"_rebuild_{name}") for name in REBUILD),
    *((module, name) for module in ("builtins", "__builtin__") for name in BUILTINS),
}


class Placeholder:
    """An object of a class that is not loaded. `arguments` is what it was made of: the value or name of an enum."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any, **_named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


def _member(owner: Any, name: str) -> Placeholder:
    """Return a member of an enum that is not loaded: Python 3.11.0 to 3.11.3 pickle one as `getattr(ENUM, "NAME")`."""
    if not (isinstance(owner, type) and issubclass(owner, Placeholder)):
        raise pickle.UnpicklingError(f"the file refers to the attribute {name!r} of {owner!r}")
    return owner(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if "." in name:
            raise pickle.UnpicklingError(
                f"the file refers to {name!r} of {module}, and no checkpoint needs a name with a dot"
            )
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _member
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        return type(name, (Placeholder,), {})


_PICKLES: Any = types.ModuleType("pickles")
_PICKLES.Unpickler = _Unpickler
_PICKLES.UnpicklingError = pickle.UnpicklingError


def load(path: Path) -> Any:
    """Return what a file holds; its tensors are views of the file. Raises JobError where it cannot be read."""
    import torch

    try:
        if "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
            raise pickle.UnpicklingError("the file is a TorchScript program")  # torch.load would load its code
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLES)
    except Exception as error:  # a damaged or hostile pickle can raise anything
        if not path.exists():
            raise JobError(f"{path} is missing", "the checkpoint is incomplete", "pass another checkpoint") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JobError(f"cannot read {path}", lines[0], "pass another checkpoint if this one is damaged") from error
