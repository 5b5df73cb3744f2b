"""Open the image that the user named, from any source, so that its layers can be read."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.images.engine import Engine, choose_engine, open_store
from runner.images.layers.layer import LayeredImage
from runner.images.recipe import files_hash, load_recipe, recipe_names
from runner.images.reference import Source, registry_reference
from runner.images.sources import archive, layout
from runner.images.sources.engine_storage import Image
from runner.machine import files, probe
from runner.machine.report import Report
from runner.project import Project


@dataclass(frozen=True)
class Access:
    """How to access images: this machine, this project, and the user's options."""

    environ: Mapping[str, str]
    project: Project
    architecture: str = field(default_factory=probe.architecture)
    """of the nodes, as OCI names it"""
    engine: str | None = None
    """for bare names: podman or docker (default: the first that works)"""
    allow_http: int = 0
    """1: registries on other machines may be used without TLS; 2: logins may be sent to them without TLS too"""
    connections: int = 8
    """simultaneous connections to a registry"""


@contextmanager
def open_image(source: Source, access: Access, report: Report) -> Iterator[LayeredImage]:
    """The image of a source, which is open inside `with`. A layer is not read before it is opened.

    Raises RunnerError if the image is missing, damaged or for another architecture.
    """
    path, architecture = Path(source.reference), access.architecture
    if source.scheme == "oci":
        yield layout.read_layout(
            layout.Folder(path), source.tag, architecture=architecture, reference=str(source)
        )
    elif source.scheme in ("oci-archive", "docker-archive"):
        read = layout.read_layout if source.scheme == "oci-archive" else archive.read_docker_archive
        with archive.open_archive(path) as files:
            yield read(files, source.tag, architecture=architecture, reference=str(source))
    elif source.scheme == "docker":
        from runner.images.sources.registry.repository import open_registry_image
        from runner.images.sources.registry.web import Web

        reference = replace(registry_reference(source.reference), user=source.user)
        web = Web(access.environ, allow_http=access.allow_http, connections=access.connections)
        with open_registry_image(reference, web, architecture) as image:
            yield image
    else:
        with _open_stored(source, access, report) as image:
            yield image


@contextmanager
def _open_stored(source: Source, access: Access, report: Report) -> Iterator[LayeredImage]:
    """An image in an engine's storage. podman's images are read layer by layer. docker's, and podman's if the layers
    cannot be rebuilt, are read as one layer that the engine exports."""
    from runner.images.sources.engine_storage import exported
    from runner.images.sources.podman_storage import NotRebuildable, open_stored

    engine, found = find_stored(source, access, report)
    reference, store = found.reference, open_store(engine, access.environ)
    whole = exported(found, store, report, architecture=access.architecture, reference=reference)
    if engine.name != "podman":
        yield whole
        return
    with ExitStack() as stack:
        try:
            env = {**access.environ, **engine.env}
            opened = open_stored(found, env, architecture=access.architecture, reference=reference)
            image = stack.enter_context(opened)
        except NotRebuildable as reason:
            report.say(
                f"cannot read the layers of {reference} one by one ({reason}): "
                "using podman export, which gives one layer with the same files"
            )
            image = whole
        yield image


def find_stored(source: Source, access: Access, report: Report) -> tuple[Engine, Image]:
    """The engine whose storage has the image of a source, and that image. Raises RunnerError if it is missing."""
    from runner.images.sources.engine_storage import find

    requested = {"podman": "podman", "dockerd": "docker"}.get(source.scheme, access.engine)
    try:
        engine = choose_engine(requested, access.environ)
    except RunnerError as error:
        if source.scheme or source.reference in recipe_names(access.project):
            raise
        advice = f"{_from_registry(source.reference)}\nor {error.fix}"
        raise RunnerError(error.what, error.why, advice) from error
    report.say(f"engine: {engine.name} ({engine.why})")
    for note in engine.notes:
        report.detail(note)
    store = open_store(engine, access.environ)
    if source.scheme:
        return engine, find(store, source.reference, engine.name)
    return engine, _find_bare(source, engine, access, report)


def _from_registry(name: str) -> str:
    """The advice for a name without a scheme. enroot writes nvcr.io/nvidia/pytorch as docker://nvcr.io#nvidia/pytorch."""
    if name.startswith((".", "/", "~")) or files.is_file(Path(name)):
        return "to read a file or folder: oci:DIR, oci-archive:FILE or docker-archive:FILE"
    registry, slash, rest = name.partition("/")
    spelt = f"{registry}#{rest}" if slash and {".", ":"} & {*registry} else name
    return f"to read it from its registry: docker://{spelt}"


def _find_bare(source: Source, engine: Engine, access: Access, report: Report) -> Image:
    """The newest image of a recipe, or else any image with that name."""
    name, project, store = source.reference, access.project, open_store(engine, access.environ)
    if name in recipe_names(project):
        recipe = load_recipe(name, project)
        latest = store.find(f"{recipe.repository}:latest")
        if latest is None:
            raise RunnerError(
                f"the image of recipe {name!r} has not been built yet",
                f"{engine.name}'s storage has no {recipe.repository}",
                f"runner build {name} && runner import {name}   (or `runner build {name} --import`)",
            )
        if latest.labels.get("runner.recipe.files") != files_hash(recipe):
            report.warn(
                f"recipe {name!r} has changed since its image was built; to rebuild it, with the options as before: "
                f"runner build {name}"
            )
        return latest
    image = store.find(name) or store.find(f"localhost/runner/{name}")
    if image is None:
        raise unknown(
            "recipe or image",
            name,
            recipe_names(project),
            _from_registry(name),
        )
    return image
