"""A single EDF file: how it is found and what it contains, before base environments are merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.environments.mount import Mount, parse_mount
from runner.errors import RunnerError, unknown
from runner.expansion import parts
from runner.located_toml import Document, refuse_unknown_keys, string_table, strings, typed, wrong_type
from runner.project import Project
from runner.site import Origin
from runner.toml_lines import Keys

KEYS = ("base_environment", "image", "workdir", "entrypoint", "writable", "mounts", "env", "annotations", "devices")
SYSTEM_FOLDER = Path("/etc/edf")


class Layer(NamedTuple):
    """The content of one EDF file. None or empty: the file does not set that key."""

    document: Document
    bases: tuple[str, ...]
    image: str | None
    workdir: str | None
    entrypoint: bool | None
    writable: bool | None
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    annotations: Mapping[str, str]
    """by dotted name"""
    annotation_keys: Mapping[str, Keys]
    """the keys of each annotation in the file, however they are dotted, nested and quoted"""
    devices: tuple[str, ...]

    def origin(self, *keys: str) -> Origin:
        """The line of a value in this file."""
        return Origin("", "", self.document.place(*keys))


def search_folders(project: Project, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders in which NAME is looked up: the project's edf/, EDF_PATH (or else ~/.edf), shipped, the system's.

    Source: CSCS documentation, software/container-engine/run.md: EDF_PATH replaces ~/.edf (2026-08-20).
    """
    own = (project.root / "edf",) if project.root else ()
    if environ.get("EDF_PATH"):
        personal = tuple(Path(folder) for folder in environ["EDF_PATH"].split(":") if folder)
    else:
        personal = (Path(environ["HOME"]) / ".edf",) if environ.get("HOME") else ()
    return tuple(dict.fromkeys((*own, *personal, project.shipped / "edf", SYSTEM_FOLDER)))


def find_edf(name: str, project: Project, environ: Mapping[str, str]) -> Path:
    """The file of an environment: `NAME`, `NAME.toml`, `./path`, or an absolute path.

    Raises RunnerError that lists the known names.
    """
    if "/" in name or name.startswith((".", "~")):
        path = Path(name).expanduser()
        candidates = [path] if path.is_absolute() else [project.start / path]
        candidates += [candidate.with_name(f"{candidate.name}.toml") for candidate in candidates]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise RunnerError(
            f"environment file {name!r} not found", f"{candidates[0]} does not exist", "check the path; a name "
            "without a slash is looked up in edf/, EDF_PATH and ~/.edf"
        )  # fmt: skip
    stem = name.removesuffix(".toml")
    folders = search_folders(project, environ)
    for folder in folders:
        if (folder / f"{stem}.toml").is_file():
            return folder / f"{stem}.toml"
    if name != stem and (project.start / name).is_file():
        return project.start / name  # Sarus Suite treats NAME.toml as a path
    names = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    raise unknown("environment", stem, names, f"create edf/{stem}.toml, or give the path of an EDF: ./FILE.toml")


def layer_of(document: Document) -> Layer:
    """The content of a parsed EDF. Raises RunnerError, with the line, for the first error."""
    refuse_unknown_keys(document, (), KEYS, "EDF")
    base = document.get("base_environment")
    bases = (typed(document, ("base_environment",), str, ""),) if not isinstance(base, list) else ()
    annotations = _annotations(document)
    layer = Layer(
        document=document,
        bases=tuple(name for name in bases or strings(document, ("base_environment",)) if name),
        image=typed(document, ("image",), str),
        workdir=typed(document, ("workdir",), str),
        entrypoint=typed(document, ("entrypoint",), bool),
        writable=typed(document, ("writable",), bool),
        mounts=tuple(
            parse_mount(_checked(document, text, "mounts", str(index)), str(document.place("mounts", str(index))))
            for index, text in enumerate(strings(document, ("mounts",)))
        ),
        env=string_table(document, ("env",)),
        annotations={name: document.get(*keys) for name, keys in annotations.items()},
        annotation_keys=annotations,
        devices=strings(document, ("devices",)),
    )
    _check_texts(layer)
    return layer


def _annotations(document: Document) -> dict[str, Keys]:
    """The keys of each annotation, by its dotted name."""
    found: dict[str, Keys] = {}
    for keys in _leaves(document, ("annotations",)):
        name = ".".join(keys[1:])
        if name in found:
            raise RunnerError(
                f"{document.place(*keys)}: the annotation {name} is set twice",
                f"{document.place(*found[name])} also sets this annotation, in another TOML notation",
                "remove one of the two",
            )
        found[name] = keys
    return found


def _leaves(document: Document, keys: Keys) -> Iterator[Keys]:
    for name, value in typed(document, keys, dict, {}).items():
        if isinstance(value, dict):
            yield from _leaves(document, (*keys, name))
        elif isinstance(value, str):
            _checked(document, value, *keys, name)
            yield (*keys, name)
        else:
            raise wrong_type(document, (*keys, name), "text")


def _check_texts(layer: Layer) -> None:
    for key in ("image", "workdir"):
        _checked(layer.document, getattr(layer, key) or "", key)
    for index, device in enumerate(layer.devices):
        _checked(layer.document, device, "devices", str(index))
    for name, value in layer.env.items():
        _checked(layer.document, value, "env", name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
            raise RunnerError(
                f"{layer.document.place('env', name)}: {name!r} is not a variable name",
                "a name consists of letters, digits, `_`, `.` and `-`, and does not begin with a digit",
                'write NAME = "value"',
            )


def _checked(document: Document, text: str, *keys: str) -> str:
    """The text, unchanged. Raises RunnerError for an invalid variable reference or a NUL byte."""
    place = document.place(*keys)
    if "\0" in text:
        raise RunnerError(
            f"{place}: {'.'.join(keys)} contains a NUL byte",
            "the arguments and variables of a program cannot contain NUL",
            "remove the NUL byte; put binary data into a file and mount it",
        )
    parts(text, f"{'.'.join(keys)} ({place})")
    return text
