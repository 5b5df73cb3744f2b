"""A single EDF file: how it is found and what it contains, before base environments are merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runner.errors import RunnerError, unknown
from runner.expansion import parts
from runner.located_toml import (
    Document,
    Keys,
    refuse_unknown_keys,
    string_table,
    strings,
    typed,
    wrong_type,
)
from runner.machine import files
from runner.project import Project
from runner.site import Origin

# a colon inside `${VAR:-x}` is not a separator
_FIELDS = re.compile(r"(?:\$\{(?:[^{}]|\$\{[^{}]*\})*\}|[^:])*")


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host, or (flag `sqsh`) the content of a squashfs file, mounted in the container."""

    source: str
    target: str
    flags: tuple[str, ...] = ()

    def text(self, separator: str = "+") -> str:
        """`SOURCE:TARGET[:FLAGS]`. Separator of flags: `+` for the Container Engine, `,` for Sarus Suite and podman."""
        fields = [self.source, self.target]
        if self.flags:
            fields.append(separator.join(self.flags))
        return ":".join(fields)

    @property
    def read_only(self) -> bool:
        """Whether the mount is read-only."""
        return "ro" in self.flags or "sqsh" in self.flags


def split_fields(text: str) -> tuple[str, ...]:
    """The text split at each colon outside `${VAR:-default}`."""
    fields, position = [], 0
    while True:
        match = _FIELDS.match(text, position)
        assert match is not None  # the pattern matches the empty text too
        fields.append(match[0])
        position = match.end() + 1
        if position > len(text):
            return tuple(fields)


def parse_mount(text: str, where: str = "") -> Mount:
    """The mount that a text describes. Without a target, the source's path is the target; flags are joined with
    `+` (Container Engine, pyxis) or `,` (Sarus Suite). Raises RunnerError that begins with `where`."""
    fields = split_fields(text)
    what = f"{where}: " if where else ""
    if len(fields) > 3 or not all(fields):
        raise RunnerError(
            f"{what}cannot read the mount {text!r}",
            "a mount must have the form SOURCE[:TARGET[:FLAG+FLAG]], without empty fields",
            "'${SCRATCH}/data:/data:ro'",
        )
    source, target = fields[0], fields[1] if len(fields) > 1 else fields[0]
    for field in fields:
        parts(field, f"{what}the mount {text!r}")
    for role, path, begins in (
        ("source", source, ("/", ".", "${")),
        ("target", target, ("/", "${")),
    ):
        if not path.startswith(begins):
            raise RunnerError(
                f"{what}cannot read the mount {text!r}",
                f"the {role} {path!r} must begin with {' or '.join(begins)}",
                _advice(role, path),
            )
    flags = tuple(re.split(r"[+,]", fields[2])) if len(fields) > 2 else ()
    if not all(flags):
        raise RunnerError(
            f"{what}cannot read the mount {text!r}",
            "one of its flags is empty",
            f"'{source}:{target}:ro'",
        )
    return Mount(source, target, flags)


def _advice(role: str, path: str) -> str:
    if path == "~" or path.startswith("~/"):
        return f"write ${{HOME}}{path[1:]}"
    if found := re.match(r"\$(\w+)(?=/|$)", path):
        return f"put the variable in braces: ${{{found[1]}}}"
    if path.startswith(("~", "$")):
        return "write the absolute path itself; only ${NAME} and ${NAME:-DEFAULT} are replaced"
    if role == "source":
        return f"write ./{path}, relative to the folder in which the job starts"
    return f"write /{path}"


KEYS = (
    "base_environment",
    "image",
    "workdir",
    "entrypoint",
    "writable",
    "mounts",
    "env",
    "annotations",
    "devices",
)
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
        _refuse_image(name, candidates[0])
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise RunnerError(
            f"environment file {name!r} not found",
            f"{candidates[0]} is not a file",
            "check the path; runner looks up a name without a slash in edf/ and in EDF_PATH (if it is not set: ~/.edf)",
        )
    stem = name.removesuffix(".toml")
    # another user's folder may be closed
    folders = tuple(filter(files.exists, search_folders(project, environ)))
    for folder in folders:
        path = folder / f"{stem}.toml"
        if files.exists(path) and path.is_file():
            return path
    if name != stem and (project.start / name).is_file():
        return project.start / name  # Sarus Suite treats NAME.toml as a path
    _refuse_image(name, project.start / name)
    names = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    raise unknown(
        "environment",
        stem,
        names,
        f"create edf/{stem}.toml, or give the path of an EDF: ./FILE.toml",
    )


def _refuse_image(name: str, path: Path) -> None:
    """Raise RunnerError where an image is named as an environment, as `enroot start` and pyxis accept it."""
    if path.suffix in (".sqsh", ".squashfs", ".sif") and files.is_file(path):
        edf = f"./edf/{path.stem}.toml"
        fix = f"""mkdir -p edf && echo 'image = "{path.resolve()}"' >{edf}; then name the environment {edf}"""
        if path.suffix == ".sif":
            fix = "runner cannot run .sif files: import the image that it was made of: runner import docker://…"
        raise RunnerError(
            f"{name} is an image, not an environment",
            "an environment is an EDF, a TOML file that names the image and its mounts",
            fix,
        )


def layer_of(document: Document) -> Layer:
    """The content of a parsed EDF. Raises RunnerError, with the line, for the first error."""
    refuse_unknown_keys(document, (), KEYS, "EDF")
    base = document.get("base_environment")
    bases = (typed(document, ("base_environment",), str, ""),) if not isinstance(base, list) else ()
    annotations, mounts = _annotations(document), strings(document, ("mounts",))
    layer = Layer(
        document=document,
        bases=tuple(name for name in bases or strings(document, ("base_environment",)) if name),
        image=typed(document, ("image",), str),
        workdir=typed(document, ("workdir",), str),
        entrypoint=typed(document, ("entrypoint",), bool),
        writable=typed(document, ("writable",), bool),
        mounts=(),
        env=string_table(document, ("env",)),
        annotations={name: document.get(*keys) for name, keys in annotations.items()},
        annotation_keys=annotations,
        devices=strings(document, ("devices",)),
    )
    _check_texts(document)
    places = (str(document.place("mounts", str(index))) for index in range(len(mounts)))
    return layer._replace(mounts=tuple(map(parse_mount, mounts, places)))


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
            yield (*keys, name)
        else:
            raise wrong_type(document, (*keys, name), "text")


def texts(document: Document) -> Iterator[tuple[Keys, str]]:
    """(keys, text) of each text in which engines expand variables."""

    def walk(keys: Keys, value: Any) -> Iterator[tuple[Keys, str]]:
        if isinstance(value, str):
            yield keys, value
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                yield from walk((*keys, name), inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from walk((*keys, str(index)), inner)

    for key in KEYS:
        if key != "base_environment" and key in document.data:
            yield from walk((key,), document.data[key])


def _check_texts(document: Document) -> None:
    """Raise RunnerError for an invalid variable reference, a NUL byte, or a wrong name in [env]."""
    for keys, text in texts(document):
        place, field = document.place(*keys), ".".join(keys)
        if "\0" in text:
            raise RunnerError(
                f"{place}: {field} contains a NUL byte",
                "the arguments and variables of a program cannot contain NUL",
                "remove the NUL byte; put binary data into a file and mount it",
            )
        parts(text, f"{field} ({place})")
        if keys[0] == "env" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", keys[1]):
            raise RunnerError(
                f"{place}: {keys[1]!r} is not a variable name",
                "a name begins with a letter or `_`; letters, digits, `_`, `.` and `-` follow",
                'write NAME = "value"',
            )
