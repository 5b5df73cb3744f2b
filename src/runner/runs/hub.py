"""The models and datasets of the Hugging Face hub that a job's arguments name, and whether they are in the cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from runner.environments.edf import Mount
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand
from runner.project import Project
from runner.runs.job import Job
from runner.site import Site

HOME = "huggingface"
"""the folder in the shared cache that is HF_HOME by default; jobs/training/run.py and job.sbatch.j2 use the same"""
NOTES = "prefetched"
_PREFETCH = "`runner prefetch` with the same job, environment and arguments"

# argument -> (kind, part); the arguments of transformers' and TRL's scripts
_NAMES = {
    "model_name_or_path": ("model", ""),
    "tokenizer_name": ("model", "tokenizer"),
    "tokenizer_name_or_path": ("model", "tokenizer"),
    "config_name": ("model", "tokenizer"),
    "tokenizer_model": ("model", "tokenizer"),
    "dataset_name": ("dataset", ""),
}
_PARTS = ("dataset_config", "dataset_config_name")
_REVISIONS = {"model": ("model_revision",), "dataset": ("dataset_revision",)}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# a string, so that it is compiled only if a job names something
_FILE = r"\.(jsonl?|parquet|csv|txt|arrow|py|ya?ml|gz|zst)$"
_URL = r"https?://\S+#sha256=[0-9a-fA-F]{64}$"
_LINE = r"(?m)^([A-Za-z_]+)\s*:\s*(?:\"([^\"]*)\"|'([^']*)'|([^#\s]+))"


class Repository(NamedTuple):
    """A repository of the hub, or a file with its URL and checksum."""

    kind: str
    """model, dataset or file"""
    name: str
    revision: str = "main"
    part: str = ""
    """for a dataset: its configuration; for a model: `tokenizer` if the weights are not needed"""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    @property
    def note(self) -> str:
        """The name of the file that records the prefetch. jobs/prefetch.py writes it."""
        if self.kind == "file":
            return f"files--{self.name[-64:].lower()}.json"
        words = (
            f"{self.kind}s",
            *self.name.split("/"),
            self.revision.replace("/", "-"),
            self.part.replace("/", "-"),
        )
        return "--".join(word for word in words if word) + ".json"


class State(NamedTuple):
    """Whether a repository is in the cache."""

    ready: bool
    fault: str = ""
    """what is wrong with a repository that was prefetched; empty if it never was"""


def repositories(arguments: Sequence[str], folders: Iterable[Path] = ()) -> tuple[Repository, ...]:
    """The hub repositories that a script's arguments name. Names that exist in one of the `folders` are local."""
    roots = tuple(folders)
    values = {**_config_values(arguments, roots), **argument_values(arguments)}
    found: dict[Repository, None] = {}
    for argument, (kind, part) in _NAMES.items():
        name = values.get(argument, "")
        if not _NAME.fullmatch(name) or re.search(_FILE, name):
            continue
        if argument == "tokenizer_model" and values.get("tokenizer_type") != "HuggingFaceTokenizer":
            continue  # a file of SentencePiece
        if any((root / name).exists() for root in roots):
            continue
        revision = next((values[key] for key in _REVISIONS[kind] if key in values), "main")
        named = (
            next((values[key] for key in _PARTS if key in values), "")
            if kind == "dataset"
            else part
        )
        found[Repository(kind, name, revision, named)] = None
    found.update(
        {Repository("file", url[0]): None for word in arguments if (url := re.search(_URL, word))}
    )
    whole = {
        (each.kind, each.name, each.revision)
        for each in found
        if each.kind == "model" and not each.part
    }
    return tuple(
        each
        for each in found
        if not each.part or (each.kind, each.name, each.revision) not in whole
    )


def pushes(arguments: Sequence[str], folders: Iterable[Path] = ()) -> bool:
    """Whether the job uploads to the hub, so that it cannot run offline."""
    values = {**_config_values(arguments, tuple(folders)), **argument_values(arguments)}
    return values.get("push_to_hub", "false").lower() in ("", "true", "1", "yes")


def cache_state(home: Path, each: Repository) -> State:
    """Whether every file that the prefetch recorded exists with the same size."""
    try:
        note = json.loads((home / NOTES / each.note).read_text(encoding="utf-8"))
        # recorded as HF_HOME/hub/REPOSITORY/snapshots/COMMIT, possibly with the HF_HOME of a container
        folder = home.joinpath(*Path(str(note["folder"])).parts[-4:])
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


def in_hub_cache(home: Path, each: Repository) -> bool:
    """Whether the hub's own cache has any commit of it, which the user or an earlier job has downloaded."""
    folder = home / "hub" / f"{each.kind}s--{each.name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def argument_values(arguments: Sequence[str]) -> dict[str, str]:
    """The values of `--name value` and `--name=value`, by name with underscores; a switch has the value ''."""
    found: dict[str, str] = {}
    words = list(arguments)
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name.replace("-", "_")] = (
            value if equals else "" if following.startswith("--") else following
        )
    return found


def _config_values(arguments: Sequence[str], folders: Sequence[Path]) -> dict[str, str]:
    """The plain `name: value` lines of the YAML file that `--config` names, if it can be read here."""
    name = argument_values(arguments).get("config", "")
    for folder in folders if name else ():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return {
            key: first or second or third for key, first, second, third in re.findall(_LINE, text)
        }
    return {}


