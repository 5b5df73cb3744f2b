"""What `env adopt` reads of a container: EDF fields, and notes about everything else."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.environments.edf import Mount, parse_mount
from runner.environments.rewriting import APPEND, Change, Set
from runner.errors import RunnerError
from runner.expansion import expand, literal
from runner.located_toml import Document
from runner.machine.secrets import looks_secret
from runner.runs.secrets import HIDDEN, hide_words


@dataclass
class Adopted:
    """The result, which the readers of command lines and scripts fill in. All texts are EDF text."""

    folder: Path | None
    """the folder to which relative paths refer; None if it is not known"""
    where: str = ""
    """the prefix of notes: the line of the script"""
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
    gpus: int | None = None
    """how many GPUs the command line of an engine requests; None: all, or not said"""
    notes: list[str] = field(default_factory=list)
    """what was not carried over, or is not needed, in the order of the input"""
    no_edf: list[str] = field(default_factory=list)
    """why no EDF can describe the container"""
    no_job: list[str] = field(default_factory=list)
    """why no job file can do the same"""

    def note(self, what: str, why: str) -> None:
        """Add a note about something that was carried over in a way that the user may not expect."""
        self.notes.append(self._line(what, why))

    def not_carried_over(self, what: str, why: str) -> None:
        """Add a note about something that an EDF or job file cannot express."""
        self.note(what, f"not carried over: {why}")

    def not_needed(self, what: str, why: str) -> None:
        """Add a note about something that every engine does by default."""
        self.note(what, f"not needed: {why}")

    def refuse(self, what: str, why: str) -> None:
        """Refuse the EDF, because it would describe another container."""
        self.no_edf.append(self._line(what, why))

    def refuse_job(self, what: str, why: str) -> None:
        """Refuse the job file, because it would do something else."""
        self.no_job.append(self._line(what, why))

    def _line(self, what: str, why: str) -> str:
        return f"{self.where}{short(what)}: {why}".replace("\n", " ")

    def mount(self, text: str, given: str) -> None:
        """Add the mount `SOURCE[:TARGET[:FLAGS]]`, unless an EDF cannot express it."""
        try:
            mount = parse_mount(text)
        except RunnerError as error:
            self.refuse(given, error.why)
            return
        mount = replace(mount, source=self.absolute(mount.source))
        if mount not in self.mounts:
            self.mounts.append(mount)

    def absolute(self, text: str) -> str:
        """A path on the host, made absolute."""
        if text.split("/")[0] not in {".", ".."}:
            return text
        if self.folder is None:
            self.refuse(text, "a relative path depends on the folder in which the line runs")
            return text
        return os.path.normpath(os.path.join(literal(str(self.folder)), text))  # noqa: PTH118 (the text may hold variables)

    def variable(self, name: str, value: str, given: str) -> None:
        """Add a variable to [env], unless it is a secret, or empty."""
        if looks_secret(name, plain(value)):
            why = "it is a secret: export it where you launch; the container gets the host's variables"
            self.not_carried_over(f"{name}=…", why)
        elif not value:
            why = (
                "in an EDF, an empty value unsets the variable, so an EDF cannot set an empty value"
            )
            self.not_carried_over(given, why)
        else:
            self.env[name] = value

    def changes(self, present: Document | None = None) -> list[Change]:
        """The changes to an EDF. Mounts and devices that it already has are kept.

        A new EDF also gets `entrypoint` and `writable`, because their defaults differ between engines.
        """
        is_new = present is None and not self.base
        entrypoint = bool(self.entrypoint) if is_new else self.entrypoint
        writable = True if is_new and self.writable is None else self.writable
        fields = {
            "base_environment": self.base,
            "image": self.image,
            "workdir": self.workdir,
            "entrypoint": entrypoint,
            "writable": writable,
        }
        wanted: list[Change] = [
            Set((key,), value) for key, value in fields.items() if value is not None and value != ""
        ]
        mounts = [mount.text() for mount in self.mounts]
        for key, entries in (("mounts", mounts), ("devices", self.devices)):
            if present is not None and isinstance(there := present.get(key), list):
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


def plain(text: str) -> str:
    """The plain text of an EDF text without variables."""
    return expand(text, {}, "a word")
