"""Recipe: what an image is built from: `containers/NAME.toml`, its Containerfile, and the hash of all its files."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.bash import here_documents
from runner.errors import RunnerError, unknown
from runner.located_toml import (
    Document,
    read_toml,
    refuse_unknown_keys,
    string_table,
    strings,
    typed,
)
from runner.machine import files, probe, process
from runner.project import Project

_VARIANT_KEYS = ("base", "pins", "python", "torch", "build_args")
_KEYS = (*_VARIANT_KEYS, "summary", "containerfile", "platforms", "context", "flags", "variants")


@dataclass(frozen=True)
class Base:
    """What a recipe starts from: an image of a registry, or a Debian root file system that the build makes."""

    image: str | None = None
    debian: str | None = None
    """the suite (`bookworm`); set where `image` is None"""
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.image or f"Debian {self.debian}"


@dataclass(frozen=True)
class Recipe:
    """A Containerfile with its bases (tried in order), its pins, and the files that COPY may use."""

    name: str
    path: Path
    """the file of the recipe"""
    root: Path
    """the folder that `containerfile`, `pins` and `context` are relative to"""
    containerfile: Path
    bases: tuple[Base, ...] = ()
    pins: Path | None = None
    python: str = ""
    torch: str | None = None
    platforms: tuple[str, ...] = ()
    """`linux/amd64`, ...; empty: any"""
    build_args: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """for the engine's `build`, as they are"""
    context: tuple[str, ...] | None = ()
    """files and folders; None: every file of the Containerfile's folder"""
    variants: tuple[str, ...] = ()
    """the base tags of the recipe"""
    summary: str = ""

    @property
    def repository(self) -> str:
        """The name of its images, without a tag."""
        return f"localhost/runner/{self.name}"


def load_recipe(name: str, project: Project, base_tag: str | None = None) -> Recipe:
    """The named recipe, or the one at a path; `base_tag` chooses one of its variants.

    Raises RunnerError for an unknown recipe or tag, and for a bad file, with the line and the key.
    """
    bare = _bare_containerfile(name, project)
    recipe = bare or _with_torch(_read(project.find("containers", name), base_tag))
    if bare and base_tag is not None:
        raise unknown(
            "base tag",
            base_tag,
            (),
            f"write containers/{recipe.name}.toml with [variants.{base_tag!r}]",
        )
    return recipe


def _with_torch(recipe: Recipe) -> Recipe:
    """The recipe with the build argument TORCH, its torch version, if the Containerfile declares that argument."""
    if not recipe.torch or not re.search(
        r"^\s*ARG\s+TORCH\b", recipe.containerfile.read_text(), re.I | re.M
    ):
        return recipe
    return replace(recipe, build_args={"TORCH": recipe.torch, **recipe.build_args})


# a flag of the engines -> what to use instead
_NOT_FLAGS = {
    **dict.fromkeys(("-f", "--file"), "runner build ./PATH/OF/Containerfile"),
    "--platform": "runner build RECIPE --platform OS/ARCH",
}


def with_flags(recipe: Recipe, own: tuple[str, ...]) -> Recipe:
    """The recipe with the user's flags for the engine after its own. Raises RunnerError for a flag that runner sets."""
    return replace(recipe, flags=(*recipe.flags, *_passed(own)))


def _passed(flags: tuple[str, ...], place: str = "") -> tuple[str, ...]:
    """The flags, none of which runner itself sets. `place`: where the user wrote them, for the message."""
    for word in flags:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if better := _NOT_FLAGS.get(name):
            raise RunnerError(
                f"{place}{name} cannot be passed to the engine",
                "runner sets this flag itself",
                f"remove the flag, and use: {better}",
                exit_code=2,
            )
    return flags


def with_build_args(recipe: Recipe, own: Mapping[str, str]) -> Recipe:
    """The recipe with the user's build arguments, which override its own. BASE replaces its list of bases."""
    arguments = {**recipe.build_args, **own}
    if not recipe.bases or not own.get("BASE"):
        return replace(recipe, build_args=arguments)
    return replace(recipe, bases=(Base(arguments.pop("BASE")),), build_args=arguments)


