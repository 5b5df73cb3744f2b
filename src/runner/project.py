"""Where recipes, environments and jobs are found: in the user's project, or else among the shipped files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.machine import files

SUFFIXES = {
    "containers": ".toml",
    "edf": ".toml",
    "jobs": ".toml",
    "clusters": ".toml",
    "jobs/deepspeed": ".json",
}
KIND_NAMES = {
    "containers": "recipe",
    "edf": "environment",
    "jobs": "job",
    "clusters": "cluster",
    "jobs/deepspeed": "DeepSpeed preset",
}


@dataclass(frozen=True)
class Project:
    """A project's root (None outside a project), and the shipped folder for files that the project does not have."""

    root: Path | None
    shipped: Path
    start: Path
    """the current folder; relative paths start here"""

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders to search, the user's own first."""
        return tuple(
            dict.fromkeys(folder for folder in (self.root, self.shipped) if folder is not None)
        )

    @property
    def runs(self) -> Path:
        """The project's folder for runs, used if the site does not set one."""
        return (self.root or self.start) / "runs"

    def names(self, kind: str) -> tuple[str, ...]:
        """The known names of a kind (`containers`, `edf`, `jobs` or `jobs/deepspeed`), from all roots."""
        found = {
            path.stem for root in self.roots for path in (root / kind).glob("*" + SUFFIXES[kind])
        }
        return tuple(sorted(found))

    def find(self, kind: str, name: str) -> Path:
        """The file of a named recipe, environment, job or DeepSpeed preset, or of a path that the user gave.

        `NAME`, `NAME.toml`, `./NAME.toml` and absolute paths are accepted.
        Raises RunnerError that lists the known names and suggests the nearest.
        """
        if "/" in name or name.startswith("."):
            path = (self.start / Path(name).expanduser()).resolve()
            if path.is_file():
                return path
            why = f"{path} is not a file" if path.exists() else f"{path} does not exist"
            raise RunnerError(
                f"there is no {KIND_NAMES[kind]} file {name!r}", why, "check the path"
            )
        stem = name.removesuffix(SUFFIXES[kind])
        for root in self.roots:
            path = root / kind / (stem + SUFFIXES[kind])
            if path.is_file():
                return path
        error = unknown(KIND_NAMES[kind], stem, self.names(kind), is_file=True)
        if name.endswith(SUFFIXES[kind]) and (self.start / name).is_file():
            error.fix = f"to use the file of that name: ./{name}"
        raise error


def shipped_folder() -> Path:
    """The folder with the recipes, environments and jobs that come with runner.

    Package data in an installed wheel; the top level of the checkout in an editable install.
    """
    package = Path(__file__).resolve().parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent.parent


def page(name: str) -> Path:
    """The page of the documentation, which comes with runner: docs/NAME.md."""
    return shipped_folder() / f"docs/{name}.md"


def find_project(start: Path | None = None) -> Project:
    """The project that contains `start` (default: the current folder).

    The root is the nearest folder, from `start` upwards, that contains `runner.toml`. If there is none, the root is the
    git root, or else `start`, provided that it contains `containers/`, `edf/`, `jobs/` or a `Containerfile.*`.
    """
    here = (start or Path.cwd()).resolve()
    shipped = shipped_folder()
    for folder in (here, *here.parents):
        if files.is_file(folder / "runner.toml"):
            return Project(folder, shipped, here)
        if files.exists(folder / ".git"):
            if _has_parts(folder):
                return Project(folder, shipped, here)
            break
    return Project(here if _has_parts(here) and not is_shared_place(here) else None, shipped, here)


def _has_parts(folder: Path) -> bool:
    return any((folder / kind).is_dir() for kind in SUFFIXES) or any(folder.glob("Containerfile.*"))


def is_shared_place(folder: Path) -> bool:
    """Whether a folder is the home folder, `/` or a shared temporary folder, which must never be copied as a whole."""
    import tempfile  # slow, and most projects have a runner.toml

    places = {
        Path.home(),
        Path("/"),
        Path("/tmp"),
        Path("/var/tmp"),
        Path("/dev/shm"),
        Path(tempfile.gettempdir()),
    }
    return folder.resolve() in {place.resolve() for place in places}
