"""What a Containerfile copies from the build context, checked before the base is pulled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from runner.errors import RunnerError
from runner.images.recipe import Recipe, context_files, instructions

# sources that only the engine can find: variables, patterns, quoted names, here-documents and URLs; `..` ends at the
# context's folder
_UNKNOWN = re.compile(r"[$*?\[\"'\\]|<<|://|^git@|(^|/)\.\.(/|$)|^[./]*$")


def check_copies(recipe: Recipe) -> None:
    """Raise RunnerError for a file that the image needs and the build context does not have."""
    wanted = list(_copied(recipe.containerfile.read_text()))
    if not wanted:
        return
    files = set(context_files(recipe))
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for line, source in wanted:
        path = PurePosixPath(source.lstrip("/"))
        # what is below a file of the context is behind a link
        if not {str(path), *map(str, path.parents)} - {"."} & files and str(path) not in folders:
            raise _missing(recipe, line, path)


def _missing(recipe: Recipe, line: int, path: PurePosixPath) -> RunnerError:
    what = f"{recipe.containerfile}:{line}: {str(path)!r} is not in the build context"
    above = None
    if recipe.context is None:  # not the root folder, which may have a /data of its own
        above = next((each for each in recipe.root.parents[:-1] if (each / path).exists()), None)
    if (recipe.root / path).is_dir() and not any((recipe.root / path).rglob("*")):
        why = f"the folder {recipe.root / path} is empty"
        return RunnerError(
            what, why, "put a file into it, or create it in the image: RUN mkdir -p …"
        )
    if (recipe.root / path).exists():
        why, root = f"git ignores it: {recipe.root / path}", recipe.root
    elif above:
        why, root = (
            f"the build context is the Containerfile's folder, and the file is in {above}",
            above,
        )
    else:
        return RunnerError(
            what, f"there is no file {recipe.root / path}", "create it, or correct that line"
        )
    if recipe.context is not None:
        why = f"`context` in {recipe.path} does not list it"
        return RunnerError(what, why, "add it to `context`")
    name = recipe.containerfile.relative_to(root)
    return RunnerError(
        what,
        why,
        f'write {root}/containers/{recipe.name}.toml with containerfile = "{name}" and context = ["{path}", …], '
        f"and run `runner build {recipe.name}` in {root}",
    )


def _copied(text: str) -> Iterator[tuple[int, str]]:
    """(line, source) of each COPY, ADD and bind mount from the context, in the stages that the image needs."""
    needed = _needed_stages(text)
    stage = -1
    for start, _, words in instructions(text):
        keyword, *rest = _words(words)
        if keyword.upper() == "FROM":
            stage += 1
        elif stage in needed:
            read = {"COPY": _of_copy, "ADD": _of_copy, "RUN": _of_mounts}.get(keyword.upper())
            for source in read(rest) if read else ():
                if not _UNKNOWN.search(source):
                    yield start + 1, source


def _of_copy(words: list[str]) -> list[str]:
    flags = [word for word in words if word.startswith("--")]
    paths = words[len(flags) :]
    if any(flag.startswith("--from=") for flag in flags):
        return []
    if paths[:1] and paths[0].startswith("["):
        try:
            paths = [str(path) for path in json.loads(" ".join(paths))]
        except ValueError:
            return []
    return paths[:-1]


def _of_mounts(words: list[str]) -> list[str]:
    sources = []
    for word in words:
        if not word.startswith("--"):
            break
        pairs = (entry.partition("=") for entry in word.removeprefix("--mount=").split(","))
        fields = {key: value for key, _, value in pairs}
        if (
            word.startswith("--mount=")
            and fields.get("type", "bind") == "bind"
            and "from" not in fields
        ):
            sources.append(fields.get("source") or fields.get("src") or "/")
    return sources


def _words(words: str) -> list[str]:
    """The words of an instruction, without its comments and backslashes at the ends of lines."""
    lines = [line for line in words.split("\n") if not line.lstrip().startswith("#")]
    return " ".join(re.sub(r"\\\s*$", "", line) for line in lines).split()


def _needed_stages(text: str) -> set[int]:
    """The numbers of the last stage and of the stages that it uses; engines skip the others."""
    names: dict[str, int] = {}
    uses: list[set[str]] = []
    for _, _, words in instructions(text):
        keyword, *rest = _words(words)
        if keyword.upper() == "FROM":
            image, *after = [word for word in rest if not word.startswith("--")] or [""]
            uses.append({image.lower()})
            names[str(len(uses) - 1)] = len(uses) - 1
            if len(after) > 1:
                names[after[1].lower()] = len(uses) - 1
        elif uses:
            uses[-1] |= {found.lower() for found in re.findall(r"\bfrom=([^,\s]+)", " ".join(rest))}
    needed, todo = set[int](), [len(uses) - 1]
    while todo:
        stage = todo.pop()
        if stage >= 0 and stage not in needed:
            needed.add(stage)
            todo += [names[use] for use in uses[stage] if names.get(use, stage) < stage]
    return needed
