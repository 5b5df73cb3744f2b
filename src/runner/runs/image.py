"""The image of a launch: the reference in its emitted EDF, and the squashfs file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.environments.edf import Mount
from runner.environments.engines import engine_of
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand
from runner.machine.files import explained
from runner.machine.probe import oci_architecture
from runner.runs.hub import CACHE_MOUNT
from runner.site import Site

if TYPE_CHECKING:
    from runner.images.sarus_store import Stored
    from runner.images.squashfs_file import Squashfs

RUN_MOUNT = Mount("${RUNNER_RUN}", "${RUNNER_RUN}")
CODE_MOUNT = Mount("${RUNNER_RUN}/code", "${RUNNER_RUN}/code", ("ro",))
"""mounted over RUN_MOUNT, so that a job cannot change the code that it was launched with"""


class LaunchImage(NamedTuple):
    """The image in the emitted EDF."""

    reference: str
    """the absolute path of a squashfs file named by its content, or a registry reference; empty: no container"""
    squashfs: Squashfs | None = None
    """facts about a file that `runner import` made; None for other files"""
    stable: Path | None = None
    """the path in the user's EDF, which is usually a symlink"""
    notes: tuple[str, ...] = ()
    stored: Stored | None = None
    """facts about an image that runner has put into Sarus Suite's store"""
    brought_by: tuple[str, ...] = ()
    """the command that puts the image into Sarus Suite's store, which lacks it; empty: not missing there"""

    @property
    def missing(self) -> bool:
        """Whether the image is a file that does not exist, or is not in Sarus Suite's store."""
        return bool(self.brought_by) or (self.stable is not None and not self.stable.exists())


def find_image(
    environment: Environment,
    site: Site,
    environ: Mapping[str, str],
    engine: str,
    *,
    strict: bool = True,
) -> LaunchImage:
    """The image of an environment. A squashfs path is resolved to the file that is named by its content; for an
    engine with a store, to the reference in it.

    If that fails, `strict` raises the RunnerError; otherwise, the image is not checked, and the notes say so.
    """
    text = environment.image
    if text and engine_of(engine).has_store:
        return _in_store(environment, site, environ, strict=strict)
    if not environment.is_squashfs:
        return LaunchImage(text)
    try:
        folder = site.images(environ) if "${RUNNER_IMAGES" in text else None
        return _file(environment, {**environ, **({"RUNNER_IMAGES": str(folder)} if folder else {})})
    except RunnerError as error:
        if strict:
            raise
        text = text.replace("${RUNNER_IMAGES}", site.image_folder)
        return LaunchImage(text, notes=(f"{error.what}: the image is not checked",))


def _file(environment: Environment, variables: Mapping[str, str]) -> LaunchImage:
    stable = Path(expand(environment.image, variables, f"the image of {environment.name}"))
    if not stable.is_absolute():
        # plain srun resolves a relative path from the current folder, but the author of the EDF meant the EDF's folder
        stable = ((environment.path or Path.cwd() / "x").parent / stable).absolute()
    if not stable.exists():
        return LaunchImage(str(stable), None, stable)
    from runner.images.squashfs_file import find_squashfs  # slow to import

    if found := find_squashfs(stable):
        return LaunchImage(str(found.path), found, stable)
    path = stable.resolve()  # runner did not make it, but enroot or an admin
    with explained(f"read the image {path}"), path.open("rb") as file:
        mark = file.read(4)
    if mark != b"hsqs":
        raise RunnerError(
            f"the image {path} is not a squashfs file",
            "the file does not begin like a squashfs file: it is damaged or has another type",
            f"correct `image` in the EDF, or write the file again: runner import SOURCE -o {path} --force",
        )
    return LaunchImage(str(path), None, stable)


