"""What differs between clusters, as data in which every value has a source and a date."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from runner.errors import RunnerError, unknown
from runner.expansion import expand
from runner.located_toml import (
    Document,
    Place,
    read_toml,
    refuse_unknown_keys,
    string_table,
    strings,
    typed,
    wrong_type,
)
from runner.machine import probe, process
from runner.project import Project

SHIPPED = Path(__file__).resolve().parent / "sites"


@dataclass(frozen=True)
class Origin:
    """Where a value came from: the name of its source, the day on which it was read there, and the line here."""

    source: str
    date: str = ""
    place: Place | None = None

    def __str__(self) -> str:
        source = ", ".join(part for part in (self.source, self.date) if part)
        return f"{source} ({self.place})" if source and self.place else source or str(self.place)


@dataclass(frozen=True)
class Site:
    """One cluster, or this machine. None means: not known, so it is asked for where it is needed."""

    name: str
    summary: str
    scheduler: str
    """`slurm` or `local`"""
    engine: str
    """a name of environments.engines.ENGINES, or `auto`: chosen by what the machine has"""
    image_folder: str
    """where squashfs files lie; `${VAR}` is expanded when it is asked for"""
    architecture: str | None = None
    """of the compute nodes, in OCI's words: amd64, arm64"""
    partition: str | None = None
    account: str | None = None
    account_required: bool = False
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory: str | None = None
    """to ask for per node, as sbatch writes it: 450G"""
    gpu_request: str = "gpus-per-node"
    """`gpus-per-node`, `gres` or `none`: the flag by which GPUs are asked for"""
    run_folder: str | None = None
    """where run folders are made; None: PROJECT/runs"""
    container_storage: str | None = None
    """where podman must keep its images on a compute node; None: its default is good"""
    launcher: str = "torchrun"
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    """flags that every sbatch gets"""
    srun: tuple[str, ...] = ()
    """flags that every srun gets"""
    time_minutes: int | None = None
    """limit of a job that names none"""
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def images(self, environ: Mapping[str, str]) -> Path:
        """The folder of squashfs files; RUNNER_IMAGES wins. Raises RunnerError for an undefined variable."""
        text = environ.get("RUNNER_IMAGES") or expand(self.image_folder, environ, f"the image folder of {self.name}")
        return Path(text).absolute()

    def runs(self, environ: Mapping[str, str], project: Project) -> Path:
        """The folder of runs; RUNNER_RUNS wins, then the site's, then the project's own."""
        text = environ.get("RUNNER_RUNS") or (
            self.run_folder and expand(self.run_folder, environ, f"the run folder of {self.name}")
        )
        return Path(text).absolute() if text else project.runs


VALUES = tuple(item.name for item in fields(Site) if item.name not in {"name", "summary", "origins"})
_KINDS: dict[str, type] = {
    "account_required": bool,
    "gpus_per_node": int,
    "cpus_per_node": int,
    "time_minutes": int,
    "env": dict,
    "mounts": tuple,
    "modules": tuple,
    "sbatch": tuple,
    "srun": tuple,
}  # the rest are text
_WORDS = {"scheduler": ("slurm", "local"), "gpu_request": ("gpus-per-node", "gres", "none")}


def user_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where a user's own site files lie: they add sites, and overlay the values of those that we ship."""
    environ = os.environ if environ is None else environ
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(config) / "runner" / "sites"


def site_names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Every known site, the user's own included."""
    return tuple(sorted({path.stem for folder in (SHIPPED, user_folder(environ)) for path in folder.glob("*.toml")}))


def site_documents(name: str, environ: Mapping[str, str] | None = None) -> tuple[Document, ...]:
    """The files that make a site, the one that counts most last: of its base, as shipped, of the user.

    Raises RunnerError that lists the known sites.
    """
    found: list[Document] = []
    wanted: str | None = name
    while wanted is not None:
        paths = [folder / f"{wanted}.toml" for folder in (user_folder(environ), SHIPPED)]
        documents = [_site_document(path) for path in paths if path.is_file()]
        if not documents:
            raise unknown("site", wanted, site_names(environ), f"describe it in {paths[0]}: runner init --site {name}")
        found += documents
        bases = [base for document in documents if (base := typed(document, ("base",), str))]
        wanted = bases[0] if bases else None
        if len(found) > 20:
            raise RunnerError(f"the bases of site {name!r} go round in a circle", str(documents[0].path), "cut it")
    return tuple(reversed(found))


def _site_document(path: Path) -> Document:
    document = read_toml(path)
    refuse_unknown_keys(document, (), ("name", "summary", "base", "sources", "values", "detect"), "site")
    refuse_unknown_keys(document, ("values",), VALUES, "site")
    refuse_unknown_keys(document, ("detect",), ("clusters", "paths"), "site")
    for key in typed(document, ("sources",), dict, {}):
        refuse_unknown_keys(document, ("sources", key), ("title", "url", "date"), "source")
    return document


def _origin(document: Document, key: str) -> Origin:
    """Where a value of a site file came from. A user's own file may give a value without naming a source."""
    place = document.place("values", key)
    source = typed(document, ("values", key, "source"), str) if _is_sourced(document, key) else None
    if source is None:
        if document.path.parent == SHIPPED:
            raise RunnerError(f"{place}: {key} names no source", "each shipped value has one", 'source = "…"')
        return Origin("your site file", "", place)
    title = typed(document, ("sources", source, "title"), str)
    date = typed(document, ("sources", source, "date"), str)
    if title is None or date is None:
        raise RunnerError(
            f"{place}: the source {source!r} of {key} has no title and date",
            f"[sources.{source}] must say what was read, and when",
            f'[sources.{source}]\ntitle = "…"\nurl = "…"\ndate = "2026-01-31"',
        )
    url = typed(document, ("sources", source, "url"), str)
    return Origin(f"{title} <{url}>" if url else title, date, place)


