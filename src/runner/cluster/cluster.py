"""A cluster, as its file `clusters/NAME.toml` describes it. The keys are in keys.toml."""

import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from runner.cluster.documents import merge, read_adopted, render
from runner.errors import RunnerError, unknown
from runner.located_toml import Document, Keys, read_toml, refuse_unknown_keys, typed
from runner.machine import files
from runner.project import Project
from runner.site_files import machine_types


@cache
def facts(name: str) -> Mapping[str, Any]:
    """The data of a TOML file of this package."""
    return read_toml(Path(__file__).with_name(f"{name}.toml")).data


class Cluster(NamedTuple):
    """A cluster. `values` are those of its file, with the defaults, and with the machine type of each queue.

    `folder` contains what is made for the cluster. `provider` is what providers.toml says about its provider.
    """

    name: str
    path: Path
    folder: Path
    values: Mapping[str, Any]
    provider: Mapping[str, Any]

    def text(self, template: str) -> str:
        """What a template makes of the cluster."""
        names = {"cluster": self.values, "path": self.path, "title": self.provider["title"]}
        names["date"] = time.strftime("%Y-%m-%d", time.localtime(files.modified(self.path)))
        return render(template, names)


def find_cluster(name: str, project: Project, environ: Mapping[str, str]) -> Cluster:
    """The cluster of a file in clusters/. Raises RunnerError for a mistake in it, with the line."""
    path = project.find("clusters", name)
    document = read_toml(path)
    provider = typed(document, ("provider",), str, "")
    if provider not in ("aws", "google"):
        raise unknown(
            "provider",
            provider,
            ("aws", "google"),
            "use one of the known names",
            document.place("provider"),
        )
    if adopted := typed(document, ("document",), str):
        found = read_adopted(provider, path.parent / adopted)
        document = Document(path, merge(found, document.data), document.text)
    match = facts("providers")[provider]["match"]
    values = _table(document, (), "top", match)
    values |= {name: _table(document, (name,), name, match) for name in ("head", "network")}
    for kind in ("queues", "storage"):
        values[kind] = [
            {"name": name, **_table(document, (kind, name), kind, match)} for name in values[kind]
        ]
    for queue in values["queues"]:
        queue["machine"] = _machine(queue, provider, document)
    for key, variables in facts("providers")[provider]["needs"].items():
        values[key] = next(filter(None, (values[key], *map(environ.get, variables))), "")
    values["deployment"] = values["deployment"] or path.stem
    priced = (values["head"], *values["storage"], *values["queues"])
    values["most_per_hour"] = float(
        sum(each["price_per_hour"] * each.get("count", 1) for each in priced)
    )
    _check(values, document)
    folder = (project.root or project.start) / "clusters" / path.stem
    return Cluster(path.stem, path, folder, values, facts("providers")[provider])


def _table(
    document: Document, keys: Keys, section: str, match: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a table, with the defaults of keys.toml."""
    known, found = facts("keys")[section], {}
    if keys:
        typed(document, keys, dict)
    refuse_unknown_keys(document, keys, known, "cluster file")
    for name, key in known.items():
        where, like = (*keys, name), key.get("default", key.get("example"))
        value = found[name] = typed(document, where, type(like), key.get("default"))
        place, pattern = document.place(*where), match.get(key.get("match", ""), ".*")
        if value is None:
            raise RunnerError(
                f"{place}: {'.'.join(where)} is missing", key["meaning"], f"{name} = {like!r}"
            )
        if value and "match" in key and not re.fullmatch(pattern, value):
            why = key["meaning"] + (
                f"; it must match {pattern!r}" if pattern else "; this provider has no such key"
            )
            fix = "correct the value" if pattern else "remove the key"
            raise RunnerError(f"{place}: {name} cannot be {value!r}", why, fix)
    return found


def _machine(queue: Mapping[str, Any], provider: str, document: Document) -> Mapping[str, Any]:
    """The machine type of a queue; empty if it has no GPUs. Raises RunnerError for an unknown type with GPUs."""
    name, known = queue["machine_type"], machine_types()[provider]["types"]
    if name in known or not re.match(facts("providers")[provider]["gpu_machine_type"], name):
        return dict(known.get(name, {}))
    if queue["cpus"] and queue["memory_gb"]:
        counts = {"gpus_per_node": queue["gpus"], "cpus_per_node": queue["cpus"]}
        return {"site": {**counts, "memory": f"{queue['memory_gb']}G"}, "own": True}
    place = document.place("queues", queue["name"], "machine_type")
    error = unknown("GPU machine type", name, known, place=place)
    # a newer type may exist in the cloud
    error.what = f"{place}: runner does not know the GPU machine type {name!r}"
    error.fix += "\nor set gpus, cpus and memory_gb of the queue"
    raise error


def _check(values: Mapping[str, Any], document: Document) -> None:
    """Raise RunnerError for the first rule of keys.toml that the values break."""
    import jinja2  # slow to import

    environment = jinja2.Environment()
    environment.tests["like"] = lambda text, pattern: re.fullmatch(pattern, text) is not None
    about = facts("providers")[values["provider"]]
    more = {
        "about": about,
        "google": values["provider"] == "google",
        "adopted": bool(values["document"]),
    }
    for rule in facts("keys")["rules"]:
        breaks, kind = environment.compile_expression(rule["when"]), rule["table"]
        for each in values[kind] if kind else (values,):
            keys = ((kind, each["name"]) if kind else ()) + tuple(rule["key"].split())
            if breaks(each, **more, given=document.get(*keys) is not None):
                what, fix = (rule[part].format(**each, about=about) for part in ("what", "fix"))
                raise RunnerError(
                    f"{document.place(*keys)}: {what}", f"{about['title']} does not accept it", fix
                )