def recipe_names(project: Project) -> tuple[str, ...]:
    """Every recipe of the project, with or without a TOML file."""
    bare = {
        path.name.partition(".")[2]
        for root in project.roots
        for path in root.glob("Containerfile.*")
    }
    return tuple(sorted({*project.names("containers"), *bare}))


def check_platform(recipe: Recipe, platform: str | None) -> str:
    """The platform to build for (default: this machine's). Raises RunnerError if the recipe excludes it."""
    wanted = platform or f"linux/{probe.architecture()}"
    wanted = wanted if "/" in wanted else f"linux/{wanted}"
    system, _, architecture = wanted.partition("/")
    wanted = f"{system}/{probe.oci_architecture(architecture)}"
    if recipe.platforms and wanted not in recipe.platforms:
        raise RunnerError(
            f"recipe {recipe.name!r} does not support {wanted}",
            f"{recipe.path} says platforms = {', '.join(recipe.platforms)}",
            f"--platform {recipe.platforms[0]}, or build on a machine of that platform",
        )
    return wanted


def _bare_containerfile(name: str, project: Project) -> Recipe | None:
    """The recipe of a `Containerfile.NAME` (or of a path to one) that has no TOML file."""
    if "/" in name and not name.endswith(".toml"):
        path = (project.start / Path(name).expanduser()).resolve()
        if not path.is_file():
            raise RunnerError(
                f"there is no recipe {name!r}",
                f"{path} is a folder" if path.is_dir() else f"{path} does not exist",
                _path_of(name, path) or "check the path",
            )
        return Recipe(image_name(_name_in(path)), path, path.parent, path, context=None)
    for root in project.roots:
        if (root / "containers" / f"{name.removesuffix('.toml')}.toml").is_file():
            return None
        if (root / f"Containerfile.{name}").is_file():
            path = root / f"Containerfile.{name}"
            return Recipe(image_name(name), path, root, path, context=None)
    if name.removesuffix(".toml") not in project.names("containers") and "/" not in name:
        error = unknown("recipe", name, recipe_names(project), is_file=True)
        error.fix = _path_of(name, project.start / name) or error.fix
        raise error
    return None


def _path_of(name: str, path: Path) -> str:
    """The advice for a file, or a folder as `docker build` takes it; empty if there is no such Containerfile."""
    if files.is_file(path):
        return f"runner build ./{name}"
    found = [file for file in ("Containerfile", "Dockerfile") if files.is_file(path / file)]
    return f"runner build {name.rstrip('/')}/{found[0]}" if found else ""


def _name_in(path: Path) -> str:
    """NAME of `Containerfile.NAME`, `NAME.Containerfile` and NAME.*; the folder's name for `Containerfile` alone.

    Docker's names work too.
    """
    before, _, after = path.name.partition(".")
    if before.lower() in ("containerfile", "dockerfile"):
        return after or path.parent.name
    return path.stem


def image_name(name: str) -> str:
    """A name that an OCI repository may have, as close to `name` as possible.

    Source: distribution-spec, <name>: lower-case letters and digits, separated by one of `.`, `_`, `__` or some `-`.
    """
    parts = re.split(r"([^a-z0-9]+)", name.lower())
    valid = (part if re.fullmatch(r"[a-z0-9]*|[._]|__|-+", part) else "-" for part in parts)
    return "".join(valid).strip("._-") or "image"


def _read(path: Path, base_tag: str | None) -> Recipe:
    document = read_toml(path)
    refuse_unknown_keys(document, (), _KEYS, "recipe")
    root = path.parent.parent if path.parent.name == "containers" else path.parent
    containerfile = typed(document, ("containerfile",), str)
    if containerfile is None:
        raise RunnerError(
            f"{document.place()}: the key `containerfile` is missing",
            "a recipe must name its Containerfile by a path relative to the folder above containers/",
            f'containerfile = "Containerfile.{path.stem}"',
        )
    recipe = Recipe(
        name=image_name(path.stem),
        path=path,
        root=root,
        containerfile=_existing(document, root, ("containerfile",), containerfile),
        bases=_bases(document),
        pins=_optional_file(document, root, ("pins",)),
        python=typed(document, ("python",), str, ""),
        torch=typed(document, ("torch",), str),
        platforms=strings(document, ("platforms",)),
        build_args=string_table(document, ("build_args",)),
        flags=_passed(strings(document, ("flags",)), f"{document.place('flags')}: "),
        context=strings(document, ("context",)),
        variants=tuple(document.get("variants") or ()),
        summary=typed(document, ("summary",), str, ""),
    )
    for index, name in enumerate(recipe.context or ()):
        _existing(document, root, ("context", str(index)), name)
    return recipe if base_tag is None else _with_variant(recipe, document, base_tag)


