"""The image of a launch: the reference in its emitted EDF, and the squashfs file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.environments.edf import Mount
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand
from runner.machine.files import explained
from runner.machine.probe import oci_architecture
from runner.runs.hub import CACHE_MOUNT
from runner.site import Site

if TYPE_CHECKING:
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

    @property
    def missing(self) -> bool:
        """Whether the image is a file that does not exist."""
        return self.stable is not None and not self.stable.exists()


def find_image(environment: Environment, site: Site, environ: Mapping[str, str], *, strict: bool = True) -> LaunchImage:
    """The image of an environment. A squashfs path is resolved to the file that is named by its content.

    If that fails, `strict` raises the RunnerError; otherwise, the image is not checked, and the notes say so.
    """
    text = environment.image
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
            "import the image again: runner import --force NAME",
        )
    return LaunchImage(str(path), None, stable)


def missing_image(image: LaunchImage, environment: Environment, environ: Mapping[str, str]) -> RunnerError:
    """The error for a missing image. It names the commands that build it, or a folder that contains it."""
    assert image.stable is not None
    recipe = image.stable.name.removesuffix(".sqsh")
    what = f"the image of environment {environment.name!r} does not exist: {image.stable}"
    why = "the image has not been built and imported yet"
    fix = f"runner build {recipe}\nrunner import {recipe}\nor let the launch do both first: --build"
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
            folder = Path(expand(text, environ, "an image folder")).absolute() if text else image.parent
        except RunnerError:  # a variable that is not defined here
            continue
        if folder != image.parent and (folder / image.name).exists():
            return name, folder
    return None


def check_architecture(image: LaunchImage, site: Site) -> None:
    """Raise RunnerError if the image's architecture differs from that of the site's nodes."""
    if image.squashfs is None or site.architecture is None or not image.squashfs.architecture:
        return
    own, wanted = oci_architecture(image.squashfs.architecture), oci_architecture(site.architecture)
    if own != wanted:
        raise RunnerError(
            f"{image.squashfs.path.name} is an image for {own}, but the nodes of {site.name} are {wanted}",
            "the nodes cannot run its programs (`exec format error`)",
            f"on a machine with {wanted}: runner build RECIPE --import --site {site.name}; or choose another --site",
        )


def run_environment(environment: Environment, image: LaunchImage, more: tuple[Mount, ...] = ()) -> Environment:
    """The environment for the job: the image by content; run folder and shared cache mounted at their own paths."""
    return replace(environment, image=image.reference, mounts=(*environment.mounts, RUN_MOUNT, CACHE_MOUNT, *more))
