"""What `env adopt` reads from a command line or script: EDF fields, the command, and notes about everything else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.environments.edf import Mount, parse_mount
from runner.environments.rewriting import APPEND, Change, Set
from runner.errors import RunnerError
from runner.expansion import expand, literal, names
from runner.machine.secrets import LEAST_LENGTH, looks_secret
from runner.runs.secrets import HIDDEN, hide_words

SECRET = "it is a secret: export it where you launch; the container gets the host's variables"


@dataclass
class Adopted:
    """The result, which the readers of command lines and scripts fill in. All texts are EDF text."""

    base: str = ""
    """the environment named by `--environment`"""
    image: str = ""
    workdir: str = ""
    entrypoint: bool | None = None
    writable: bool | None = None
    mounts: list[Mount] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """what was not carried over, or is not needed, in the order of the input"""
    no_edf: list[str] = field(default_factory=list)
    """why no EDF can describe the container, each with its line"""
    no_job: list[str] = field(default_factory=list)
    """why no job file can do the same, each with its line"""
    bare_mounts: set[str] = field(default_factory=set)
    """names of variables that are a mount on their own, without `:`"""
    gpus: int | None = None
    """how many GPUs `docker run` requests; None: all, or not said"""
    folder: Path | None = None
    """the folder to which relative paths refer; the job will run in a different one"""
    where: str = ""
    """the prefix of notes: the line of the script"""

    def note(self, what: str, why: str, notes: list[str] | None = None) -> None:
        """Add a note about something that was carried over in a way that the user may not expect."""
        line, notes = (
            f"{self.where}{short(what)}: {why}".replace("\n", " "),
            self.notes if notes is None else notes,
        )
        if line not in notes:
            notes.append(line)

    def not_carried_over(self, what: str, why: str) -> None:
        """Add a note about something that an EDF or job file cannot express."""
        self.note(what, f"not carried over: {why}")

    def not_needed(self, what: str, why: str) -> None:
        """Add a note about something that every engine does by default."""
        self.note(what, f"not needed: {why}")

    def refuse(self, what: str, why: str, *, edf: bool = False) -> None:
        """Refuse the job file, or with `edf` both files, because the result would do something else."""
        self.note(what, why, self.no_edf if edf else self.no_job)

    def computed(self, what: str) -> None:
        """Refuse an image or mount that only a shell can evaluate."""
        self.refuse(what, "only a shell can evaluate this text: write its value", edf=True)

    def mount(self, text: str, given: str) -> None:
        """Add the mount `SOURCE[:TARGET[:FLAGS]]`, or a note if an EDF cannot express it."""
        try:
            mount = parse_mount(text)
        except RunnerError as error:
            self.refuse(given, error.why, edf=True)
            return
        mount = replace(mount, source=self.absolute(mount.source))
        if mount not in self.mounts:
            self.mounts.append(mount)

    def absolute(self, text: str) -> str:
        """A path on the host, made absolute."""
        if text.split("/")[0] not in {".", ".."}:
            return text
        if self.folder is None:
            self.refuse(text, "the folder to which this path is relative is not known", edf=True)
            return text
        return os.path.normpath(os.path.join(literal(str(self.folder)), text))  # noqa: PTH118 (the text may hold variables)

    def variable(self, name: str, value: str, given: str) -> None:
        """Add a variable to [env], or a note if an EDF cannot express it."""
        if looks_secret(name, plain(value) or ""):
            self.not_carried_over(f"{name}=…", SECRET)
        elif not value:
            self.not_carried_over(
                given,
                "in an EDF, an empty value unsets the variable, so an EDF cannot set an empty value",
            )
        else:
            self.env[name] = value

    def variables(self) -> set[str]:
        """The names of the variables in the EDF."""
        texts = [
            self.image,
            self.workdir,
            self.base,
            *self.env.values(),
            *self.annotations.values(),
        ]
        return {
            name
            for text in (*texts, *(mount.text() for mount in self.mounts))
            for name in names(text)
        }

    def set_defaults(self) -> None:
        """Set `entrypoint` and `writable` in a new EDF, because their defaults differ between engines."""
        if self.base:
            return
        self.entrypoint = bool(self.entrypoint)
        if self.writable is None and self.image:
            why = "added to make the root file system writable, which pyxis does only with --container-writable"
            self.note("writable = true", why)
        self.writable = True if self.writable is None else self.writable

    def changes(self, present: Mapping[str, object] | None = None) -> list[Change]:
        """The changes to an EDF whose content is `present`. Mounts and devices that it already has are kept."""
        wanted: list[Change] = []
        fields = {
            "base_environment": self.base,
            "image": self.image,
            "workdir": self.workdir,
            "entrypoint": self.entrypoint,
            "writable": self.writable,
        }
        wanted += [
            Set((key,), value) for key, value in fields.items() if value is not None and value != ""
        ]
        for key, entries in (
            ("mounts", [mount.text() for mount in self.mounts]),
            ("devices", self.devices),
        ):
            if isinstance(there := (present or {}).get(key), list):
                known = {parse_mount(text).text() if key == "mounts" else text for text in there}
                wanted += [Set((key, APPEND), text) for text in entries if text not in known]
            elif entries:
                wanted.append(Set((key,), entries))
        wanted += [Set(("env", name), value) for name, value in self.env.items()]
        wanted += [
            Set(("annotations", *name.split(".")), value)
            for name, value in self.annotations.items()
        ]
        return wanted


def short(text: str) -> str:
    """The text on one line, without secrets, shortened if it is long."""
    line = " ".join(hide_words(text.split())).replace(HIDDEN, "…")
    return line if len(line) <= 120 else f"{line[:119]}…"


def secrets_in(words: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Index -> (option or name, what precedes the value) of the words that contain secrets; not of `$NAME`."""
    found = {}
    for index, (word, hidden) in enumerate(zip(words, hide_words(words), strict=True)):
        before, secret, _ = hidden.partition(HIDDEN)
        value, name = (
            word.removeprefix(before),
            before.rstrip("=") or (words[index - 1] if index else ""),
        )
        # `--input_key messages`: the name of a column
        column = re.search(r"(?i)tokens$", name) or (
            name.lower().endswith("key") and not re.search(r"(?i)api|\d", f"{name}{value}")
        )
        if secret and len(value) >= LEAST_LENGTH and not re.search(r"[$<]", value) and not column:
            found[index] = (name, before)
    return found


def plain(text: str) -> str | None:
    """The plain text of an EDF text; None if it contains a variable."""
    return None if names(text) else expand(text, {}, "a word")
