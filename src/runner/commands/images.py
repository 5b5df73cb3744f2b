"""build, import."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.images.build.build import BuildOptions, build
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions
from runner.images.recipe import load_recipe
from runner.machine.report import Report
from runner.project import Project
from runner.runs.checks import LaunchImage
from runner.runs.launch import MakeImage
from runner.site import Site

TYPE_CHECKING = False  # not typing's: importing it costs a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from runner.commands.console import Console
    from runner.images.build.build import BuildOptions
    from runner.images.importer.plan import ImportOptions
    from runner.images.squashfs_file import Squashfs
    from runner.site import Site

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


DEFAULT_RECIPE = "ngc-deepspeed"


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verbs."""
    _add_build(subparsers, common)
    _add_import(subparsers, common)


def _add_build(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    build = subparsers.add_parser("build", parents=[common], help="Containerfile -> OCI image; prints NAME:TAG")
    build.add_argument("recipe", nargs="?", default=DEFAULT_RECIPE, metavar="RECIPE", help="a name in containers/")
    build.add_argument("--engine", metavar="NAME", help="podman or docker (default: podman, then docker)")
    build.add_argument("--tag", metavar="NAME[:TAG]", help="another name for the image")
    build.add_argument("--base-tag", metavar="TAG", help="a variant of the recipe: a newer tag of its base")
    build.add_argument("--platform", metavar="OS/ARCH", help="linux/amd64 or linux/arm64 (default: this machine's)")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="an ARG's value")
    build.add_argument("--no-cache", action="store_true", help="build every step anew, on a base asked for anew")
    build.add_argument("--import", action="store_true", dest="then_import", help="then make the squashfs; prints PATH")
    build.add_argument("--sbatch", action="append", default=[], metavar="FLAG", help="for sites that build in a job")
    build.add_argument("--json", action="store_true", help="print JSON")
    build.add_argument("--dry-run", action="store_true", help="print a bash script that does the same")
    build.set_defaults(run=build_image)


