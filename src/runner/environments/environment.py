"""The environment of a container. EDF files are its only source format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.environments.edf import Layer, Mount, find_edf, layer_of
from runner.errors import RunnerError
from runner.expansion import expand
from runner.located_toml import read_toml, refuse_unknown_keys, typed
from runner.project import Project
from runner.site import Origin, Site

MAXIMUM_LEVELS = 10  # of base_environment. Source: CSCS documentation, software/container-engine/edf.md (2026-08-20)
DEFAULT = Origin("default")
_SINGLE = ("image", "workdir", "entrypoint", "writable")


@dataclass(frozen=True)
class Environment:
    """A merged EDF. Every field keeps `${VAR}`: only an engine, or `expand`, replaces it."""

    name: str
    path: Path | None
    """the EDF file; None for an environment made in code"""
    image: str
    """a squashfs path, `[USER@][REGISTRY#]IMAGE[:TAG]`, or empty: no container"""
    workdir: str | None = None
    """None: the image's own working directory"""
    entrypoint: bool = False
    """whether the image's entrypoint runs before the command"""
    writable: bool = True
    """whether the root file system is writable; writes are lost at the end"""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """variables; they override the image's, which override the host's; an empty value unsets a variable"""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """dotted name -> parameter of the engine's hooks"""
    devices: tuple[str, ...] = ()
    """only for Sarus Suite: values of podman's --device"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """where each value came from: "image", "mounts.0", "env.NAME", "annotations.com.hooks.x" """
    replaced: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict, compare=False)
    """where overridden values were set"""

    @property
    def is_squashfs(self) -> bool:
        """Whether the image is a path. Otherwise, it is a name in a registry or in an engine's storage."""
        return (
            self.image.startswith(("/", ".")) or re.match(r"\$\{[^{}]*\}/", self.image) is not None
        )

    def values(self) -> dict[str, str]:
        """Each value as text, by the name that it has in `origins`."""
        switches = {name: str(getattr(self, name)).lower() for name in ("entrypoint", "writable")}
        lists = {"mounts": [mount.text() for mount in self.mounts], "devices": self.devices}
        items = {
            f"{key}.{index}": text
            for key, texts in lists.items()
            for index, text in enumerate(texts)
        }
        tables = {"env": self.env, "annotations": self.annotations}
        items |= {
            f"{key}.{name}": text for key, table in tables.items() for name, text in table.items()
        }
        return {"image": self.image, "workdir": self.workdir or "", **switches, **items}


@dataclass(frozen=True)
class Attachment:
    """What an engine adds to a step so that its command runs inside an environment.

    The step is `srun *flags *prefix COMMAND`, with `exports` exported before it and `files` in the run folder.

    In flags, prefix and exports, the shell of the batch script expands `${NAME}` when it runs.
    `$${NAME}` is the literal text `${NAME}`; every other character is literal. There are no defaults (`${NAME:-x}`).
    """

    files: Mapping[str, str] = field(default_factory=dict)
    """path relative to the run folder -> text"""
    flags: tuple[str, ...] = ()
    """flags of srun"""
    prefix: tuple[str, ...] = ()
    """words in front of the command"""
    exports: Mapping[str, str] = field(default_factory=dict)
    """exported on the host, before the step"""
    notes: tuple[str, ...] = ()
    """warnings for stderr, one line each"""


def load_environment(name: str, project: Project, environ: Mapping[str, str]) -> Environment:
    """Load an environment by name or path, and merge its base environments. Raises RunnerError for any error.

    The last value wins; lists keep each distinct entry.
    """
    layers = tuple(_layers(find_edf(name, project, environ), project, environ, ()))
    path = layers[-1].document.path
    values: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {"mounts": [], "devices": []}
    tables: dict[str, dict[str, str]] = {"env": {}, "annotations": {}}
    origins = dict.fromkeys(_SINGLE, DEFAULT)
    replaced: dict[str, tuple[Origin, ...]] = {}

    def note(field: str, origin: Origin) -> None:
        before = origins.get(field, DEFAULT)
        if before is not DEFAULT:
            replaced[field] = (*replaced.get(field, ()), before)
        origins[field] = origin

    for layer in layers:
        for key in _SINGLE:
            if (value := getattr(layer, key)) is not None:
                values[key] = value
                note(key, layer.origin(key))
        for key, present in lists.items():
            for index, entry in enumerate(getattr(layer, key)):
                if entry not in present:
                    note(f"{key}.{len(present)}", layer.origin(key, str(index)))
                    present.append(entry)
        for key, table in tables.items():
            for entry, text in getattr(layer, key).items():
                table[entry] = text
                keys = layer.annotation_keys[entry] if key == "annotations" else (key, entry)
                note(f"{key}.{entry}", layer.origin(*keys))
    values = {"image": "", **values, **tables}
    for key, entries in lists.items():
        values[key] = tuple(entries)
    values["workdir"] = values.get("workdir") or None  # "" resets the workdir of a base environment
    return Environment(path.stem, path, **values, origins=origins, replaced=replaced)


