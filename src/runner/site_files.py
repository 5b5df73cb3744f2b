"""Site files: the shipped `NAME.toml`, overlaid by the user's file of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from runner.errors import RunnerError, unknown
from runner.located_toml import (
    Document,
    Keys,
    read_toml,
    refuse_unknown_keys,
    string_table,
    strings,
    typed,
    wrong_type,
)
from runner.machine import probe
from runner.site import LOCAL, VALUES, Origin, Site

SHIPPED = Path(__file__).resolve().parent / "sites"

_KINDS: dict[str, type] = {
    "account_required": bool,
    "gpus_per_node": int,
    "cpus_per_node": int,
    "cpus_per_gpu": int,
    "time_minutes": int,
    "network_gbps": int,
    **dict.fromkeys(("budget_gpu_hours_per_day", "budget_jobs_at_once"), int),
    **dict.fromkeys(
        ("allreduce_within", "allreduce_across", "failure_hours", "confirm_gpu_hours"), int
    ),
    **dict.fromkeys(
        ("mounts", "modules", "sbatch", "srun", "host_setup", "inside", "task_setup"), tuple
    ),
    **dict.fromkeys(("env", "annotations", "partitions", "refused", "versions", "quirks"), dict),
}  # all other values are text
_WORDS = {
    "scheduler": ("slurm", LOCAL),
    "gpu_request": ("gpus-per-node", "gres", "none"),
    "restart_by": ("requeue", "submit", "chain"),
    "netstack_source": ("host", "artifact"),
}


def user_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the user's own site files. They add sites, and override values of the shipped sites."""
    config = environ.get("XDG_CONFIG_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".config"
    )
    return Path(config) / "runner" / "sites"


def site_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of all known sites, including the user's own."""
    return tuple(
        sorted(
            {
                path.stem
                for folder in (SHIPPED, user_folder(environ))
                for path in folder.glob("*.toml")
            }
        )
    )


def site_documents(name: str, environ: Mapping[str, str]) -> tuple[Document, ...]:
    """The files that define a site, the strongest last: the files of its base, the shipped file, the user's file.

    Raises RunnerError that lists the known sites.
    """
    found: list[Document] = []
    wanted: str | None = name
    while wanted is not None:
        paths = [folder / f"{wanted}.toml" for folder in (user_folder(environ), SHIPPED)]
        documents = [_site_document(path) for path in paths if path.is_file()]
        if not documents:
            raise unknown(
                "site",
                wanted,
                site_names(environ),
                # while the variable names a site that does not exist, no command finds its site
                f"to create {paths[0]}: {'env -u RUNNER_SITE ' * (environ.get('RUNNER_SITE') == wanted)}"
                f"runner init --site {wanted}",
            )
        found += documents
        bases = [base for document in documents if (base := typed(document, ("base",), str))]
        wanted = bases[0] if bases else None
        if len(found) > 20:
            paths_of_circle = dict.fromkeys(str(document.path) for document in found)
            raise RunnerError(
                f"the site {name!r} is based on itself",
                f"the `base` keys of the files below lead back to {documents[0].path}",
                "\n".join(("remove or change `base` in one of them:", *paths_of_circle)),
            )
    return tuple(reversed(found))


def _site_document(path: Path) -> Document:
    document = read_toml(path)
    if outside := next((key for key in document.data if key in VALUES), None):
        raise RunnerError(
            f"{document.place(outside)}: {outside!r} is outside of [values]",
            "the values of a site are in the table [values]",
            f"move the line below [values]: {outside} = …",
        )
    refuse_unknown_keys(
        document, (), ("name", "summary", "base", "sources", "values", "detect"), "site"
    )
    refuse_unknown_keys(document, ("values",), VALUES, "site")
    refuse_unknown_keys(document, ("detect",), ("clusters", "paths", "partitions"), "site")
    for key in typed(document, ("sources",), dict, {}):
        refuse_unknown_keys(document, ("sources", key), ("title", "url", "date"), "source")
    return document


