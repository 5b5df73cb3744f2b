"""What can be checked before a job is submitted: its image is there and fits, the sources of its mounts exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runner.environments.environment import Environment
from runner.environments.mount import Mount
from runner.errors import RunnerError
from runner.expansion import expand
from runner.images.squashfs_file import Squashfs, find_squashfs
from runner.machine.files import explain
from runner.machine.probe import oci_architecture
from runner.runs.cache.folder import CACHE_MOUNT
from runner.site import Site

RUN_MOUNT = Mount("${RUNNER_RUN}", "${RUNNER_RUN}")
CODE_MOUNT = Mount("${RUNNER_RUN}/code", "${RUNNER_RUN}/code", ("ro",))
"""over RUN_MOUNT: what a run was made of stays as it was"""


@dataclass(frozen=True)
class LaunchImage:
    """What the emitted EDF names as its image."""

    reference: str
    """an absolute squashfs path named by content, a registry reference, or empty: no container"""
    squashfs: Squashfs | None = None
    """what is known of a file that `runner import` made; None for anybody else's"""
    stable: Path | None = None
    """the path that the EDF names, a symlink as a rule"""
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether a file is named that is not there."""
        return self.stable is not None and not self.stable.exists()


def find_image(environment: Environment, site: Site, environ: Mapping[str, str], *, strict: bool = True) -> LaunchImage:
    """The image that an environment names, with its squashfs file resolved to the one named by content.

    Where the path has a variable that is not defined here, the job's own counts (`strict`: RunnerError).
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
        # plain srun reads it from where it is started; the file's own folder is what its author meant
        stable = ((environment.path or Path.cwd() / "x").parent / stable).absolute()
    found = find_squashfs(stable)
    if found is None and stable.exists():
        return _foreign(stable)
    return LaunchImage(str(found.path if found else stable), found, stable)


def _foreign(stable: Path) -> LaunchImage:
    """A squashfs file that somebody else has made (enroot, an admin): used as it is. Raises RunnerError otherwise."""
    path = stable.resolve()
    try:
        with path.open("rb") as file:
            mark = file.read(4)
    except OSError as error:
        raise explain(error, f"read the image {path}") from error
    if mark != b"hsqs":
        raise RunnerError(
            f"the image {path} is not a squashfs file",
            "it does not begin with squashfs' mark: damaged, or of another kind",
            "import it again: runner import --force NAME",
        )
    return LaunchImage(str(path), None, stable)


def missing_image(image: LaunchImage, environment: Environment, environ: Mapping[str, str]) -> RunnerError:
    """The error for an image that is not there, with the commands that make it, or the folder that has it."""
    assert image.stable is not None
    recipe = image.stable.name.removesuffix(".sqsh")
    what = f"the image of environment {environment.name!r} is not here: {image.stable}"
    if found := _elsewhere(image.stable, environ):
        site, folder = found
        return RunnerError(
            what,
            f"the image folder of site {site} has it: {folder / image.stable.name}",
            f"export RUNNER_IMAGES={folder}\nor import it here too: runner import {recipe}",
        )
    return RunnerError(
        what,
        "it was not built and imported yet",
        f"runner build {recipe}\nrunner import {recipe}\nor add --build, which does both first",
    )


def _elsewhere(image: Path, environ: Mapping[str, str]) -> tuple[str, Path] | None:
    """The site, and its image folder, that has the image."""
    from runner.site_files import load_site, site_names  # only errors need them

    without = {name: value for name, value in environ.items() if name != "RUNNER_IMAGES"}
    for name in site_names(environ):
        try:
            folder = load_site(name, environ).images(without)
        except RunnerError:  # a variable that is not defined here
            continue
        if folder != image.parent and (folder / image.name).exists():
            return name, folder
    return None


def check_architecture(image: LaunchImage, site: Site) -> tuple[str, ...]:
    """Warnings, none as a rule. Raises RunnerError where the image is for other processors than the site's nodes."""
    if image.squashfs is None or site.architecture is None or not image.squashfs.architecture:
        return ()
    own, wanted = oci_architecture(image.squashfs.architecture), oci_architecture(site.architecture)
    if own != wanted:
        raise RunnerError(
            f"{image.squashfs.path.name} is an image for {own}, and the nodes of {site.name} are {wanted}",
            "its programs cannot run there (`exec format error`)",
            f"build it for them: runner build --site {site.name}, on such a machine; or choose another site",
        )
    return ()


def check_mounts(environment: Environment, environ: Mapping[str, str], *, here: bool = False) -> tuple[str, ...]:
    """Warnings about mounts that cannot be judged here. Raises RunnerError for a source that is missing.

    `here`: the job runs on this machine, so every mount can be judged.
    """
    notes: list[str] = []
    for mount in environment.mounts:
        if mount in (RUN_MOUNT, CACHE_MOUNT):
            continue
        try:
            source = Path(expand(mount.source, environ, "a mount"))
        except RunnerError:
            notes.append(f"the mount {mount.text()} is not checked: its variables are known only in the job")
            continue
        if source.exists():
            continue
        ancestor = next(parent for parent in source.parents if parent.exists())
        if ancestor == Path("/") and not here:
            notes.append(f"the mount source {source} is not on this machine: it must exist on the nodes")
            continue
        origin = environment.origins.get("mounts." + str(environment.mounts.index(mount)))
        raise RunnerError(
            f"the mount source {source} does not exist" + (f" ({origin})" if origin else ""),
            f"the environment {environment.name!r} mounts it; {ancestor} holds no {_below(source, ancestor)}",
            f"make it, or correct the mount in {environment.path or 'the environment'}",
        )
    return tuple(notes)


def _below(source: Path, ancestor: Path) -> str:
    return source.relative_to(ancestor).parts[0]


def check_run_folder(folder: Path, site: Site, engine: str) -> None:
    """Raise RunnerError for a path that Slurm or a container engine would read as something else.

    Source: sbatch(1), "filename pattern"; the mount syntax SOURCE:TARGET of all engines, pyxis' comma between mounts.
    """
    reasons: dict[str, str] = {}
    if site.scheduler == "slurm":
        reasons |= {"%": "Slurm fills in `%j` and the like", "\\": "Slurm reads it as an escape"}
    if engine != "host":
        reasons |= {":": "a mount is SOURCE:TARGET", ",": "a comma separates mounts"}
    for character, why in reasons.items():
        if character in str(folder):
            raise RunnerError(
                f"cannot make runs in {str(folder)!r}",
                f"the path has {character!r}, and {why}",
                "name another folder: export RUNNER_RUNS=/path/to/runs",
            )
    if not str(folder).isprintable():
        raise RunnerError(
            f"cannot make runs in {str(folder)!r}",
            "the path has a line break or another character that cannot be printed",
            "name another folder: export RUNNER_RUNS=/path/to/runs",
        )


def for_the_run(environment: Environment, image: LaunchImage, more: tuple[Mount, ...] = ()) -> Environment:
    """The environment as the job gets it: image by content; run folder and shared cache mounted at their own paths."""
    return replace(environment, image=image.reference, mounts=(*environment.mounts, RUN_MOUNT, CACHE_MOUNT, *more))
