"""build: Containerfile -> OCI image."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import chosen_site
from runner.errors import RunnerError
from runner.images.build.base import BuildOptions
from runner.images.build.build import build, dry_run
from runner.images.build.copies import check_copies
from runner.images.build.job import BuildJob, check_account, goes_to_a_job, run, script, submission
from runner.images.recipe import Recipe, check_platform, load_recipe, with_flags
from runner.images.squashfs_file import find_squashfs
from runner.machine import folders
from runner.machine.report import Report
from runner.project import Project, find_project
from runner.site import Site

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.environments.environment import Environment
    from runner.runs.image import LaunchImage
    from runner.runs.launch import MakeImage


def build_image(args: argparse.Namespace, console: Console) -> int:
    """`runner build`: prints NAME:TAG, or with --import the squashfs file's path."""
    project = find_project()
    recipe = with_flags(load_recipe(args.recipe, project, args.base_tag), args.rest)
    console.say(f"recipe: {recipe.path}")
    options = _build_options(args)
    site = chosen_site(args, console) if args.then_import else None
    if site is not None:
        options, site = on_one_platform(recipe, options, site)
    if site is not None and goes_to_a_job(site, os.environ):
        check_copies(recipe)
        return _build_in_a_job(recipe.name, site, args, console)
    if args.sbatch:
        where = (
            f"on site {site.name}, {recipe.name}" if site else f"without --import, {recipe.name}"
        )
        raise RunnerError(
            "--sbatch has no effect here",
            f"{where} is built on this machine, not in a job",
            "leave out --sbatch",
            exit_code=2,
        )
    if args.dry_run:
        console.answer(dry_run(recipe, options, os.environ, console))
        return 0
    image = build(recipe, options, os.environ, console)
    if site is not None:
        from runner.commands.import_ import import_source

        scheme = "dockerd" if image.engine == "docker" else image.engine
        return import_source(f"{scheme}://{image.reference}", site, args, console)
    if args.json:
        console.answer_json({**asdict(image), "reference": image.reference})
    else:
        console.answer(image.reference)
    return 0


def on_one_platform(recipe: Recipe, options: BuildOptions, site: Site) -> tuple[BuildOptions, Site]:
    """Both for the platform that the user chose, else for that of the site's nodes, so that the import after the build
    accepts the image."""
    if options.platform is None:
        platform = f"linux/{site.architecture}" if site.architecture else None
        return replace(options, platform=platform), site
    platform = check_platform(recipe, options.platform)
    return options, replace(site, architecture=platform.partition("/")[2])


def _build_in_a_job(name: str, site: Site, args: argparse.Namespace, console: Console) -> int:
    """`runner build --import` on a site whose nodes keep podman's images in memory: one job does both."""
    options = ("tag", "base_tag", "platform", "engine")
    values = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in options]
    values += [("--build-arg", word) for word in args.build_arg]
    rest = ("--", *args.rest) if args.rest else ()
    flags = [f"{flag}={value}" for flag, value in values if value] + (
        ["--no-cache"] if args.no_cache else []
    )
    words = (
        sys.executable,
        "-P",
        "-m",
        "runner",
        "build",
        args.recipe,
        "--import",
        f"--site={site.name}",
        *flags,
        *rest,
    )
    here = Path.cwd()
    job = BuildJob(name, here, here, words, site.container_storage or "", site.images(os.environ))
    if args.dry_run:
        console.say(shlex.join(submission(job, site, args.sbatch)))
        console.answer(script(job))
        return 0
    check_account(site, args.sbatch, os.environ)
    folder = folders.take_numbered(folders.cache_folder(os.environ) / "build-jobs", name)
    path = run(replace(job, folder=folder), site, args.sbatch, console)
    from runner.images import sarus_store

    made = find_squashfs(path) or sarus_store.read_record(site.images(os.environ), str(path))
    if args.json and made is not None:
        console.answer_json(made.record())
    else:
        console.answer(str(path))
    return 0


def _build_options(args: argparse.Namespace) -> BuildOptions:
    for word in args.build_arg:
        if "=" not in word or word.startswith("="):
            raise RunnerError(
                f"--build-arg {word!r} is not of the form NAME=VALUE",
                "--build-arg sets an ARG of the Containerfile",
                "--build-arg NAME=VALUE",
                exit_code=2,
            )
    pairs = (word.split("=", 1) for word in args.build_arg)
    return BuildOptions(
        args.engine, args.tag, args.no_cache, args.platform, {key: value for key, value in pairs}
    )


def image_maker(project: Project, environ: Mapping[str, str], report: Report) -> MakeImage:
    """A function that builds and imports the image that an environment names: IMAGES/RECIPE.sqsh."""
    from runner.images.importer.importer import import_image
    from runner.images.importer.plan import ImportOptions, ImportRequest

    def make(environment: Environment, image: LaunchImage, site: Site) -> None:
        if image.brought_by:
            _put_into_store(image.brought_by, site, project, environ, report)
            return
        assert image.stable is not None
        folder = site.images(environ)
        if image.stable.parent != folder:
            raise RunnerError(
                f"--build cannot make {image.stable}",
                f"--build makes only {folder}/RECIPE.sqsh, from the recipe RECIPE",
                f'write image = "${{RUNNER_IMAGES}}/RECIPE.sqsh" in {environment.path}',
            )
        name = image.stable.name.removesuffix(".sqsh")
        recipe = load_recipe(name, project)
        platform = f"linux/{site.architecture}" if site.architecture else None
        flag = f" --platform {platform}" if platform else ""
        report.say(f"building {name} (same as `runner build {name}{flag}`)")
        build(recipe, BuildOptions(platform=platform), environ, report)
        report.say(f"importing {name} (same as `runner import {name}`)")
        options = ImportOptions(architecture=site.architecture)
        import_image(ImportRequest(name, folder, project, environ, options), report)

    return make


def _put_into_store(
    command: tuple[str, ...],
    site: Site,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
) -> None:
    """Do what the command does that puts a missing image into Sarus Suite's store."""
    from runner.images.importer.plan import ImportOptions, ImportRequest
    from runner.images.importer.sarus import store_image

    _, verb, name, *_ = command
    report.say(f"same as: {' '.join(command)}")
    if verb == "build":
        platform = f"linux/{site.architecture}" if site.architecture else None
        image = build(
            load_recipe(name, project), BuildOptions("podman", platform=platform), environ, report
        )
        name = f"podman://{image.reference}"
    options = ImportOptions(architecture=site.architecture)
    store_image(ImportRequest(name, site.images(environ), project, environ, options), report)
