"""From a source to an image in the engine's storage: found there, pulled, or loaded from a layout or archive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images.content import files_hash
from runner.images.engine import Engine
from runner.images.image import Image
from runner.images.oci.build_pump import run_logged
from runner.images.oci.store import Store
from runner.images.recipe import load_recipe, recipe_names
from runner.images.source import Source
from runner.machine import process
from runner.machine.plan import Step
from runner.machine.report import Report
from runner.project import Project


@dataclass(frozen=True)
class Shelf:
    """An engine with its storage, the project whose recipes bare names mean, and where progress goes."""

    engine: Engine
    store: Store
    project: Project
    log: Path
    report: Report


def locate(source: Source, at: Shelf) -> Image:
    """The image of a source, brought into the storage where it is not there. Raises RunnerError where it cannot."""
    finders: dict[str, Callable[[Source, Shelf], Image]] = {"": _bare, "docker": _pulled}
    finder = finders.get(source.scheme, _stored if source.scheme in ("podman", "dockerd") else _loaded)
    return finder(source, at)


def engine_of(source: Source) -> str | None:
    """The engine that a source names by itself."""
    return {"podman": "podman", "dockerd": "docker"}.get(source.scheme)


def _bare(source: Source, at: Shelf) -> Image:
    """A recipe's image, the one that was built last; else any image of that name."""
    name = source.reference
    if name in recipe_names(at.project):
        recipe = load_recipe(name, at.project)
        latest = at.store.find(f"{recipe.repository}:latest")
        if latest is None:
            raise RunnerError(
                f"the image of recipe {name!r} is not built yet",
                f"{at.engine.name}'s storage has no {recipe.repository}",
                f"runner build {name} && runner import {name}   (or `runner build {name} --import`)",
            )
        if latest.labels.get("runner.recipe.files") != files_hash(recipe):
            at.report.warn(f"recipe {name!r} has changed since its image was built: `runner build {name}` builds anew")
        return latest
    image = at.store.find(name) or at.store.find(f"localhost/runner/{name}")
    if image is None:
        raise unknown("recipe or image", name, recipe_names(at.project), "docker://REGISTRY#IMAGE:TAG pulls one")
    return image


def _stored(source: Source, at: Shelf) -> Image:
    image = at.store.find(source.reference)
    if image is None:
        raise RunnerError(
            f"{at.engine.name} has no image {source.reference!r}",
            "its storage was asked, nothing was pulled",
            f"{at.engine.name} images   (lists them); docker://REGISTRY#IMAGE:TAG pulls one",
        )
    return image


def _pulled(source: Source, at: Shelf) -> Image:
    """The registry's image; the engine fetches what its storage lacks, so that a moved tag is seen."""
    at.report.say(f"fetching {source.reference} with {at.engine.name}")
    said: list[str] = []
    step = Step(f"fetch {source.reference}", (at.engine.name, "pull", source.reference), at.engine.env)
    if run_logged(step, at.log, _listener(said, at.report)) != 0:
        user = f"-u '{source.user}' " if source.user else ""
        registry = source.reference.partition("/")[0]
        raise RunnerError(
            f"cannot fetch {source.reference}",
            "\n".join(said[-4:]) or "the engine printed nothing",
            f"check the name; where it needs an account: {at.engine.name} login {user}{registry}",
        )
    return _stored(source, at)


def _loaded(source: Source, at: Shelf) -> Image:
    """The image of an OCI layout or an archive, loaded under a name made from its path."""
    where = f"{source.scheme}:{source.reference}{f':{source.tag}' if source.tag else ''}"
    name = f"localhost/imported/{source.name.lower().replace('+', '-')}:{_hash(where)}"
    at.report.say(f"loading {where} into {at.engine.name}'s storage")
    process.need(("skopeo",))
    target = f"containers-storage:{name}" if at.engine.name == "podman" else f"docker-daemon:{name}"
    said: list[str] = []
    # skopeo writes to podman's storage as its rootless user only from within podman's own user namespace
    inside = ("podman", "unshare") if at.engine.name == "podman" and not _is_root() else ()
    step = Step(f"load {where}", (*inside, "skopeo", "copy", where, target), at.engine.env)
    if run_logged(step, at.log, _listener(said, at.report)) != 0:
        raise RunnerError(
            f"cannot read {where}",
            "\n".join(said[-4:]) or "skopeo printed nothing",
            "skopeo inspect shows what it holds; a layout with several images needs :TAG behind it",
        )
    image = at.store.find(name)
    if image is None:
        raise RunnerError(f"{name} is not in the storage", "skopeo said it had copied it there", "import it again")
    return image


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_root() -> bool:
    from runner.machine import probe

    return probe.is_root()


def _listener(kept: list[str], report: Report) -> Callable[[str], None]:
    def listen(line: str) -> None:
        kept.append(line)
        report.detail(line)

    return listen
