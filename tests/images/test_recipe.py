"""A recipe is read from containers/NAME.toml, every complaint names its line; the hash follows what it is made of."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.recipe import (
    Base,
    Recipe,
    check_platform,
    content_hash,
    context_files,
    files_hash,
    load_recipe,
    recipe_names,
    with_build_args,
)
from runner.images.reference import parse_source, registry_reference
from runner.project import Project, shipped_folder

WHOLE = """\
summary = "a whole one"
containerfile = "Containerfile.whole"
pins = "containers/pins/whole.txt"
context = ["containers/pins", "containers/run me.sh"]
platforms = ["linux/amd64"]
python = "3.11"
torch = "2.13.0+cpu"

[[base]]
image = "docker.io/library/python:3.11"

[[base]]
debian = "bookworm"
packages = ["python3", "g++"]

[build_args]
TORCH = "2.13.0+cpu"

[variants."25.06"]
base = "nvcr.io/nvidia/pytorch:25.06-py3"
python = "3.12"
torch = "2.8.0a0+5228986c39"
build_args = { TORCH = "2.8" }
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with one whole recipe and one bare Containerfile."""
    (tmp_path / "containers/pins/deep/er").mkdir(parents=True)
    (tmp_path / "containers/whole.toml").write_text(WHOLE)
    (tmp_path / "containers/pins/whole.txt").write_text("a==1\n")
    (tmp_path / "containers/pins/deep/er/nested.txt").write_text("nested\n")
    (tmp_path / "containers/run me.sh").write_text("#!/bin/sh\n")
    (tmp_path / "Containerfile.whole").write_text("ARG BASE\nFROM ${BASE}\n")
    (tmp_path / "Containerfile.bare").write_text("FROM scratch\n")
    return Project(tmp_path, tmp_path / "nothing", tmp_path)


def hashed(recipe: Recipe) -> str:
    return content_hash(recipe, "sha256:base", recipe.build_args, "linux/amd64")


def test_every_key_arrives(project: Project) -> None:
    recipe = load_recipe("whole", project)
    assert recipe.bases == (
        Base("docker.io/library/python:3.11"),
        Base(None, "bookworm", ("python3", "g++")),
    )
    assert (recipe.python, recipe.torch, recipe.platforms) == ("3.11", "2.13.0+cpu", ("linux/amd64",))
    assert recipe.build_args == {"TORCH": "2.13.0+cpu"}
    assert recipe.pins == project.start / "containers/pins/whole.txt"
    assert recipe.repository == "localhost/runner/whole"


@pytest.mark.parametrize("word", ["whole", "whole.toml", "./containers/whole.toml", "{root}/containers/whole.toml"])
def test_a_recipe_is_found_by_name_and_by_path(project: Project, word: str) -> None:
    assert load_recipe(word.format(root=project.start), project).name == "whole"


def test_a_containerfile_alone_is_a_recipe(project: Project) -> None:
    recipe = load_recipe("bare", project)
    assert recipe.containerfile == project.start / "Containerfile.bare"
    assert recipe.bases == ()
    assert "containers/pins/deep/er/nested.txt" in context_files(recipe)
    assert recipe_names(project) == ("bare", "whole")
    assert load_recipe("./Containerfile.bare", project).name == "bare"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Dockerfile", "docker"),
        ("Containerfile", "docker"),
        ("Dockerfile.ngc-25.06", "ngc-25.06"),
        ("train.Dockerfile", "train"),
        ("eval.containerfile", "eval"),
    ],
)
def test_a_recipe_at_a_path_is_named_by_its_file_or_folder(project: Project, path: str, name: str) -> None:
    folder = project.start / "docker"
    folder.mkdir()
    (folder / path).write_text("FROM scratch\n")
    assert load_recipe(f"docker/{path}", project).name == name


@pytest.mark.parametrize(
    ("name", "image"),
    [("my_env", "my_env"), ("ngc-25.06", "ngc-25.06"), ("Mine", "mine"), ("a b._c", "a-b-c"), ("_a__b--c.", "a__b--c")],
)
def test_an_image_has_the_name_of_its_recipe_where_a_registry_takes_it(project: Project, name: str, image: str) -> None:
    """So that `build NAME --import` and `import NAME` write the same NAME.sqsh."""
    (project.start / f"Containerfile.{name}").write_text("FROM scratch\n")
    recipe = load_recipe(name, project)
    assert recipe.name == image
    assert registry_reference(f"{recipe.repository}:1").repository == f"runner/{image}"
    assert parse_source(f"podman://{recipe.repository}:1", project.start).name == image


def test_a_variant_replaces_base_and_versions(project: Project) -> None:
    recipe = load_recipe("whole", project, "25.06")
    assert recipe.bases == (Base("nvcr.io/nvidia/pytorch:25.06-py3"),)
    assert (recipe.python, recipe.torch, recipe.build_args["TORCH"]) == ("3.12", "2.8.0a0+5228986c39", "2.8")
    assert hashed(recipe) != hashed(load_recipe("whole", project))


def test_the_users_build_arguments_override_and_base_replaces_the_list_of_bases(project: Project) -> None:
    own = {"TORCH": "2.9", "BASE": "docker.io/library/python:3.12"}
    recipe = with_build_args(load_recipe("whole", project), own)
    assert recipe.bases == (Base("docker.io/library/python:3.12"),)
    assert recipe.build_args == {"TORCH": "2.9"}
    bare = with_build_args(load_recipe("bare", project), own)
    assert (bare.bases, bare.build_args) == ((), own)


def test_an_unknown_variant_lists_the_known_ones(project: Project) -> None:
    with pytest.raises(RunnerError) as caught:
        load_recipe("whole", project, "25.07")
    assert caught.value.why == "the known names are 25.06"
    assert "25.06" in caught.value.fix


@pytest.mark.parametrize(
    ("line", "new", "place", "words"),
    [
        ('summary = "a whole one"', 'sumary = "x"', "whole.toml:1", "did you mean 'summary'?"),
        ('containerfile = "Containerfile.whole"', "", "whole.toml", "containerfile"),
        ('containerfile = "Containerfile.whole"', 'containerfile = "Containerf"', "whole.toml:2", "does not exist"),
        ('containerfile = "Containerfile.whole"', "containerfile = 3", "whole.toml:2", "must be text"),
        ('context = ["containers/pins",', 'context = ["../secret",', "whole.toml:4", "is outside the project"),
        ('platforms = ["linux/amd64"]', 'platforms = "linux/amd64"', "whole.toml:5", "must be an array"),
        ('debian = "bookworm"', 'debian = "bookworm"\nimage = "x"', "whole.toml:12", "exactly one of `image` and"),
        ('debian = "bookworm"', 'debain = "bookworm"', "whole.toml:13", "did you mean 'debian'?"),
        ('TORCH = "2.13.0+cpu"', "TORCH = 2", "whole.toml:17", "must be text"),
        ('summary = "a whole one"', 'summary = "a', "whole.toml:1", "is not valid TOML"),
        ('summary = "a whole one"', 'flags = ["-fother"]', "whole.toml:1", "-f cannot be passed to the engine"),
        ('summary = "a whole one"', 'flags = ["--platform=x"]', "whole.toml:1", "build RECIPE --platform OS/ARCH"),
    ],
)  # fmt: skip
def test_bad_input_is_named_by_line_and_key(project: Project, line: str, new: str, place: str, words: str) -> None:
    assert line in WHOLE
    (project.start / "containers/whole.toml").write_text(WHOLE.replace(line, new, 1))
    with pytest.raises(RunnerError) as caught:
        load_recipe("whole", project)
    assert place in caught.value.what
    assert words in str(caught.value)
    assert caught.value.fix


def test_an_unknown_recipe_lists_the_known_ones_and_the_nearest(project: Project) -> None:
    with pytest.raises(RunnerError) as caught:
        load_recipe("wole", project)
    assert caught.value.why == "the known names are bare, whole"
    assert caught.value.fix == "did you mean 'whole'?"


def test_a_platform_that_the_recipe_does_not_name_is_refused(project: Project) -> None:
    recipe = load_recipe("whole", project)
    assert check_platform(recipe, "linux/amd64") == check_platform(recipe, "x86_64") == "linux/amd64"
    with pytest.raises(RunnerError, match="does not support linux/arm64"):
        check_platform(recipe, "linux/aarch64")


def test_the_context_is_what_the_recipe_lists_with_nested_folders(project: Project) -> None:
    (project.start / "secret").write_text("no")
    recipe = load_recipe("whole", project)
    assert context_files(recipe) == (
        "containers/pins/deep/er/nested.txt",
        "containers/pins/whole.txt",
        "containers/run me.sh",
    )


def test_the_context_of_a_bare_containerfile_has_the_files_of_submodules(project: Project) -> None:
    def git(folder: Path, *words: str) -> None:
        own = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(("git", *own, "-c", "protocol.file.allow=always", *words), cwd=folder, check=True)

    root, library = project.start, project.start / "library"
    library.mkdir()
    git(library, "init", "-q")
    (library / "code.py").write_text("1\n")
    git(library, "add", ".")
    git(library, "commit", "-q", "-m", "one")
    git(root, "init", "-q")
    (root / ".gitignore").write_text("library\nruns\n")
    (root / "runs").write_text("ignored\n")
    for name in ("checked-out", "empty"):
        git(root, "submodule", "--quiet", "add", "./library", f"more/{name}")
    git(root, "submodule", "--quiet", "deinit", "--force", "more/empty")
    files = context_files(load_recipe("bare", project))
    assert "Containerfile.bare" in files and "more/checked-out/code.py" in files
    assert not [name for name in files if name.startswith(("runs", "library", "more/empty")) or ".git/" in name]
    assert files_hash(load_recipe("bare", project))


def test_the_hash_follows_every_input_and_nothing_else(project: Project) -> None:
    root = project.start
    recipe = load_recipe("whole", project)
    seen = {hashed(recipe)}

    def changed() -> str:
        now = hashed(load_recipe("whole", project))
        assert now not in seen
        seen.add(now)
        return now

    (root / "Containerfile.whole").write_text("ARG BASE\nFROM ${BASE} \n")
    changed()
    (root / "containers/pins/deep/er/nested.txt").write_text("other\n")
    changed()
    (root / "containers/pins/whole.txt").write_text("a==2\n")
    changed()
    (root / "containers/run me.sh").chmod(0o755)
    changed()
    (root / "containers/pins/link").symlink_to("whole.txt")
    last = changed()
    recipe = load_recipe("whole", project)
    assert content_hash(recipe, "sha256:other", recipe.build_args, "linux/amd64") not in seen
    assert content_hash(recipe, "sha256:base", {"TORCH": "1"}, "linux/amd64") not in seen
    assert content_hash(recipe, "sha256:base", recipe.build_args, "linux/arm64") not in seen
    (root / "unlisted").write_text("x")
    (root / "containers/whole.toml").write_text("# a comment\n" + WHOLE)
    assert hashed(load_recipe("whole", project)) == last


def test_the_hash_does_not_know_where_the_project_lies(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip  # noqa: E501
    import shutil

    other = tmp_path_factory.mktemp("other") / "place"
    shutil.copytree(project.start, other)
    moved = load_recipe("whole", Project(other, other, other))
    assert hashed(moved) == hashed(load_recipe("whole", project))
    assert files_hash(replace(moved, pins=None)) == files_hash(moved)  # the pins lie in the context as well


def test_the_shipped_recipes_can_be_read() -> None:
    project = Project(None, shipped_folder(), Path("/"))
    assert "cpu" in recipe_names(project)
    for name in recipe_names(project):
        recipe = load_recipe(name, project)
        assert recipe.bases, name
        for tag in recipe.variants:
            assert load_recipe(name, project, tag).bases[0].image, (name, tag)
