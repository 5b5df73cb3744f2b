"""Find, read and judge environment definition files (EDF) by the documents of the Container Engine."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lab.container.expand import expand
from tests.lab.container.request import Refusal, Request, check_image, parse_mount

KINDS: dict[str, type] = {
    "image": str, "workdir": str, "entrypoint": bool, "writable": bool,
    "mounts": list, "devices": list, "env": dict, "annotations": dict,
}  # fmt: skip
SYSTEM_PATH = "/etc/edf"
MAX_LEVELS = 10
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def find(name: str, here: str, environ: Mapping[str, str]) -> Path:
    """The file that `--environment=NAME` means: a path, or a name looked up in EDF_PATH, then system-wide."""
    if name.startswith(("/", ".")):
        path = Path(here, name)
        if path.is_file():
            return path
        raise Refusal(f"environment file not found: {path}")
    if "/" in name:
        raise Refusal(f"environment {name!r} is neither an absolute path, nor ./RELATIVE, nor a name")
    home = environ.get("HOME", "/nonexistent")
    folders = (environ.get("EDF_PATH") or f"{home}/.edf").split(":")
    for folder in (*folders, SYSTEM_PATH):
        if not folder.startswith("/"):
            raise Refusal(f"EDF_PATH: not an absolute path: {folder!r}")
        path = Path(folder, f"{name}.toml")
        if path.is_file():
            return path
    raise Refusal(f"environment {name!r} not found in {':'.join((*folders, SYSTEM_PATH))}")


def load(name: str, here: str, environ: Mapping[str, str], level: int = 1) -> dict[str, Any]:
    """The EDF's table with everything it inherits: env and annotations merged, mounts joined, scalars overridden."""
    if level > MAX_LEVELS:
        raise Refusal(f"base_environment: more than {MAX_LEVELS} levels of inheritance at {name!r}")
    path = find(name, here, environ)
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refusal(f"{path}: {error}") from error
    bases = table.pop("base_environment", [])
    if isinstance(bases, str):
        bases = [bases] if bases else []
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise Refusal(f"{path}: base_environment must be a string or an array of strings")
    _judge(table, path)
    merged: dict[str, Any] = {}
    for base in bases:
        _merge(merged, load(base, here, environ, level + 1))
    _merge(merged, table)
    return merged


def _judge(table: Mapping[str, Any], path: Path) -> None:
    for key, value in table.items():
        if key not in KINDS:
            raise Refusal(f"{path}: unknown key {key!r}")
        if not isinstance(value, KINDS[key]):
            raise Refusal(f"{path}: {key} must be of type {KINDS[key].__name__}, not {type(value).__name__}")
        if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
            raise Refusal(f"{path}: {key} must be an array of strings")
    for name, value in table.get("env", {}).items():
        if not isinstance(value, str):
            raise Refusal(f"{path}: env.{name} must be a string, not {value!r}")
        if not VARIABLE.match(name):
            raise Refusal(f"{path}: env: {name!r} is not the name of a variable")
        if "\0" in value:
            raise Refusal(f"{path}: env.{name} contains a NUL character")
    _judge_annotations(table.get("annotations", {}), path, "annotations")


def _judge_annotations(table: Mapping[str, Any], path: Path, where: str) -> None:
    for name, value in table.items():
        if isinstance(value, dict):
            _judge_annotations(value, path, f"{where}.{name}")
        elif not isinstance(value, str):
            raise Refusal(f"{path}: {where}.{name} must be a string, not {value!r}")


def _annotation(table: Mapping[str, Any], name: str) -> str:
    """The value of an annotation, however its dots were spread over tables; "" where it is not there."""
    for key, value in table.items():
        if key == name and isinstance(value, str):
            return value
        if isinstance(value, dict) and name.startswith(f"{key}."):
            return _annotation(value, name.removeprefix(f"{key}."))
    return ""


def _merge(merged: dict[str, Any], table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _merge(merged.setdefault(key, {}), value)
        elif isinstance(value, list):
            merged[key] = list(dict.fromkeys([*merged.get(key, []), *value]))
        else:
            merged[key] = value


def image_path(table: Mapping[str, Any], here: str, environ: Mapping[str, str], lenient: bool) -> str:
    """The absolute path of the squashfs file, or "" where the EDF names no image."""
    image = expand(table.get("image", ""), environ, "image", lenient)
    return os.path.normpath(Path(here, check_image(image, "image"))) if image else ""


def request(
    table: Mapping[str, Any], here: str, environ: Mapping[str, str], image_env: Mapping[str, str], lenient: bool = False
) -> Request:
    """The container that the merged table asks for; variables come from the host and, before it, from the image."""
    variables = {**environ, **image_env}

    def full(text: str, where: str) -> str:
        return expand(text, variables, where, lenient)

    mounts = []
    for text in table.get("mounts", []):
        mount = parse_mount(full(text, "mounts"), "mounts")
        if mount.source != "tmpfs" and not mount.source.startswith(("/", ".", "${")):
            raise Refusal(f"mounts: the source must be an absolute path or begin with ./: {text}")
        if not mount.target.startswith(("/", "${")):
            raise Refusal(f"mounts: the target must be an absolute path: {text}")
        mounts.append(mount)
    return Request(
        image=image_path(table, here, environ, lenient),
        workdir=full(table.get("workdir", ""), "workdir"),
        writable=table.get("writable", True),
        entrypoint=table.get("entrypoint", False),
        mounts=tuple(mounts),
        env={name: full(value, f"env.{name}") for name, value in table.get("env", {}).items()},
        remap_torch=_annotation(table.get("annotations", {}), "com.pyxis.pytorch_remap_vars") == "true",
    )
