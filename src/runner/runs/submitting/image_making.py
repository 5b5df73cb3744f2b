"""`launch --build`: the image of an environment, built and imported before the job that needs it."""

from __future__ import annotations

from collections.abc import Mapping

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.images.build.build import BuildOptions, build
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions
from runner.images.recipe import load_recipe
from runner.machine.report import Report
from runner.project import Project
from runner.runs.checking.preflight import LaunchImage
from runner.runs.launch import MakeImage
from runner.site import Site


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