def _add_import(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("import", parents=[common], help="OCI image -> squashfs; prints PATH")
    parser.add_argument(
        "image",
        nargs="?",
        default=DEFAULT_RECIPE,
        metavar="IMAGE",
        help=(
            "a recipe or image, podman://IMAGE, dockerd://IMAGE, docker://[USER@]REGISTRY#IMAGE[:TAG], oci:DIR[:TAG], "
            "oci-archive:FILE, docker-archive:FILE"
        ),
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write this file, and no symlink")
    parser.add_argument("--engine", metavar="NAME", help="podman or docker (default: podman, then docker)")
    _add_packing(parser)
    parser.add_argument("--force", action="store_true", help="replace the file, even if runner did not make it")
    parser.add_argument("--no-cache", action="store_true", help="make the file anew")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dry-run", action="store_true", help="say what would be read, reused and written")
    parser.set_defaults(run=import_squashfs)


def _add_packing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compression", default="lz4", metavar="NAME[:LEVEL]", help="lz4 (default), zstd:1, …")
    parser.add_argument("--owners", default="root", metavar="root|keep", help="whose the files are (default: root)")
    parser.add_argument("--xattrs", default="keep", metavar="keep|drop", help="extended attributes (default: keep)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that compress (default: all processors)")
    parser.add_argument("--verify", default="all", metavar="all|digest", help="what is checked (default: all)")
    parser.add_argument("--connections", type=int, default=8, metavar="N", help="to a registry at a time (default: 8)")
    parser.add_argument(
        "--allow-http", action="count", default=0, help="read from a registry without TLS; twice: send it a login too"
    )


def build_image(args: argparse.Namespace, console: Console) -> int:
    """`runner build`: prints NAME:TAG, or with --import the squashfs file's path."""
    from dataclasses import asdict

    from runner.images.build.build import build, dry_run
    from runner.images.build.job import goes_to_a_job
    from runner.images.recipe import load_recipe
    from runner.project import find_project

    project = find_project()
    recipe = load_recipe(args.recipe, project, args.base_tag)
    console.say(f"recipe: {recipe.path}")
    report = BuildConsole(console)
    options = _build_options(args)
    site = _site(args, console) if args.then_import else None
    if site is not None and goes_to_a_job(site, os.environ):
        return _build_in_a_job(recipe.name, site, args, console)
    if args.dry_run:
        console.answer(dry_run(recipe, options, os.environ, report))
        return 0
    image = build(recipe, options, os.environ, report)
    if site is not None:
        return _import(f"{_scheme(image.engine)}://{image.reference}", site, args, console)
    if args.json:
        console.answer_json({**asdict(image), "reference": image.reference})
    else:
        console.answer(image.reference)
    return 0


def _build_in_a_job(name: str, site: Site, args: argparse.Namespace, console: Console) -> int:
    """`runner build --import` for a site whose nodes keep podman's images in their memory: one job does both."""
    from pathlib import Path

    from runner.images.build import job as build_job
    from runner.images.squashfs_file import find_squashfs

    values = [
        ("--tag", args.tag),
        ("--base-tag", args.base_tag),
        ("--platform", args.platform),
        ("--engine", args.engine),
    ]
    values += [("--build-arg", word) for word in args.build_arg]
    flags = [f"{flag}={value}" for flag, value in values if value] + (["--no-cache"] if args.no_cache else [])
    words = (sys.executable, "-m", "runner", "build", args.recipe, "--import", f"--site={site.name}", *flags)
    images = site.images(os.environ)
    if args.dry_run:
        job = build_job.planned_job(name, words, site, images, Path.cwd())
        console.say(" ".join(build_job.submission(job, site, args.sbatch)))
        console.answer(build_job.script(job))
        return 0
    build_job.check_account(site, args.sbatch, os.environ)
    job = build_job.make_job(name, words, site, images, os.environ)
    path = build_job.run(job, site, args.sbatch, os.environ, console)
    squashfs = find_squashfs(path)
    if args.json and squashfs is not None:
        console.answer_json(_as_dict(squashfs))
    else:
        console.answer(str(path))
    return 0


def _scheme(engine: str) -> str:
    return "dockerd" if engine == "docker" else engine


def _build_options(args: argparse.Namespace) -> BuildOptions:
    from runner.errors import RunnerError
    from runner.images.build.build import BuildOptions

    for word in args.build_arg:
        if "=" not in word or word.startswith("="):
            raise RunnerError(
                f"--build-arg {word!r} is no NAME=VALUE",
                "an ARG of the Containerfile and its value",
                "NAME=VALUE",
                exit_code=2,
            )
    pairs = (word.split("=", 1) for word in args.build_arg)
    return BuildOptions(args.engine, args.tag, args.no_cache, args.platform, {key: value for key, value in pairs})


def import_squashfs(args: argparse.Namespace, console: Console) -> int:
    """`runner import`: prints the squashfs file's path."""
    return _import(args.image, _site(args, console), args, console)


def _import(source: str, site: Site, args: argparse.Namespace, console: Console) -> int:
    from pathlib import Path

    from runner.images.importer.importer import explain_import, import_image
    from runner.project import find_project

    output = getattr(args, "output", None)
    options = _import_options(args, site)
    folder = site.images(os.environ) if not output else Path(output).parent
    if args.dry_run:
        for line in explain_import(source, folder, find_project(), os.environ, console, options):
            console.say(line)
        return 0
    imported = import_image(source, folder, find_project(), os.environ, console, options)
    squashfs, packed = imported.squashfs, imported.packed
    _say_made(squashfs, console)
    if args.json:
        counts = {"layers": packed.layers, "layers_copied": packed.layers_reused, "entries": packed.entries}
        console.answer_json({**_as_dict(squashfs), "made": imported.made, **counts, "seconds": packed.seconds})
    else:
        console.answer(str(squashfs.path))
    return 0


def _import_options(args: argparse.Namespace, site: Site) -> ImportOptions:
    """The options of `import`; `build --import` has the defaults."""
    from pathlib import Path

    from runner.images.importer.plan import STRIPING, ImportOptions

    output = getattr(args, "output", None)
    names = ("compression", "owners", "xattrs", "threads", "verify", "connections", "allow_http")
    return ImportOptions(
        output=Path(output) if output else None,
        again=args.no_cache or getattr(args, "force", False),
        engine=args.engine,
        architecture=site.architecture,
        striping=site.image_striping or STRIPING,
        **{name: getattr(args, name) for name in names if hasattr(args, name)},
    )


def _say_made(squashfs: Squashfs, console: Console) -> None:
    console.say(f"{squashfs.size_bytes / 1e6:,.0f} MB, {squashfs.architecture}, image {squashfs.image_digest[:12]}")
    if squashfs.link != squashfs.path:
        console.say(f"{squashfs.link} -> {squashfs.path.name}")


def _as_dict(squashfs: Squashfs) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(squashfs)


def _site(args: argparse.Namespace, console: Console) -> Site:
    from runner.detection import find_site

    site, why = find_site(args.site, os.environ)
    console.say(f"site: {site.name} ({why})")
    return site


class BuildConsole:
    """The console, with a line below the current step that each next line of output replaces (on a terminal)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = False

    def say(self, line: str) -> None:
        """One line that every user should see."""
        self._wipe()
        self.console.say(line)

    def detail(self, line: str) -> None:
        """One line that is shown with -v."""
        self._wipe()
        self.console.detail(line)

    def warn(self, line: str) -> None:
        """One line about something that will hurt later."""
        self._wipe()
        self.console.warn(line)

    def passing(self, line: str) -> None:
        """The step's last output line; with -v, or without a terminal, a line as any other with -v."""
        if self.console.verbose or not self.console.terminal:
            if line:
                self.console.detail(line)
            return
        self._wipe()
        if line:
            import shutil

            width = shutil.get_terminal_size().columns - 3
            plain = "".join(letter for letter in line if letter.isprintable())
            sys.stderr.write(f"  {plain[:width]}")
            sys.stderr.flush()
            self.shown = True

    def bar(self, what: str, total: int | None, unit: str = "bytes") -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar."""
        self._wipe()
        return self.console.bar(what, total, unit)

    def _wipe(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[2K")
            self.shown = False


def image_maker(project: Project, environ: Mapping[str, str], report: Report) -> MakeImage:
    """The function that makes the image which an environment names: IMAGES/RECIPE.sqsh."""

    def make(environment: Environment, image: LaunchImage, site: Site) -> None:
        assert image.stable is not None
        folder = site.images(environ)
        if image.stable.parent != folder:
            raise RunnerError(
                f"--build cannot make {image.stable}",
                f"only files in the image folder {folder} come from a recipe of their name",
                f'write image = "${{RUNNER_IMAGES}}/RECIPE.sqsh" in {environment.path}',
            )
        name = image.stable.name.removesuffix(".sqsh")
        recipe = load_recipe(name, project)
        platform = f"linux/{site.architecture}" if site.architecture else None
        report.say(f"building {name}, as `runner build {name}` does")
        build(recipe, BuildOptions(platform=platform), environ, report)
        report.say(f"importing {name}, as `runner import {name}` does")
        import_image(name, folder, project, environ, report, ImportOptions(architecture=site.architecture))

    return make