def _layers(
    path: Path, project: Project, environ: Mapping[str, str], above: tuple[Path, ...]
) -> Iterator[Layer]:
    """The files of an environment, in order of increasing precedence."""
    if path.resolve() in above:
        circle = " -> ".join(str(step) for step in (*above, path.resolve()))
        raise RunnerError(
            f"the base_environment of {above[0]} is circular",
            circle,
            "remove base_environment from one of the files",
        )
    if len(above) > MAXIMUM_LEVELS:
        raise RunnerError(
            f"the base_environment of {above[0]} is nested deeper than {MAXIMUM_LEVELS} levels",
            "the Container Engine does not allow more levels",
            "merge some of the files: runner env emit BASE --as ce -o FILE writes an EDF with all that BASE inherits",
        )
    layer = layer_of(read_toml(path))
    for index, base in enumerate(layer.bases):
        place = layer.document.place("base_environment", str(index))
        try:
            found = find_edf(expand(base, environ, "base_environment"), project, environ)
        except RunnerError as error:
            raise RunnerError(f"{place}: {error.what}", error.why, error.fix) from error
        yield from _layers(found, project, environ, (*above, path.resolve()))
    yield layer


def emit_edf(
    environment: Environment,
    comment: str = "",
    *,
    flag_separator: str = "+",
    sources: str | None = None,
) -> str:
    """The environment as EDF text without base environments.

    `entrypoint` and `writable` are always written, because engines disagree on their defaults; so is the target of
    every mount, because one engine requires it. With `sources`, a comment after each value names its origin: the file
    and line, the default, or `sources` itself (`site NAME`) for values that are in no file.
    Source: CSCS documentation, software/container-engine/edf.md, and sarus-suite/raster, src/lib.rs (2026-08-20).
    """

    def remark(field: str) -> str:
        origin = environment.origins.get(field, sources or "")
        return "" if sources is None else f"  # {_one_line(str(origin))}".rstrip(" #")

    lines = [f"# {_one_line(line)}".rstrip() for line in comment.split("\n")] if comment else []
    if environment.image:
        lines.append(f"image = {quoted(environment.image)}{remark('image')}")
    if environment.workdir:
        lines.append(f"workdir = {quoted(environment.workdir)}{remark('workdir')}")
    lines.append(f"entrypoint = {str(environment.entrypoint).lower()}{remark('entrypoint')}")
    lines.append(f"writable = {str(environment.writable).lower()}{remark('writable')}")
    if environment.mounts:
        texts = [quoted(mount.text(flag_separator)) for mount in environment.mounts]
        lines += [
            "mounts = [",
            *(f"  {text},{remark(f'mounts.{i}')}" for i, text in enumerate(texts)),
            "]",
        ]
    if environment.devices:
        devices = ", ".join(quoted(device) for device in environment.devices)
        lines.append(f"devices = [{devices}]{remark('devices.0')}")
    if environment.env:
        lines += ["", "[env]"]
        lines += [
            f"{toml_key(name)} = {quoted(text)}{remark(f'env.{name}')}"
            for name, text in environment.env.items()
        ]
    if environment.annotations:
        lines += ["", "[annotations]"]
        lines += [
            f"{line}{remark(f'annotations.{name}')}"
            for name, line in _annotation_lines(environment.annotations)
        ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Text for a TOML comment: without line breaks and control characters."""
    return text if text.isprintable() else repr(text)[1:-1]


def _annotation_lines(annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in annotations.items():
        # a TOML key cannot be both a string and a table: if one name is a prefix of another, quote the longer one as a
        # whole
        clash = any(name.startswith(f"{other}.") for other in annotations)
        key = quoted(name) if clash else ".".join(toml_key(part) for part in name.split("."))
        yield name, f"{key} = {quoted(value)}"


def toml_key(name: str) -> str:
    """Text as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


def quoted(text: str) -> str:
    """Text as a TOML basic string, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def default_environment(project: Project, site: Site) -> tuple[str, str]:
    """(the default environment, the reason). Raises RunnerError for a misspelt key in runner.toml."""
    settings = project.root / "runner.toml" if project.root else None
    if settings and settings.is_file():
        document = read_toml(settings)
        refuse_unknown_keys(document, (), ("environment", "budget"), "project")
        name = typed(document, ("environment",), str)
        if name:
            return name, f"the default of {settings.name}"
    if site.is_local:
        return "cpu", "the default without a scheduler"
    if site.engine == "host":
        return "host", "the default without a container"
    return "ngc-ds", "the default"
