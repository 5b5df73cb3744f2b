"""From what the user named to an open image: a recipe's, one in an engine's storage, or straight from where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images.building.content import files_hash
from runner.images.engine import Engine, choose_engine, open_store
from runner.images.image import Image
from runner.images.importing.leftovers import clear_containers, container_of
from runner.images.importing.plan import ImportOptions
from runner.images.oci.docker_export import find
from runner.images.oci.layer import LayeredImage
from runner.images.oci.sources import SourceOptions, open_found, open_image
from runner.images.oci.store import Store
from runner.images.recipe import load_recipe, recipe_names
from runner.images.source import Source
from runner.machine.report import Report
from runner.project import Project


class Target:
    """The file that is made of the image; known only after the image has been opened, and before a layer is."""

    path: Path | None = None


@contextmanager
def opened(
    source: Source,
    architecture: str,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: ImportOptions,
    target: Target,
) -> Iterator[LayeredImage]:
    """The image of a source, open for reading its layers. Raises RunnerError where there is none."""
    reading = SourceOptions(allow_http=options.allow_http, connections=options.connections)
    if source.scheme not in ("", "podman", "dockerd"):
        with open_image(source, architecture=architecture, environ=environ, options=reading) as image:
            yield image
        return
    engine = choose_engine({"podman": "podman", "dockerd": "docker"}.get(source.scheme, options.engine), environ)
    report.say(f"engine: {engine.name} ({engine.why})")
    for note in engine.notes:
        report.detail(note)
    store = open_store(engine)
    asked = source.reference
    stored = find(store, asked, engine.name) if source.scheme else _bare(source, engine, store, project, report)

    def name_container() -> tuple[str, Mapping[str, str]]:
        assert target.path is not None, "the target is known before a layer is read"
        clear_containers(target.path, store, report)
        return container_of(target.path)

    reading = SourceOptions(engine_env=engine.env, name_container=name_container)
    known = stored.architecture
    with open_found(stored, store, architecture=known, reference=stored.reference, options=reading) as image:
        for note in image.notes:
            report.say(note)
        yield image


def _bare(source: Source, engine: Engine, store: Store, project: Project, report: Report) -> Image:
    """A recipe's image, the one that was built last; else any image of that name."""
    name = source.reference
    if name in recipe_names(project):
        recipe = load_recipe(name, project)
        latest = store.find(f"{recipe.repository}:latest")
        if latest is None:
            raise RunnerError(
                f"the image of recipe {name!r} is not built yet",
                f"{engine.name}'s storage has no {recipe.repository}",
                f"runner build {name} && runner import {name}   (or `runner build {name} --import`)",
            )
        if latest.labels.get("runner.recipe.files") != files_hash(recipe):
            report.warn(f"recipe {name!r} has changed since its image was built: `runner build {name}` builds anew")
        return latest
    image = store.find(name) or store.find(f"localhost/runner/{name}")
    if image is None:
        raise unknown("recipe or image", name, recipe_names(project), "docker://REGISTRY#IMAGE:TAG fetches one")
    return image