def _bases(document: Document) -> tuple[Base, ...]:
    tables = typed(document, ("base",), list) or []
    document = replace(
        document, data={"base": {str(index): table for index, table in enumerate(tables)}}
    )
    bases = []
    for index in range(len(tables)):
        at = ("base", str(index))
        refuse_unknown_keys(document, at, ("image", "debian", "packages"), "base")
        base = Base(
            typed(document, (*at, "image"), str),
            typed(document, (*at, "debian"), str),
            strings(document, (*at, "packages")),
        )
        if (base.image is None) == (base.debian is None):
            raise RunnerError(
                f"{document.place(*at)}: a [[base]] must have exactly one of `image` and `debian`",
                "`image` names an image in a registry, and `debian` names a Debian suite for mmdebstrap to install",
                'image = "docker.io/library/debian:bookworm-slim"',
            )
        bases.append(base)
    return tuple(bases)


def _with_variant(recipe: Recipe, document: Document, tag: str) -> Recipe:
    at = ("variants", tag)
    if tag not in recipe.variants:
        raise unknown(
            "base tag",
            tag,
            recipe.variants,
            f"add [variants.{tag!r}] with base, pins, python and torch to {recipe.path}: each base needs its own pins",
        )
    refuse_unknown_keys(document, at, _VARIANT_KEYS, "variant")
    image = typed(document, (*at, "base"), str)
    return replace(
        recipe,
        bases=(Base(image),) if image else recipe.bases,
        pins=_optional_file(document, recipe.root, (*at, "pins")) or recipe.pins,
        python=typed(document, (*at, "python"), str, recipe.python),
        torch=typed(document, (*at, "torch"), str, recipe.torch or ""),
        build_args={**recipe.build_args, **string_table(document, (*at, "build_args"))},
    )


def _optional_file(document: Document, root: Path, keys: tuple[str, ...]) -> Path | None:
    name = typed(document, keys, str)
    return None if name is None else _existing(document, root, keys, name)


def _existing(document: Document, root: Path, keys: tuple[str, ...], name: str) -> Path:
    """The path of a file or folder that the recipe names, below `root`."""
    path = root / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise RunnerError(
            f"{document.place(*keys)}: {name!r} is outside the project",
            "an image can only use files from inside the project",
            "copy the file into containers/, and correct the path in that line",
        )
    if not path.exists():
        raise RunnerError(
            f"{document.place(*keys)}: {name!r} does not exist",
            f"there is no file {path}",
            "correct the name in that line",
        )
    return path


