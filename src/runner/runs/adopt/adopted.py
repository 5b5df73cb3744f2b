"""What was understood of someone's words: the fields of an EDF, the program with its resources, and what is left."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.bash import Word
from runner.environments.mount import Mount, parse_mount
from runner.environments.rewriting import APPEND, Change, Set
from runner.errors import RunnerError
from runner.expansion import expand, literal, names
from runner.images.reference import HUB_NAMES, parse_reference
from runner.machine.secrets import looks_secret

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass
class Adopted:
    """Filled by the readers of command lines and scripts, one after the other. Texts are EDF text."""

    base: str = ""
    """the environment that the words name themselves, by `--environment`"""
    image: str = ""
    workdir: str = ""
    entrypoint: bool | None = None
    writable: bool | None = None
    mounts: list[Mount] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    command: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """what could not be taken over, or holds without being said, in the order of the words"""
    folder: Path | None = None
    """the folder from which relative paths are meant; a job has another one when it runs"""
    where: str = ""
    """in front of notes: the line of a script"""

    def lost(self, what: str, why: str) -> None:
        """Say what an EDF, or a job file, cannot hold."""
        self._note(f"{short(what)}: not taken over: {why}")

    def holds(self, what: str, why: str) -> None:
        """Say what needs no words, since it is so anyway."""
        self._note(f"{short(what)}: not needed: {why}")

    def changed(self, what: str, why: str) -> None:
        """Say what was taken over in other words than a reader might expect."""
        self._note(f"{short(what)}: {why}")

    def computed(self, what: str) -> None:
        """Say that only a shell can tell what this is."""
        self.lost(what, "only a shell can work it out: write its value")

    def _note(self, text: str) -> None:
        line = f"{self.where}{text}".replace("\n", " ")
        if line not in self.notes:
            self.notes.append(line)

    def mount(self, text: str, given: str) -> None:
        """Add the mount `SOURCE[:TARGET[:FLAGS]]`; one that an EDF cannot hold is noted."""
        try:
            mount = parse_mount(text)
        except RunnerError as error:
            self.lost(given, error.why)
            return
        mount = replace(mount, source=self.absolute(mount.source))
        if mount not in self.mounts:
            self.mounts.append(mount)

    def absolute(self, text: str) -> str:
        """A path of the host; one that begins with a dot is meant from the folder."""
        if self.folder is None or not text.startswith(("./", "../")):
            return text
        return os.path.normpath(os.path.join(literal(str(self.folder)), text))  # noqa: PTH118 (the text may hold variables)

    def variable(self, name: str, value: str, given: str) -> None:
        """Add a variable of [env]; what an EDF cannot hold is noted."""
        if not _VARIABLE.fullmatch(name):
            self.lost(given, f"{name!r} cannot be the name of a variable")
        elif looks_secret(name, plain(value) or ""):
            self.lost(f"{name}=…", "it is a secret: export it where you launch, the host's variables enter")
        elif not value:
            self.lost(given, "an empty value unsets a variable in an EDF; nothing sets one to the empty text")
        else:
            self.env[name] = value

    def set_defaults(self) -> None:
        """Decide `entrypoint` and `writable` of a new EDF: the engines disagree on their defaults."""
        if self.base:
            return
        self.entrypoint = bool(self.entrypoint)
        if self.writable is None and self.image:
            why = "added; without --container-writable, pyxis makes the root file system read-only"
            self.changed("writable = true", why)
        self.writable = True if self.writable is None else self.writable

    def changes(self, present: Mapping[str, object] | None = None) -> list[Change]:
        """What to write into an EDF that says `present`; what it says already is left alone."""
        there = dict(present or {})
        wanted: list[Change] = []
        for key, value in (("base_environment", self.base), ("image", self.image), ("workdir", self.workdir)):
            if value:
                wanted.append(Set((key,), value))
        for key, flag in (("entrypoint", self.entrypoint), ("writable", self.writable)):
            if flag is not None:
                wanted.append(Set((key,), flag))
        for key, entries in (("mounts", [mount.text() for mount in self.mounts]), ("devices", self.devices)):
            known = there.get(key)
            if not isinstance(known, list):
                wanted += [Set((key,), entries)] if entries else []
                continue
            said = {parse_mount(text) for text in known} if key == "mounts" else set(known)
            fresh = [text for text in entries if (parse_mount(text) if key == "mounts" else text) not in said]
            wanted += [Set((key, APPEND), text) for text in fresh]
        wanted += [Set(("env", name), value) for name, value in self.env.items()]
        wanted += [Set(("annotations", *name.split(".")), value) for name, value in self.annotations.items()]
        return wanted


def short(text: str) -> str:
    """The text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 120 else f"{line[:119]}…"


def plain(text: str) -> str | None:
    """EDF text without variables as the text that it means; None where a variable is alive in it."""
    return None if names(text) else expand(text, {}, "a word")


def image_reference(text: str) -> tuple[str, str]:
    """(`[USER@][REGISTRY#]IMAGE[:TAG]` for an EDF, a reason why there is none), one of them empty.

    Source: enroot 4, src/docker.sh.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "docker":
        return "", f"{scheme} is a storage of this machine: runner import {rest}, and name the file that it prints"
    name = rest if separator else text
    image = parse_reference(name)
    if name.startswith(("localhost/", "sha256:")):
        return (
            "",
            f"the image lies in the engine's storage only: runner import {name}, and name the file that it prints",
        )
    if "#" in name or name.startswith("${"):
        return name, ""
    if not image.separator:
        return name, ""
    path = image.with_slash.removeprefix(f"{image.registry}/")
    return (path if image.registry in HUB_NAMES else f"{image.registry}#{path}"), ""
