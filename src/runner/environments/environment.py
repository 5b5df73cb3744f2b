"""What a container sees, as one frozen noun. An EDF file is its only source format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.environments.edf import Layer, as_data, find_edf, read_layer
from runner.environments.mount import Mount, parse_mount
from runner.errors import RunnerError
from runner.expansion import expand
from runner.project import Project
from runner.site import Origin

__all__ = ["Environment", "Mount", "emit_edf", "expand", "load_environment", "parse_mount"]

MAXIMUM_LEVELS = 10  # of base_environment. Source: CSCS documentation, software/container-engine/edf.md (2026-08-20)
DEFAULT = Origin("default")


@dataclass(frozen=True)
class Environment:
    """A merged EDF. `${VAR}` stays literal in every field: only an engine, or `expand`, puts values in."""

    name: str
    path: Path | None
    """the EDF file; None for an environment made in code"""
    image: str
    """a squashfs path, `[USER@][REGISTRY#]IMAGE[:TAG]`, or empty: no container is entered"""
    workdir: str | None = None
    """None: the image's own"""
    entrypoint: bool = False
    """whether the image's entrypoint runs in front of the command"""
    writable: bool = True
    """whether the root file system takes writes, which are lost at the end"""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """wins over the image's variables, which win over the host's; an empty value unsets"""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """parameters of the engine's hooks, by dotted name"""
    devices: tuple[str, ...] = ()
    """Sarus Suite's: values of podman's --device"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """where each value came from: "image", "mounts.0", "env.NAME", "annotations.com.hooks.x" """

    @property
    def is_squashfs(self) -> bool:
        """Whether the image is a path; anything else is a name in a registry or in an engine's storage."""
        return self.image.startswith(("/", ".")) or re.match(r"\$\{[^{}]*\}/", self.image) is not None


def load_environment(name: str, project: Project, environ: Mapping[str, str]) -> Environment:
    """The environment of a name or path, its base environments merged in. Raises RunnerError for any fault."""
    layers = tuple(_layers(find_edf(name, project, environ), project, environ, ()))
    path = layers[-1].document.path
    values: dict[str, Any] = {"image": ""}
    origins = {key: DEFAULT for key in ("image", "workdir", "entrypoint", "writable")}
    mounts: dict[Mount, Origin] = {}
    devices: dict[str, Origin] = {}
    tables: dict[str, dict[str, str]] = {"env": {}, "annotations": {}}
    for layer in layers:
        for key, value in as_data(layer).items():
            values[key], origins[key] = value, layer.origin(key)
        for index, mount in enumerate(layer.mounts):
            mounts.setdefault(mount, layer.origin("mounts", str(index)))
        for index, device in enumerate(layer.devices):
            devices.setdefault(device, layer.origin("devices", str(index)))
        for table, content in tables.items():
            for key, value in getattr(layer, table).items():
                content[key] = value
                origins[f"{table}.{key}"] = layer.origin(table, *_annotation_keys(layer, table, key))
    origins |= {f"mounts.{index}": origin for index, origin in enumerate(mounts.values())}
    origins |= {f"devices.{index}": origin for index, origin in enumerate(devices.values())}
    return Environment(
        name=path.stem,
        path=path,
        **values,
        env=tables["env"],
        annotations=tables["annotations"],
        mounts=tuple(mounts),
        devices=tuple(devices),
        origins=origins,
    )


def _annotation_keys(layer: Layer, table: str, key: str) -> tuple[str, ...]:
    """The keys under which a dotted annotation stands in its file."""
    dotted = tuple(key.split("."))
    return dotted if table == "annotations" and (table, *dotted) in layer.document.lines else (key,)


def _layers(path: Path, project: Project, environ: Mapping[str, str], above: tuple[Path, ...]) -> Iterator[Layer]:
    """The files that make an environment, the one that counts most last."""
    if path.resolve() in above:
        circle = " -> ".join(str(step) for step in (*above, path.resolve()))
        raise RunnerError(f"the base_environment of {above[0]} goes round in a circle", circle, "cut it at one of them")
    if len(above) > MAXIMUM_LEVELS:
        raise RunnerError(
            f"the base_environment of {above[0]} is nested deeper than {MAXIMUM_LEVELS} levels",
            "the Container Engine refuses that",
            "merge some of them: runner env emit",
        )
    layer = read_layer(path)
    for base in layer.bases:
        try:
            found = find_edf(base, project, environ)
        except RunnerError as error:
            place = layer.document.place("base_environment")
            raise RunnerError(f"{place}: {error.what}", error.why, error.fix) from error
        yield from _layers(found, project, environ, (*above, path.resolve()))
    yield layer


def emit_edf(environment: Environment, comment: str = "", *, flag_separator: str = "+") -> str:
    """The environment as EDF text that stands alone.

    `entrypoint` and `writable` are always written, since the engines disagree on their defaults; so is the target of
    every mount, since one engine asks for it. Source: CSCS documentation, software/container-engine/edf.md, and
    sarus-suite/raster, src/lib.rs (2026-08-20).
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    if environment.image:
        lines.append(f"image = {quoted(environment.image)}")
    if environment.workdir is not None:
        lines.append(f"workdir = {quoted(environment.workdir)}")
    lines.append(f"entrypoint = {str(environment.entrypoint).lower()}")
    lines.append(f"writable = {str(environment.writable).lower()}")
    if environment.mounts:
        lines += ["mounts = [", *(f"  {quoted(mount.text(flag_separator))}," for mount in environment.mounts), "]"]
    if environment.devices:
        lines.append(f"devices = [{', '.join(quoted(device) for device in environment.devices)}]")
    if environment.env:
        lines += ["", "[env]", *(f"{_key(name)} = {quoted(value)}" for name, value in environment.env.items())]
    if environment.annotations:
        lines += ["", "[annotations]", *_annotation_lines(environment.annotations)]
    return "\n".join(lines) + "\n"


def _annotation_lines(annotations: Mapping[str, str]) -> Iterator[str]:
    for name, value in annotations.items():
        # TOML has no key that is text and table at once: the longer of two such names is quoted whole
        clash = any(name.startswith(f"{other}.") for other in annotations)
        key = quoted(name) if clash else ".".join(_key(part) for part in name.split("."))
        yield f"{key} = {quoted(value)}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quoted(text: str) -> str:
    """Text as a TOML basic string."""

    def escape(match: re.Match[str]) -> str:
        return _ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}")

    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', escape, text) + '"'