def load_site(name: str, environ: Mapping[str, str] = os.environ) -> Site:
    """Load a site: the shipped file, overlaid by the user's file of the same name. `base` names a site to inherit from.

    Tables (env, quirks, …) are merged key by key; all other values are replaced as a whole. Raises RunnerError for an
    unknown site (lists the known ones) and for any error in a file (names line and key).
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    summary = ""
    documents = site_documents(name, environ)
    for document in documents:
        summary = typed(document, ("summary",), str, summary)
        if (
            document.get("values", "machine_type") is not None
        ):  # before the file's own values, which win
            found, origin = _machine(document)
            values |= found
            origins |= dict.fromkeys(found, origin)
        for key in typed(document, ("values",), dict, {}):
            value, where = _value(document, key)
            if isinstance(value, dict):
                value = {**values.get(key, {}), **value}
            else:
                origins = {
                    found: origin
                    for found, origin in origins.items()
                    if not found.startswith(f"{key}.")
                }
            values[key] = value
            origins.update(where)
    missing = [
        item.name
        for item in fields(Site)
        if item.default is MISSING and item.default_factory is MISSING
    ]
    missing = [key for key in missing if key not in {"name", "summary", *values}]
    if missing:
        raise RunnerError(
            f"the site {name!r} does not set: {', '.join(missing)}",
            f"{documents[0].path} has no `base`, and does not set these keys under [values]",
            'add the keys, or inherit them from another site: base = "generic-slurm"',
        )
    site = Site(name=name, summary=summary, **values, origins=origins)
    if not site.is_local:
        return site
    measured = {key: value for key, value in _measured().items() if key not in values}
    return replace(
        site, **measured, origins={**origins, **dict.fromkeys(measured, Origin("this machine"))}
    )


def _machine(document: Document) -> tuple[Mapping[str, Any], Origin]:
    """The values of a site whose nodes are of the machine type that the file names, and their origin."""
    name, table = _value(document, "machine_type")[0], machine_types()
    for cloud in table.values():
        if name in cloud["types"]:
            return cloud["types"][name]["site"], Origin(cloud["title"], cloud["date"])
    known = {each for cloud in table.values() for each in cloud["types"]}
    place = document.place("values", "machine_type")
    raise unknown("machine type", name, known, place=place)


def machine_types() -> Mapping[str, Any]:
    """The table of the GPU machine types, by cloud."""
    return read_toml(SHIPPED.with_name("machine_types.toml")).data


def _value(document: Document, key: str) -> tuple[Any, dict[str, Origin]]:
    """A value, and the origins of the value and of its items."""
    whole: Keys = ("values", key)
    sourced = _is_sourced(document, whole)
    keys = (*whole, "value") if sourced else whole
    kind = _KINDS.get(key, str)
    if kind is dict and not sourced:
        return _table(document, key)
    origin = _origin(document, whole)
    if kind is tuple:
        items = strings(document, keys)
        unfit = [
            item
            for item in items
            if key == "inside" and not re.fullmatch(r"[A-Za-z_]\w*", item, re.ASCII)
        ]
        if unfit:  # the batch script expands each word as `${!PREFIX*}`
            raise RunnerError(
                f"{document.place('values', key)}: {key} contains {unfit[0]!r}",
                "each word must be the beginning of a variable name",
                'inside = ["NCCL_"]',
            )
        return items, {key: origin, **{f"{key}.{index}": origin for index in range(len(items))}}
    if kind is dict:
        table = string_table(document, keys)
        return table, {key: origin, **{f"{key}.{name}": origin for name in table}}
    value = typed(document, keys, kind)
    if key in _WORDS and value not in _WORDS[key]:
        raise wrong_type(document, keys, " or ".join(repr(word) for word in _WORDS[key]))
    if key == "container_storage" and (bad := re.search(r'["`\\\n]|\$\(', str(value))):
        raise RunnerError(
            f"{document.place(*keys)}: container_storage cannot contain {bad[0]!r}",
            "the build script writes the value in double quotes, where this character has a special meaning",
            'container_storage = "/dev/shm/${USER}"',
        )
    return value, {key: origin}


def _table(document: Document, key: str) -> tuple[dict[str, str], dict[str, Origin]]:
    """A table, each item of which has its own source. The origin of the table is that of its last item."""
    found: dict[str, str] = {}
    origins: dict[str, Origin] = {}
    for name in typed(document, ("values", key), dict, {}):
        keys = ("values", key, name)
        place = (*keys, "value") if _is_sourced(document, keys) else keys
        text = document.get(*place)
        if not isinstance(text, str):
            raise wrong_type(document, place, "text")
        found[name] = text
        origins[key] = origins[f"{key}.{name}"] = _origin(document, keys)
    return found, origins


def _is_sourced(document: Document, keys: Keys) -> bool:
    entry = document.get(*keys)
    return isinstance(entry, Mapping) and "value" in entry and set(entry) <= {"value", "source"}


def _origin(document: Document, keys: Keys) -> Origin:
    """The origin of a value. A value in a user's own file does not need a source."""
    place, key = document.place(*keys), keys[-1]
    source = typed(document, (*keys, "source"), str) if _is_sourced(document, keys) else None
    if source is None:
        if document.path.parent == SHIPPED:
            raise RunnerError(
                f"{place}: {key} has no source",
                "in runner's own site files, each value must name the document that it comes from",
                'source = "…"',
            )
        return Origin("your site file", "", place)
    title = typed(document, ("sources", source, "title"), str)
    date = typed(document, ("sources", source, "date"), str)
    if title is None or date is None:
        raise RunnerError(
            f"{place}: {key} comes from the document {source!r}, which has no title or no date",
            f"[sources.{source}] must name the title and the date of the document",
            f'[sources.{source}]\ntitle = "…"\nurl = "…"\ndate = "2026-01-31"',
        )
    url = typed(document, ("sources", source, "url"), str)
    return Origin(f"{title} <{url}>" if url else title, date, place)


