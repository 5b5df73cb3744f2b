"""The program of a launch: the script or command that the user named, and the folder of code to snapshot."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runner.errors import RunnerError, unknown
from runner.project import Project, is_shared_place
from runner.runs.git import work_tree
from runner.runs.job import Job

SUFFIXES = (".py", ".sh")
_SCRIPT_BYTES = 1 << 20


class Program(NamedTuple):
    """A script in the snapshot, or a bare command."""

    script: str | None
    """the path relative to RUN/code; None: run `command`"""
    command: tuple[str, ...]
    main: Path | None
    """the folder to snapshot; None: the user has no code"""
    outside: Path | None = None
    """a script outside of `main`, which is copied to the top of the snapshot"""
    shipped: Path | None = None
    """runner's own folder, if the script or the package `training` comes from there"""
    notes: tuple[str, ...] = ()


def find_script(word: str, project: Project) -> Path:
    """The file of SCRIPT, which is a name in jobs/ (of the project or of runner) or a path.

    Raises RunnerError for an unknown name (lists the known scripts) or an unsuitable path.
    """
    name = word.removeprefix("jobs/")
    if "/" in word or word.endswith(SUFFIXES):
        path = (project.start / Path(word).expanduser()).absolute()
        if path.is_file() or "/" in name:
            if not path.is_file():
                beside = [each for each in path.parent.glob("*") if each.suffix in SUFFIXES]
                why, fix = f"{path} does not exist", "check the path"
                if beside:
                    raise unknown("script", word, [each.name for each in beside], fix)
                raise RunnerError(f"there is no script {word!r}", why, fix)
            if path.suffix not in SUFFIXES:
                raise _no_script(word)
            return path
    for root in project.roots:
        for suffix in ("",) if name.endswith(SUFFIXES) else SUFFIXES:
            path = root / "jobs" / (name + suffix)
            if path.is_file():
                return path
    if (project.start / word).is_file():
        raise _no_script(word)
    raise unknown(
        "script",
        word,
        script_names(project),
        "give a name in jobs/, or the path of a .py or .sh file",
    )


def _no_script(word: str) -> RunnerError:
    return RunnerError(
        f"cannot launch {word!r} as a script",
        "the name of a script must end in .py or .sh",
        f"runner launch {word} if it is a batch script, or else runner launch -- COMMAND {word}",
    )


def script_names(project: Project) -> tuple[str, ...]:
    """The names of the scripts in jobs/ of the project and of runner."""
    found = {
        path.stem
        for root in project.roots
        for path in (root / "jobs").glob("*")
        if path.suffix in SUFFIXES
    }
    return tuple(sorted(found - {"__init__", "conftest"}))


def program_of_script(path: Path, project: Project) -> Program:
    """The program for a script file: the folder to snapshot, and the script's path in it."""
    if ".." in path.parts or not any(path.is_relative_to(root) for root in project.roots):
        path = path.parent.resolve() / path.name  # the path of the project has no links
    for root in (project.root, project.shipped):
        if root is not None and path.is_relative_to(root):
            script = path.relative_to(root).as_posix()
            if root == project.shipped and root != project.root:
                return Program(script, (), project.root, shipped=root)
            shipped = project.shipped if root != project.shipped and _needs_training(path) else None
            return Program(script, (), root, shipped=shipped)
    if project.root is not None:
        return Program(path.name, (), project.root, outside=path)
    tree = work_tree(path.parent)
    if tree is not None and not is_shared_place(tree):
        return Program(path.relative_to(tree).as_posix(), (), tree)
    if is_shared_place(path.parent):
        note = f"copying only {path.name}: {path.parent} is your home folder, a temporary folder or the root folder"
        return Program(path.name, (), None, outside=path, notes=(note,))
    return Program(path.name, (), path.parent)


def _needs_training(script: Path) -> bool:
    """Whether a script imports the package `training`, and its folder does not contain it, so that runner's is used."""
    if script.suffix != ".py" or (script.parent / "training").exists():
        return False
    return (
        re.search(rb"^\s*(?:from|import)\s+training\b", script.read_bytes(), re.MULTILINE)
        is not None
    )


def program_of_command(command: Sequence[str], project: Project) -> Program:
    """The program for a bare command: the project or git work tree around the user, or the folder where a word of
    the command names a file."""
    main = project.root or work_tree(project.start)
    notes: tuple[str, ...] = ()
    if main is None or is_shared_place(main):
        # a word may be any text, of any length, and Path raises for names that are too long
        relative = [word for word in command if not word.startswith("/")]
        named = [word for word in relative if os.path.isfile(os.path.join(project.start, word))]  # noqa: PTH113, PTH118
        main = project.start if named and not is_shared_place(project.start) else None
        if main is None and named:
            notes = (
                f"not copying {named[0]}: {project.start} is your home folder, a temporary folder or the root folder",
            )
    if main is not None and main != project.start:
        inside = project.start.relative_to(main).as_posix()
        notes = (
            f"the command starts in the top folder of the snapshot of {main}, not in {inside}/; "
            "`workdir` in the EDF changes this",
        )
    return Program(None, tuple(command), main, notes=notes)


_SAVE_OPTIONS = {
    "megatron-bridge": "checkpoint.save_interval=N",
    "megatron": "--save-interval N",
    "torchtitan": "--checkpoint.interval N",
    "nanochat": "--save-every N",
    "lightning": "ModelCheckpoint(every_n_train_steps=N)",
    "verl": "trainer.save_freq=N",
}


_FOLLOWS = re.compile(
    r"\bRUNNER_SAVE_EVERY\b|^\s*from training(\.job import| import [^#\n]*\bjob\b)", re.MULTILINE
)


def check_saves(job: Job, program: Program) -> None:
    """Raise RunnerError if the program cannot read `save_every`: a known trainer, or a script that does not name it.

    A program that runner cannot read here, such as a module or a script in the image, may read the variable.
    """
    words = (job.script,) if job.script is not None else job.command
    texts = program_texts(program, words)
    if any(_FOLLOWS.search(text) for text in texts.values()):
        return
    named = f"{job.trainer} {' '.join(words)}".lower()
    options = [
        option
        for trainer, option in _SAVE_OPTIONS.items()
        if re.search(rf"(?<![a-z0-9]){trainer}(?![a-z])", named)
    ]
    if options:
        fix = f"leave out save_every, and set the trainer's own option: {options[0]}"
    elif any(path.endswith(SUFFIXES) for path in texts):
        fix = (
            "leave out save_every and set your program's own option (with Hugging Face's Trainer or TRL: "
            "--save_steps N), or let the script read RUNNER_SAVE_EVERY"
        )
    else:
        return
    raise RunnerError(
        f"{job.origins['save_every'].place}: save_every does not work with {' '.join(words)[:60]}",
        "runner can only tell its own training scripts, and scripts that read RUNNER_SAVE_EVERY, when to save",
        fix,
    )


def program_texts(program: Program, words: Sequence[str]) -> dict[str, str]:
    """Path -> text of the scripts and YAML files that the words name in the snapshot, if they can be read."""
    roots = [root for root in (program.main, program.shipped) if root]
    paths = {os.path.join(root, word) for root in roots for word in words}  # noqa: PTH118
    if program.outside is not None:
        paths.add(str(program.outside))
    texts = {}
    for path in sorted(paths):
        if path.endswith((*SUFFIXES, ".yaml", ".yml")) and os.path.isfile(path):  # noqa: PTH113
            with suppress(OSError), Path(path).open("rb") as file:
                texts[path] = file.read(_SCRIPT_BYTES).decode(errors="replace")
    return texts
