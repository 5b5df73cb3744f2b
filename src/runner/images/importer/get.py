"""The squashfs file of an image for pyxis: from a store, or imported into one."""

from __future__ import annotations

import glob
import hashlib
import os
import pwd
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner import expansion
from runner.errors import RunnerError
from runner.images.importer.store import Store
from runner.images.reference import Reference, parse_source, registry_reference
from runner.images.sources.registry.web_errors import Unreachable
from runner.located_toml import read_toml, refuse_unknown_keys, string_table, strings, typed
from runner.machine import files, folders, probe
from runner.machine.report import Report

SYSTEM = Path("/etc/runner/importer.toml")

_TURN_SECONDS = 2.0  # how long a process waits for another one's question to the registry

_READERS: dict[type, Any] = {tuple: strings, dict: string_table}


@dataclass(frozen=True)
class Settings:
    """The keys of /etc/runner/importer.toml and of the user's file, as docs/importer.md explains them."""

    shared: tuple[str, ...] = ()
    shared_owner: int = -1
    folders: tuple[str, ...] = ("${SCRATCH}/runner-images", "${HOME}/.cache/runner/images")
    limit_gb: int = 0
    compression: str = "lz4"
    registries: tuple[Any, ...] = ()
    """one tuple per file that has the key; each of them must allow an image"""
    mirrors: dict[str, str] = field(default_factory=dict)
    last_digest: bool = False
    allow_http: bool = False


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings of this machine and this user. Raises RunnerError for an invalid file."""
    settings, keys = Settings(), set(Settings.__dataclass_fields__)
    own = (
        Path(environ.get("XDG_CONFIG_HOME") or folders.home(environ) / ".config")
        / "runner/importer.toml"
    )
    for path, known in ((SYSTEM, keys), (own, keys - {"shared", "shared_owner"})):
        if path.exists():
            document = read_toml(path)
            refuse_unknown_keys(document, (), known, "file")
            kinds = {key: type(getattr(settings, key)) for key in document.data}
            found: dict[str, Any] = {
                key: _READERS.get(kind, partial(typed, kind=kind))(document, (key,))
                for key, kind in kinds.items()
            }
            if "registries" in found:
                found["registries"] = (*settings.registries, found["registries"])
            settings = replace(settings, **found)
            if settings.limit_gb < 0:
                raise RunnerError(
                    f"{document.place('limit_gb')}: limit_gb is {settings.limit_gb}",
                    "a limit cannot be negative",
                    "write a positive number, or 0 for no limit",
                )
    return settings


@dataclass(frozen=True)
class Getter:
    """What `get`, `release` and `sync` need to know."""

    settings: Settings
    environ: Mapping[str, str]
    report: Report
    began: float
    """when this process began, in seconds since the epoch"""

    def get(self, image: str) -> Path:
        """The squashfs file of an image, leased to the job step of this process."""
        trouble: list[str] = []
        shared = self._stores(
            [Path(each) for each in self.settings.shared], self.settings.shared_owner, trouble
        )
        own = self._stores(self._own_folders(trouble), os.geteuid(), trouble)
        wanted = self._resolve(image, [store.folder / "digests" for store in own])
        path = self._take(wanted, [*shared, *own]) or self._import(wanted, own, trouble)
        read_ahead(path)
        return path

    def _take(self, wanted: Wanted, stores: Iterable[Store]) -> Path | None:
        """The image's file in the first of the stores that has it."""
        found = (store.take(wanted.name_in(store), self._step()) for store in stores)
        return next((path for path in found if path), None)

    def _import(self, wanted: Wanted, stores: list[Store], trouble: list[str]) -> Path:
        """The image's file in the first of the stores that can take it."""
        for store in stores:
            others = [other for other in stores if other != store]
            try:
                path = self._fetch(wanted, store, others, self._step())
                for removed in store.collect(
                    self.settings.limit_gb * 10**9 or 1 << 63, {wanted.name_in(store)}
                ):
                    self.report.say(
                        f"removed {removed}, the least recently used image, to stay below limit_gb"
                    )
                return path
            except RunnerError as error:
                if not store.is_fault(error):
                    raise
                trouble.append(f"{store.folder}: {error.why}")
                self.report.warn(trouble[-1])
        why = "\n".join(trouble) or "none of the configured folders can be used"
        fix = "fix the problems above, or set `folders` in ~/.config/runner/importer.toml to other folders"
        raise RunnerError(f"no folder can take {wanted.name}", why, fix)

    def release(self) -> None:
        """Remove the leases of the job step of this process, and the digest that its nodes shared."""
        step, start = glob.escape(self._step()), glob.escape(self._start())
        for folder in (*map(Path, self.settings.shared), *self._own_folders([])) if step else ():
            notes = folder.glob(f"digests/*+{start}*") if start else ()
            for left in (*folder.glob(f"leases/{step}+*"), *notes):
                with suppress(OSError):
                    left.unlink()

    def sync(self, listing: Path) -> Iterator[Path]:
        """Import the listed images (one per line) into the shared folder, and remove the others that no job uses."""
        first, owner = self.settings.shared[:1], self.settings.shared_owner
        refused: list[str] = []
        mine = owner == os.geteuid()
        stores = self._stores([Path(each) for each in first], owner, refused) if mine else []
        if not stores:
            why = f"in {SYSTEM}, shared = {list(first)} and shared_owner = {owner}; your user id is {os.geteuid()}"
            raise RunnerError(
                "cannot fill a shared folder",
                "\n".join((why, *refused)),
                "fix the problem with the folder named in the last line above"
                if refused
                else f'run it as user {owner}; or set shared = ["DIR"] and shared_owner = {os.geteuid()} in {SYSTEM}',
            )
        with files.explained(f"read {listing}"):
            lines = [line.strip() for line in listing.read_text().splitlines()]
            (stores[0].folder / "leases").chmod(0o1777)
        kept, failed = set[str](), list[str]()
        for line in lines:
            if not line or line.startswith("#"):
                continue
            try:
                wanted = self._resolve(line, [])
                yield self._fetch(wanted, stores[0], [], "")
                kept.add(wanted.name_in(stores[0]))
            except RunnerError as error:
                failed.append(line)
                self.report.warn(f"{line}: {error.what}: {error.why}")
        if failed:
            why = "\n".join(("these lines failed, so no image was removed:", *failed))
            raise RunnerError(
                f"could not import {len(failed)} of the images in {listing}",
                why,
                "see the warnings above",
            )
        for removed in stores[0].collect(0, kept):
            self.report.say(f"removed {removed}, which is not listed")

    def _step(self) -> str:
        """CLUSTER+JOB+STEP+NODE of this process, with which the names of its leases begin; empty outside Slurm."""
        words = [
            self.environ.get(name, "")
            for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
        ]
        # pyxis' last `release` has no SLURMD_NODENAME
        return "+".join([*words, os.uname().nodename]).replace("/", "-") if words[1] else ""

    def _start(self) -> str:
        """The start of a job step on several nodes, for the name of what its nodes share; empty for other processes."""
        nodes = self.environ.get("SLURM_STEP_NUM_NODES") or self.environ.get("SLURM_NNODES") or "1"
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        words = [self.environ.get(name, "") for name in names]
        return "+".join(words).replace("/", "-") if nodes != "1" and words[1] and words[2] else ""

    def _own_folders(self, trouble: list[str]) -> list[Path]:
        """The user's own folders, without those that name a variable which is not set; `trouble` gets why."""
        variables = {"UID": str(os.geteuid()), **self.environ}
        with suppress(KeyError):  # a step may get no variables: srun --export=NONE
            user = pwd.getpwuid(os.geteuid())
            known = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
            for name, value in known.items():
                variables[name] = variables.get(name) or value
        found = []
        for text in self.settings.folders:
            if unset := [name for name in expansion.names(text) if not variables.get(name)]:
                trouble.append(f"{text}: {', '.join(unset)} is not set")
            else:
                found.append(Path("/", expansion.expand(text, variables, "folders")))
        return found

    def _stores(self, paths: list[Path], owner: int, trouble: list[str]) -> list[Store]:
        """The stores that other users cannot change; `trouble` gets the reasons against the others. Folders of this
        user are created."""
        found = []
        for path in paths:
            try:
                if owner == os.geteuid():
                    path.mkdir(
                        0o755 if owner == self.settings.shared_owner else 0o700,
                        parents=True,
                        exist_ok=True,
                    )
                danger = Store(path, owner).danger(path)
                if owner == os.geteuid() and not danger:
                    (path / "leases").mkdir(exist_ok=True)
            except OSError as error:
                danger = error.strerror or str(error)
            found += [] if danger else [Store(path, owner)]
            if danger:
                trouble.append(f"{path}: {danger}")
                self.report.warn(f"not using {path}: {danger}")
        return found

    def _fetch(self, wanted: Wanted, store: Store, others: list[Store], step: str) -> Path:
        """The image's file in this store; imported unless another process does so. Or the file in another store, if an
        import had to go there meanwhile."""

        def make() -> None:
            for number, reference in enumerate(wanted.sources, 1):
                try:
                    self._import_from(reference, wanted, store, check_room=bool(others))
                    return
                except RunnerError as error:
                    if store.is_fault(error) or number == len(wanted.sources):
                        raise
                    self.report.warn(
                        f"{error.what}: {error.why}; asking {wanted.sources[number].registry}"
                    )

        with files.explained(f"write to {store.folder}"):
            name = wanted.name_in(store)
            return store.fetch(name, step, make, self.report, lambda: self._take(wanted, others))

    def _import_from(
        self, reference: Reference, wanted: Wanted, store: Store, check_room: bool
    ) -> None:
        from runner.images.importer.importer import import_image
        from runner.images.importer.plan import ImportOptions, ImportRequest
        from runner.project import find_project

        source = f"docker://{reference.with_hash}"
        options = ImportOptions(
            output=store.folder / wanted.name_in(store),
            compression=self.settings.compression,
            allow_http=int(self.settings.allow_http),
            force=True,
            verify="digest",  # the digest of the image covers all its layers
            trace=wanted.trace_in(store),
            importer=True,
            check_room=check_room,
        )
        import_image(
            ImportRequest(source, store.folder, find_project(Path("/")), self.environ, options),
            self.report,
        )

    def _resolve(self, image: str, digests: list[Path]) -> Wanted:
        """The image that a tag names now, by digest."""
        source = parse_source(image if "://" in image else f"docker://{image}", Path("/"))
        if source.scheme != "docker":
            raise RunnerError(
                f"cannot get {image}",
                "the importer reads only from registries",
                "write docker://IMAGE",
            )
        reference = replace(registry_reference(source.reference), user=source.user)
        place = f"{reference.registry}/{reference.repository}/"
        for allowed in self.settings.registries:
            if not any(place.startswith(f"{entry.rstrip('/')}/") for entry in allowed):
                raise RunnerError(
                    f"the importer does not accept {reference}",
                    f"it takes images only from {', '.join(allowed) or 'no registry'}",
                    "use an image from there, or add it to `registries` in each file that has this key: "
                    f"{SYSTEM}, ~/.config/runner/importer.toml",
                )
        mirror = self.settings.mirrors.get(reference.registry)
        mirrored = mirror and registry_reference(
            f"{mirror}/{reference.repository}:{reference.tag or 'latest'}"
        )
        sources: tuple[Reference, ...] = (reference,)
        if reference.digest:
            sources = (
                (replace(mirrored, digest=reference.digest), reference) if mirrored else sources
            )
        else:
            sources = self._with_digest(reference, mirrored or None, digests)
        inputs = f"{sources[0].digest} {probe.architecture()} {self.settings.compression}"
        return Wanted(source.name[:120], sources, inputs)

    def _with_digest(
        self, reference: Reference, mirrored: Reference | None, digests: list[Path]
    ) -> tuple[Reference, ...]:
        """Where to read the tag's image: the mirror and the registry, with the digest that one of them has for the tag,
        or the last one noted in `digests`."""
        note = _note(reference)
        if mirrored:
            try:
                digest = self._ask(mirrored, digests)
                return replace(mirrored, digest=digest), replace(reference, digest=digest)
            except RunnerError as error:
                self.report.warn(f"{error.what}: {error.why}; asking {reference.registry}")
        texts = (files.text_of(folder / note) for folder in digests)
        noted = next((text for text in texts if text), "")
        spare = noted if self.settings.last_digest else ""
        try:
            digest = self._ask(reference, digests, briefly=bool(spare))
            if digests and noted != digest:
                with suppress(RunnerError):
                    files.write(digests[0] / note, digest)
        except Unreachable as error:
            if not spare:
                raise
            digest = spare
            self.report.warn(
                f"{error.what}: {error.why}; using the last known digest of {reference}: {digest}"
            )
        return (replace(reference, digest=digest),)

    def _ask(self, reference: Reference, digests: list[Path], briefly: bool = False) -> str:
        """The tag's digest, from a request that began after this process, by this or another process on this node; or
        by another node of this job step."""
        place = Path(self.environ.get("TMPDIR") or "/tmp", f"runner-importer-{os.geteuid()}")
        notes = [here.folder / _note(reference) for here in self._stores([place], os.geteuid(), [])]
        with ExitStack() as stack:
            for note in notes:
                with suppress(RunnerError, OSError):  # the other process gets no answer: ask too
                    stack.enter_context(files.locked(note, timeout_seconds=_TURN_SECONDS))
                if (files.modified(note) or 0.0) >= self.began:
                    digest = files.text_of(note)
                    if digest:
                        return digest
            started = [
                folder / f"{_note(reference)}+{self._start()}"
                for folder in digests[:1]
                if self._start()
            ]
            if digest := next(map(_from_another_node, started), ""):
                return digest
            from runner.images.sources.registry.repository import ask_digest

            asked = time.time()
            digest = ask_digest(
                reference, self.environ, int(self.settings.allow_http), briefly=briefly
            )
            for note in (*notes, *started):
                with suppress(RunnerError, OSError):
                    files.write(note, digest)
                    os.utime(note, (asked, asked))
        return digest