CACHE_MOUNT = Mount("${RUNNER_CACHE}", "${RUNNER_CACHE}")
"""mounted at the same path as on the host; payload/attempt.sh sets the variable for a job"""


def shared_cache(run_folder: Path, environ: Mapping[str, str]) -> Path:
    """The shared cache: RUNNER_CACHE, or else `.cache` beside the run. payload/attempt.sh uses the same rule."""
    named = environ.get("RUNNER_CACHE", "")
    usable = named.startswith("/") and not set(named) & {":", ","}
    return Path(named) if usable else run_folder.parent / ".cache"


NOT_HERE = "(not here yet)"


def revisions(words: Sequence[str], run_folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`model NAME` or `dataset NAME` -> commit, for the hub repositories that a job's command names."""
    named = env.get("HF_HOME", "")
    home = Path(named) if named.startswith("/") else shared_cache(run_folder, os.environ) / HOME
    return {
        f"{each.kind} {each.name}": _commit(home, each)
        for each in repositories(words)
        if each.kind != "file"
    }


def _commit(home: Path, each: Repository) -> str:
    folder = home / "hub" / f"{each.kind}s--{each.name.replace('/', '--')}"
    try:
        return (folder / "refs" / each.revision).read_text().strip() or NOT_HERE
    except (OSError, UnicodeDecodeError):
        return each.revision if (folder / "snapshots" / each.revision).is_dir() else NOT_HERE


OFFLINE = "HF_HUB_OFFLINE"
TRUE = ("1", "true", "yes", "on")


def model_folders(project: Project) -> tuple[Path, ...]:
    """The folders in which a relative path in a script's arguments may exist."""
    return tuple(dict.fromkeys((project.start, *((project.root,) if project.root else ()))))


def hub_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's own variables for the hub, which are passed into every container."""
    return {name: environ[name] for name in ("HF_HOME", OFFLINE) if name in environ}


def hub_home(given: Mapping[str, str], runs: Path, environ: Mapping[str, str]) -> Path:
    """HF_HOME of a job: from its variables, or else in the shared cache. Raises RunnerError if expanding it fails."""
    cache = shared_cache(runs / "run", environ)
    text = given.get("HF_HOME")
    return (
        Path(expand(text, {**environ, "RUNNER_CACHE": str(cache)}, "HF_HOME"))
        if text
        else cache / HOME
    )


def choose_offline(
    job: Job,
    environment: Environment,
    project: Project,
    site: Site,
    environ: Mapping[str, str],
    *,
    strict: bool = True,
) -> tuple[Job, tuple[str, ...]]:
    """The job, set to offline mode if everything that it names is in the cache; and notes about what is not.

    An offline job has HF_HOME in the shared cache, unless HF_HOME is set: the default of huggingface_hub is in the home
    folder.
    If `strict`, raises RunnerError for a damaged prefetch, and for an offline job that lacks a repository. Otherwise,
    these become notes.
    """
    try:
        return _settled(job, environment, project, site, environ)
    except RunnerError as error:
        if strict:
            raise
        return job, (f"{error.what}: {error.why}",)


def _settled(
    job: Job, environment: Environment, project: Project, site: Site, environ: Mapping[str, str]
) -> tuple[Job, tuple[str, ...]]:
    words, folders = (*job.command, *job.arguments), model_folders(project)
    named = tuple(
        each
        for each in repositories(words, folders)
        # a command such as `pip install URL#sha256=…` downloads the file itself
        if each.kind != "file" or any(each.name in word for word in job.arguments)
    )
    given = {**hub_variables(environ), **site.env, **environment.env, **job.env}
    if not named:
        return job, ()
    try:
        home = hub_home(given, site.runs(environ, project), environ)
    except RunnerError as error:
        return job, (f"{error.what}: runner does not check whether {named[0]} is in the cache",)
    offline = given.get(OFFLINE, "").lower() in TRUE
    states = {each: cache_state(home, each) for each in named}
    for each, state in states.items():
        if state.fault:
            raise _error(f"the {each} is incomplete in the cache", state.fault)
    absent = [each for each, state in states.items() if not state.ready]
    cached = replace(job, hub_in_cache=not given.get("HF_HOME"))
    if not absent and OFFLINE in given:
        return cached if offline else job, ()
    if not absent and pushes(words, folders):
        what = "all models and datasets are prefetched; the job still uses the network, because it pushes to the hub"
        return job, (what,)
    if not absent:
        return replace(cached, env={**job.env, OFFLINE: "1"}), ()
    lacking = [
        each for each in absent if each.kind == "file" or (offline and not in_hub_cache(home, each))
    ]
    if lacking:
        why = f"{f'{OFFLINE} is set, and ' if offline else ''}{home} does not contain it"
        raise _error(f"the job cannot find the {lacking[0]}", why)
    if offline:
        return cached, ()
    listed = ", ".join(map(str, absent))
    return job, (
        f"not prefetched: {listed}; the job downloads what its cache lacks (to download it now: {_PREFETCH})",
    )


def _error(what: str, why: str) -> RunnerError:
    return RunnerError(what, why, f"on a machine that can reach the hub: {_PREFETCH}")
