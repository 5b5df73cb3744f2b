"""What a job's arguments name on the Hugging Face hub, and whether `runner prefetch` has brought it here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = "huggingface"
"""in the shared cache: HF_HOME of jobs that do not say otherwise; jobs/training/run.py decides the same"""
NOTES = "prefetched"
OWN = frozenset({"tiny-llama", "python-docs"})
"""made by the scripts themselves: jobs/training/course_arguments.py"""

# argument -> kind, part; the names are those of transformers' and TRL's scripts
_NAMES = {
    "model_name_or_path": ("model", ""),
    "tokenizer_name": ("model", "tokenizer"),
    "tokenizer_name_or_path": ("model", "tokenizer"),
    "config_name": ("model", "tokenizer"),
    "dataset_name": ("dataset", ""),
}
_PARTS = ("dataset_config", "dataset_config_name")
_REVISIONS = {"model": ("model_revision",), "dataset": ("dataset_revision",)}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE = re.compile(r"\.(jsonl?|parquet|csv|txt|arrow|py|ya?ml|gz|zst)$")
_LINE = re.compile(r"^([A-Za-z_]+)\s*:\s*(?:\"([^\"]*)\"|'([^']*)'|([^#\s]+))", re.MULTILINE)


@dataclass(frozen=True)
class Wanted:
    """A repository of the hub."""

    kind: str
    """model or dataset"""
    name: str
    revision: str = "main"
    part: str = ""
    """of a dataset: its configuration; of a model: `tokenizer`, where its weights are not asked for"""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    @property
    def note(self) -> str:
        """The name of the note that says it is here. jobs/prefetch.py writes it under the same name."""
        words = (f"{self.kind}s", *self.name.split("/"), self.revision.replace("/", "-"), self.part.replace("/", "-"))
        return "--".join(word for word in words if word) + ".json"


@dataclass(frozen=True)
class State:
    """Whether a repository is here."""

    ready: bool
    fault: str = ""
    """what is wrong with one that was here; empty where it never was"""


def wanted(arguments: Sequence[str], folders: Iterable[Path] = ()) -> tuple[Wanted, ...]:
    """What the words of a script name on the hub; what lies in one of the `folders` under that name is no hub's."""
    roots = tuple(folders)
    values = {**_config_values(arguments, roots), **_values(arguments)}
    found: dict[Wanted, None] = {}
    for argument, (kind, part) in _NAMES.items():
        name = values.get(argument, "")
        if not _NAME.fullmatch(name) or _FILE.search(name) or name in OWN or _is_local(name, roots):
            continue
        revision = next((values[key] for key in _REVISIONS[kind] if key in values), "main")
        named = next((values[key] for key in _PARTS if key in values), "") if kind == "dataset" else part
        found[Wanted(kind, name, revision, named)] = None
    whole = {(each.kind, each.name, each.revision) for each in found if each.kind == "model" and not each.part}
    return tuple(each for each in found if not each.part or (each.kind, each.name, each.revision) not in whole)


def pushes(arguments: Sequence[str], folders: Iterable[Path] = ()) -> bool:
    """Whether the job writes to the hub, so that it cannot be kept from the network."""
    values = {**_config_values(arguments, tuple(folders)), **_values(arguments)}
    return values.get("push_to_hub", "false").lower() in ("", "true", "1", "yes")


def state(home: Path, each: Wanted) -> State:
    """Whether every file that the note of a prefetch lists is there in its size."""
    try:
        note = json.loads((home / NOTES / each.note).read_text(encoding="utf-8"))
        folder = home / Path(str(note["folder"])).relative_to(_home_of(note))
        files: Mapping[str, int] = note["files"]
    except FileNotFoundError:
        return State(False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return State(False, f"{home / NOTES / each.note} cannot be read ({error})")
    for name, size_bytes in files.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            return State(False, f"{folder / name} is missing")
        if actual != size_bytes:
            return State(False, f"{folder / name} has {actual} bytes, not {size_bytes}")
    return State(True)


def _home_of(note: Mapping[str, str]) -> Path:
    """HF_HOME as the prefetch saw it, in a container perhaps: FOLDER is HOME/hub/REPOSITORY/snapshots/COMMIT."""
    return Path(str(note["folder"])).parents[3]


def in_hub_cache(home: Path, each: Wanted) -> bool:
    """Whether the hub's own cache has some commit of it: fetched by hand, or by an earlier job."""
    folder = home / "hub" / f"{each.kind}s--{each.name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def _is_local(name: str, folders: Sequence[Path]) -> bool:
    return any((folder / name).exists() for folder in folders)


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """The values of `--name value` and `--name=value`, by name with underscores; a switch has the value ''."""
    found: dict[str, str] = {}
    words = list(arguments)
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name.replace("-", "_")] = value if equals else "" if following.startswith("--") else following
    return found


def _config_values(arguments: Sequence[str], folders: Sequence[Path]) -> dict[str, str]:
    """The plain `name: value` lines of the YAML file that `--config` names, where it can be read here."""
    name = _values(arguments).get("config", "")
    for folder in folders if name else ():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return {key: first or second or third for key, first, second, third in _LINE.findall(text)}
    return {}
