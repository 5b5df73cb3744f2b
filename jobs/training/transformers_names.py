"""What names transformers has, remembered: at each start it reads 1,700 files of models to find out, and does it twice.

A second of processor time, and more where the image is cold. Read in transformers 4.57 and 5.23, utils/import_utils.py:
`define_import_structure` reads source files alone, so that its answer hangs on their bytes and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from training import files

MODULE, FUNCTION = "transformers.utils.import_utils", "define_import_structure"


def remember(cache: Path) -> None:
    """Let transformers, which is not imported yet, find its names in `cache`; where anything is amiss, as it ever did.

    Its files count as they were installed: by the digests in the installation's own list.
    """
    key = _installed()
    if key and MODULE not in sys.modules and cache.is_dir():
        sys.meta_path.insert(0, _Hook(cache / "imports", key))


def _installed() -> str:
    """Return a digest of the list of installed files with their digests; nothing where the files lie elsewhere."""
    spec = PathFinder.find_spec("transformers")
    for folder in spec.submodule_search_locations or () if spec else ():
        for listed in Path(folder).parent.glob("transformers-*.dist-info/RECORD"):
            text = listed.read_bytes()
            if b"\ntransformers/models/__init__.py,sha256=" in text:
                return hashlib.sha256(text).hexdigest()[:20]
    return ""


class _Hook(importlib.abc.MetaPathFinder):
    """Puts the remembering function in its place as soon as there is one; after that it is gone."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            look = getattr(module, FUNCTION, None)
            if look is not None:
                setattr(module, FUNCTION, remembering(look, Path(str(module.__file__)), self.folder, self.key))

        loader.exec_module = exec_module
        return spec


def remembering(look: Callable[..., Any], module: Path, folder: Path, key: str) -> Callable[..., Any]:
    """Return a function with the answers of `look`; those on the whole folder of models are kept in `folder`."""
    models = module.parents[1] / "models"

    def found(module_path: Any, prefix: str | None = None) -> Any:
        path = Path(module_path)
        if path not in (models, models / "__init__.py"):
            return look(module_path, prefix)
        note = folder / f"transformers-{key}{f'-{prefix}' if prefix else ''}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return {
                frozenset(needs): {name: set(objects) for name, objects in modules.items()}
                for needs, modules in json.loads(note.read_text(encoding="utf-8"))
            }
        answer = look(module_path, prefix)
        with contextlib.suppress(OSError, TypeError, AttributeError):
            plain = [
                (sorted(needs), {name: sorted(objects) for name, objects in modules.items()})
                for needs, modules in answer.items()
            ]
            files.write_text(note, json.dumps(plain))
        return answer

    return found