def _measured() -> dict[str, Any]:
    """Values measured on this machine, for a site where this machine is the compute node."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return {
        "architecture": probe.architecture(),
        "cpus_per_node": probe.cpus(),
        "gpus_per_node": len(list(gpus.iterdir())) if gpus.is_dir() else 0,
    }


def signs(
    name: str, environ: Mapping[str, str], mentioned: Sequence[str] = ("detect",)
) -> Iterator[tuple[str, str]]:
    """The (kind, word) pairs by which a site is recognized, from the user's file, or else from the shipped one.

    The kind is `clusters`, `paths` or `partitions`. Those of a base do not count: a variant of a cluster is another
    site.
    """
    for document in _own_documents(name, environ, mentioned):
        kinds = ("clusters", "paths", "partitions")
        found = [(kind, word) for kind in kinds for word in strings(document, ("detect", kind))]
        if found:
            yield from found
            return


def own_image_folder(name: str, environ: Mapping[str, str]) -> str | None:
    """The image folder that a site's own files set, unexpanded; None if it is inherited from a base."""
    for document in _own_documents(name, environ, ("image_folder",)):
        keys = ("values", "image_folder")
        if text := typed(document, (*keys, "value") if _is_sourced(document, keys) else keys, str):
            return text
    return None


def _own_documents(
    name: str, environ: Mapping[str, str], words: Sequence[str]
) -> Iterator[Document]:
    """The site's own files, the user's first. Files that contain none of the words are skipped.

    Skipping saves parsing them, because some commands look at every site.
    """
    for folder in (user_folder(environ), SHIPPED):
        path = folder / f"{name}.toml"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if any(word in text for word in words):
            yield _site_document(path)