def _in_store(
    environment: Environment, site: Site, environ: Mapping[str, str], *, strict: bool
) -> LaunchImage:
    """The image in Sarus Suite's store, as `sarusctl images` lists it. A wrong path is left to the engine's check."""
    from runner.images import sarus_store
    from runner.images.reference import parse_reference

    text = environment.image
    try:
        images = site.images(environ)
    except RunnerError:  # the folder is known only on the site
        images = None
    name = sarus_store.name_in(text, images)
    if environment.is_squashfs and not name:
        return LaunchImage(text)
    reference = sarus_store.reference_of(text, images) or parse_reference(text).with_slash
    stored = sarus_store.read_record(images, reference) if images else None
    image = LaunchImage(reference, stored=stored)
    own = reference.startswith("localhost/runner/")
    brought_by: tuple[str, ...] = ("runner", "import", f"docker://{text}")
    if name or own:
        brought_by = (
            "runner",
            "build",
            name or reference.split("/")[2].partition(":")[0],
            "--import",
        )
    if "@" in reference:
        return image._replace(notes=(f"{reference} is not checked: sarusctl lists no digests",))
    try:
        row = sarus_store.find(reference, sarus_store.list_images())
    except RunnerError as error:
        if strict and (name or own):
            raise
        return image._replace(notes=(f"{error.what}: the image {reference} is not checked",))
    if row is None or sarus_store.is_half(row, sarus_store.store_folder(environ)):
        return image._replace(brought_by=brought_by)
    if stored and stored.id != row.id and strict:
        raise RunnerError(
            f"the image {reference} in the store is not the one that runner put there",
            f"the tag has moved: the store has {row.id}, and runner put {stored.id} there",
            f"to use it: runner import {stored.source}\nto replace it: runner import --force {stored.source}",
        )
    return image


def missing_image(
    image: LaunchImage, environment: Environment, environ: Mapping[str, str]
) -> RunnerError:
    """The error for a missing image. It names the commands that build it, or a folder that contains it."""
    if image.brought_by:
        return RunnerError(
            f"the image of environment {environment.name!r} is not in Sarus Suite's store: {image.reference}",
            "the store lacks all or part of it, so each node would try to pull it when the job starts",
            f"{' '.join(image.brought_by)}\nor, with `runner launch` and `runner shell`: --build",
        )
    assert image.stable is not None
    recipe = image.stable.name.removesuffix(".sqsh")
    what = f"the image of environment {environment.name!r} does not exist: {image.stable}"
    why = "it was not imported yet, it was removed, or the path is wrong"
    fix = f"runner build {recipe}\nrunner import {recipe}\nor, with `runner launch` and `runner shell`: --build"
    if found := _elsewhere(image.stable, environ):
        site, folder = found
        why = f"the image is in the image folder of site {site}: {folder / image.stable.name}"
        fix = f"export RUNNER_IMAGES={folder}\nor import the image for this site too: runner import {recipe}"
    return RunnerError(what, why, fix)


def _elsewhere(image: Path, environ: Mapping[str, str]) -> tuple[str, Path] | None:
    """Another site whose image folder contains the image, and that folder; None if there is none."""
    from runner.site_files import own_image_folder, site_names

    for name in site_names(environ):
        try:
            text = own_image_folder(name, environ)
            folder = (
                Path(expand(text, environ, "an image folder")).absolute() if text else image.parent
            )
        except RunnerError:  # a variable that is not defined here
            continue
        if folder != image.parent and (folder / image.name).exists():
            return name, folder
    return None


def check_architecture(image: LaunchImage, site: Site) -> None:
    """Raise RunnerError if the image's architecture differs from that of the site's nodes."""
    known = image.squashfs or image.stored
    if known is None or site.architecture is None or not known.architecture:
        return
    own, wanted = oci_architecture(known.architecture), oci_architecture(site.architecture)
    if own != wanted:
        name = image.squashfs.path.name if image.squashfs else image.reference
        recipe = known.labels.get("runner.recipe")
        fix = f"if the registry has it for {wanted}: runner import {known.source or 'SOURCE'} --site {site.name}"
        if recipe:
            fix = f"on a machine with {wanted}: runner build {recipe} --import --site {site.name}"
        raise RunnerError(
            f"{name} is an image for {own}, but the nodes of {site.name} are {wanted}",
            "the nodes cannot run its programs (`exec format error`)",
            f"{fix}; or choose another --site",
        )


def run_environment(
    environment: Environment, image: LaunchImage, more: tuple[Mount, ...] = ()
) -> Environment:
    """The environment for the job: the image by content; run folder and shared cache mounted at their own paths."""
    return replace(
        environment,
        image=image.reference,
        mounts=(*environment.mounts, RUN_MOUNT, CACHE_MOUNT, *more),
    )
