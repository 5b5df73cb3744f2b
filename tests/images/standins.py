"""Tiny wheels that stand in for packages that cannot be had in a test: NGC's torch, DeepSpeed's compiled ops."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Path:
    """Write a pure-Python wheel with real metadata; `files`: path in site-packages -> text. Source: PEP 427."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    contents = {
        **(files or {f"{module}/__init__.py": f'__version__ = "{version}"\n'}),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: standins\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in contents.items():
            wheel.writestr(inside, text)
    return path