def instructions(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, line after the last, text) of each instruction, without comments, blank lines and heredocs."""
    lines = text.split("\n")
    line = 0
    while line < len(lines):
        if not lines[line].strip() or lines[line].lstrip().startswith("#"):
            line += 1
            continue
        start = line
        while line < len(lines) - 1 and (
            lines[line].rstrip().endswith("\\") or _is_skipped_inside(lines, start, line)
        ):
            line += 1
        line += 1
        words = "\n".join(lines[start:line])
        end = line
        if words.split(maxsplit=1)[0].upper() in ("RUN", "COPY", "ADD"):
            for document in here_documents(words):
                while end < len(lines) and lines[end].strip() != document.mark:
                    end += 1
                end += 1
        yield start, min(end, len(lines)), words
        line = end


def _is_skipped_inside(lines: list[str], start: int, line: int) -> bool:
    """Whether a comment or an empty line is inside a continued instruction. Source: Dockerfile reference."""
    return line > start and lines[line].lstrip()[:1] in ("", "#")


def with_arguments(text: str, arguments: Mapping[str, str]) -> str:
    """The Containerfile with ARG lines after each FROM. RUN sees the values, but the image does not store them."""
    lines = text.split("\n")
    assignments = " ".join(f"{name}={value}" for name, value in arguments.items())
    for _, end, words in reversed(list(instructions(text)) if arguments else []):
        if words.split(maxsplit=1)[0].upper() == "FROM":
            lines.insert(end, f"ARG {assignments}")
    return "\n".join(lines).rstrip("\n") + "\n"


def declares_base(text: str) -> bool:
    """Whether `ARG BASE` comes before the first FROM, so that runner can choose the base."""
    for _, _, words in instructions(text):
        keyword = words.split(maxsplit=1)[0].upper()
        if keyword == "FROM":
            return False
        if keyword == "ARG" and re.match(r"ARG\s+BASE\b", words, re.IGNORECASE):
            return True
    return False


# increase when the same inputs give a different image: 1
FORMAT = 1


def context_files(recipe: Recipe) -> tuple[str, ...]:
    """The files that COPY may use, relative to the recipe's root, sorted. Symlinks stay symlinks."""
    if recipe.context is None:
        return _all_files(recipe.root)
    names: set[str] = set()
    for entry in recipe.context:
        path = recipe.root / entry
        if path.is_dir() and not path.is_symlink():
            names.update(
                str(file.relative_to(recipe.root)) for file in path.rglob("*") if _counts(file)
            )
        else:
            names.add(str(Path(entry)))
    return tuple(sorted(names))


def _all_files(folder: Path) -> tuple[str, ...]:
    """Every file of a folder; in a git work tree, only those that git does not ignore, with those of submodules."""
    listed = None
    if process.which("git"):
        argv = (
            "git",
            "-C",
            str(folder),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        )
        done = process.run(argv, check=False)
        listed = done.stdout.split("\0") if done.exit_code == 0 else None
    if listed is None:
        listed = [str(file.relative_to(folder)) for file in folder.rglob("*") if _counts(file)]
    names: set[str] = set()
    for name in {str(Path(name)) for name in listed} - {"."}:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            # of a submodule or another repository, git lists only the folder
            names.update(f"{name}/{file}" for file in _all_files(path))
        elif os.path.lexists(path):
            names.add(name)
    return tuple(sorted(names))


def _counts(file: Path) -> bool:
    generated = {".git", "__pycache__"} & set(file.parts)
    return not generated and (file.is_symlink() or file.is_file())


def files_hash(recipe: Recipe) -> str:
    """The sha256 of the Containerfile, the pins and the context: names, types, execute bits and content."""
    digest = hashlib.sha256()
    own = {
        str(path.relative_to(recipe.root)) for path in (recipe.containerfile, recipe.pins) if path
    }
    try:
        for name in sorted({*own, *context_files(recipe)}):
            digest.update(_file_line(recipe.root, name).encode())
    except OSError as error:
        raise RunnerError(
            f"cannot read {error.filename}",
            error.strerror or str(error),
            f"recipe {recipe.name!r} uses this file: check its path and mode",
        ) from error
    return digest.hexdigest()


def _file_line(root: Path, name: str) -> str:
    path = root / name
    if path.is_symlink():
        return json.dumps([name, "link", os.readlink(path)]) + "\n"  # noqa: PTH115 (the text itself counts)
    with path.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return json.dumps([name, "x" if path.stat().st_mode & 0o100 else "-", content]) + "\n"


def content_hash(
    recipe: Recipe, base_digest: str, build_args: Mapping[str, str], platform: str
) -> str:
    """12 hex digits that name the image. The same inputs give the same hash on every machine.

    The recipe's flags are an input, but not the contents of a file that they name, such as a secret.
    The git commit is not an input but a label, so that a commit that does not change these files changes nothing.
    """
    inputs = {
        "format": FORMAT,
        "recipe": recipe.name,
        "containerfile": str(recipe.containerfile.relative_to(recipe.root)),
        "files": files_hash(recipe),
        "base": base_digest,
        "build_args": dict(build_args),
        "platform": platform,
        **({"flags": [*recipe.flags]} if recipe.flags else {}),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