@dataclass(frozen=True)
class Wanted:
    """An image, and the names of its file."""

    name: str
    """as the user wrote it, in one word: nvidia+pytorch+24.06-py3"""
    sources: tuple[Reference, ...]
    """where to read it, all with its digest"""
    inputs: str
    """what determines the content of the file, besides a trace"""

    def name_in(self, store: Store) -> str:
        """The file's name in a store. It is the same for all tags and repositories that have this digest."""
        trace = self.trace_in(store)
        inputs = self.inputs
        if trace:
            inputs += f" {hashlib.sha256(trace.read_bytes()).hexdigest()}"
        return f"{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.sqsh"

    def trace_in(self, store: Store) -> Path | None:
        """The store's trace of what a start of this image reads: traces/NAME.trace; None if there is none."""
        path = store.folder / f"traces/{self.name}.trace"
        try:
            return path if path.is_file() and not store.danger(path) else None
        except OSError:
            return None


def _from_another_node(note: Path) -> str:
    """The digest that another node of the job step has got, or gets now; empty if this node has to ask."""
    with suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        try:
            (note.parent / f"{note.name}+asked").open("x").close()
            return ""
        except FileExistsError:
            deadline = time.monotonic() + _TURN_SECONDS
            digest = files.text_of(note)
            while not digest and time.monotonic() < deadline:
                time.sleep(0.2)
                digest = files.text_of(note)
            return digest
    return ""


_AHEAD = re.compile(rb"^hot ([1-9]\d*) ([1-9]\d*)$", re.MULTILINE)


def read_ahead(path: Path) -> None:
    """Let the kernel read what a start of the image reads, if the file ends with such a list (`hot.LIST_SIZE`)."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(-4096, os.SEEK_END)
        for offset, length in _AHEAD.findall(file.read().rstrip(b"\0")):
            os.posix_fadvise(file.fileno(), int(offset), int(length), os.POSIX_FADV_WILLNEED)


def _note(reference: Reference) -> str:
    """The name of the file with the digest of a tag."""
    return hashlib.sha256(str(reference).encode()).hexdigest()[:16]