def _is_sourced(document: Document, key: str) -> bool:
    entry = document.get("values", key)
    return isinstance(entry, Mapping) and "value" in entry and set(entry) <= {"value", "source"}


def _value(document: Document, key: str) -> Any:
    keys = ("values", key, "value") if _is_sourced(document, key) else ("values", key)
    kind = _KINDS.get(key, str)
    if kind is tuple:
        return strings(document, keys)
    if kind is dict:
        return string_table(document, keys)
    value = typed(document, keys, kind)
    if key in _WORDS and value not in _WORDS[key]:
        raise wrong_type(document, keys, " or ".join(repr(word) for word in _WORDS[key]))
    return value


def load_site(name: str, environ: Mapping[str, str] | None = None) -> Site:
    """A site by name: the shipped file, overlaid by the user's file of the same name; `base` names another to build on.

    Raises RunnerError for an unknown site (the known ones listed) and for any fault of a file (line and key named).
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    summary = ""
    documents = site_documents(name, environ)
    for document in documents:
        summary = typed(document, ("summary",), str, summary)
        for key in typed(document, ("values",), dict, {}):
            value = _value(document, key)
            values[key] = {**values.get(key, {}), **value} if key == "env" else value
            origins[key] = _origin(document, key)
    if values.get("scheduler") == "local":
        for key, value in _measured().items():
            if key not in values:
                values[key], origins[key] = value, Origin("this machine")
    missing = [item.name for item in fields(Site) if item.default is MISSING and item.default_factory is MISSING]
    missing = [key for key in missing if key not in {"name", "summary", *values}]
    if missing:
        raise RunnerError(
            f"the site {name!r} does not say: {', '.join(missing)}",
            f"{documents[-1].path} has no such keys under [values], and no base",
            'add them, or build on another site: base = "generic-slurm"',
        )
    return Site(name=name, summary=summary, **values, origins=origins)


def _measured() -> dict[str, Any]:
    """What this machine is, where it is itself the compute node."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return {
        "architecture": probe.architecture(),
        "cpus_per_node": probe.cpus(),
        "gpus_per_node": len(list(gpus.iterdir())) if gpus.is_dir() else 0,
    }


def find_site(name: str | None, environ: Mapping[str, str]) -> tuple[Site, str]:
    """The site to use and why: `--site`, RUNNER_SITE, then what this machine looks like."""
    if name:
        return load_site(name, environ), "--site"
    if environ.get("RUNNER_SITE"):
        return load_site(environ["RUNNER_SITE"], environ), "RUNNER_SITE"
    found, why = _detect(environ)
    return load_site(found, environ), f"detected: {why}"


def _detect(environ: Mapping[str, str]) -> tuple[str, str]:
    """The name of the site that this machine looks like, and the sign of it. Asks the machine, never the network."""
    slurm = _slurm_answers(environ)
    cluster = cluster_name(environ) if slurm or environ.get("CLUSTER_NAME") else None
    # the user's own sites first; of a site's files, the one that counts most says by what it is known
    own = {path.stem for path in user_folder(environ).glob("*.toml")}
    for name in sorted(site_names(environ), key=lambda name: (name not in own, name)):
        document = site_documents(name, environ)[-1]
        if cluster and cluster in strings(document, ("detect", "clusters")):
            return name, f"the cluster is called {cluster}"
        for path in strings(document, ("detect", "paths")):
            if Path(path).exists():
                return name, f"{path} is there"
    if not slurm:
        there = process.which("sbatch") is not None
        return "local", "sbatch is here, but no Slurm is set up" if there else "there is no sbatch on this machine"
    if "container-image" in slurm_plugins() and "environment" not in slurm_plugins():
        return "generic-pyxis", "srun has --container-image"
    known = ", ".join(f"--{flag}" for flag in sorted(slurm_plugins() & {"environment", "edf"}))
    return "generic-slurm", f"srun has {known}" if known else "there is an sbatch, and no container plugin of srun"


def slurm_configuration(environ: Mapping[str, str]) -> Path | None:
    """Slurm's configuration file on this machine; None on clusters that hand it out from their controller."""
    named = environ.get("SLURM_CONF")
    places = (named,) if named else ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm/etc/slurm.conf")
    return next((Path(place) for place in places if Path(place).is_file()), None)


def _slurm_answers(environ: Mapping[str, str]) -> bool:
    """Whether this machine belongs to a Slurm cluster: an installed package alone is not enough."""
    if process.which("sbatch") is None or slurm_configuration(environ) is not None:
        return process.which("sbatch") is not None
    with suppress(RunnerError):
        return process.run(("scontrol", "ping"), check=False, timeout_seconds=3).exit_code == 0
    return False


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """The name of this Slurm cluster: from the environment, Slurm's configuration file, else its controller."""
    named = environ.get("SLURM_CLUSTER_NAME") or environ.get("CLUSTER_NAME")
    if named or process.which("scontrol") is None:
        return named
    path = slurm_configuration(environ)
    with suppress(RunnerError, OSError):  # a controller that does not answer must not stop a dry run
        text = path.read_text() if path else process.run(("scontrol", "show", "config"), timeout_seconds=3).stdout
        found = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
        return found[1] if found else None
    return None


@lru_cache(maxsize=1)
def slurm_plugins() -> frozenset[str]:
    """The options that container plugins add to srun here: `environment`, `edf`, `container-image`."""
    if process.which("srun") is None:
        return frozenset()
    text = process.run(("srun", "--help"), check=False, timeout_seconds=5).stdout
    return frozenset(flag for flag in ("environment", "edf", "container-image") if f"--{flag}=" in text)
