"""The squashfs file of an image for pyxis: from a store, or imported into one."""

import errno
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
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
# errors that another folder may not have
_OF_THE_FOLDER = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE}

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
    own = Path(environ.get("XDG_CONFIG_HOME") or folders.home(environ) / ".config") / "runner/importer.toml"
    for path, known in ((SYSTEM, keys), (own, keys - {"shared", "shared_owner"})):
        if path.exists():
            refuse_unknown_keys(document := read_toml(path), (), known, "file")
            kinds = {key: type(getattr(settings, key)) for key in document.data}
            found: dict[str, Any] = {
                key: _READERS.get(kind, partial(typed, kind=kind))(document, (key,)) for key, kind in kinds.items()
            }
            if "registries" in found:
                found["registries"] = (*settings.registries, found["registries"])
            settings = replace(settings, **found)
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
        shared = self._stores([Path(each) for each in self.settings.shared], self.settings.shared_owner)
        own, trouble = self._stores(self._own_folders(), os.geteuid()), []
        reference, name = self._resolve(image, [store.folder / "digests" for store in own])
        for store in (*shared, *own):
            if path := store.take(name, self._step()):
                return path
        for store in own:
            try:
                path = self._fetch(reference, name, store, self._step())
                for removed in store.collect(self.settings.limit_gb * 10**9 or 1 << 63, {name}):
                    self.report.say(f"removed {removed}, which was not used for the longest time")
                return path
            except RunnerError as error:
                if getattr(error.__cause__, "errno", None) not in _OF_THE_FOLDER:
                    raise
                trouble.append(f"{store.folder}: {error.why}")
                self.report.warn(trouble[-1])
        why = "\n".join(trouble) or "none of the configured folders can be used"
        raise RunnerError(f"no folder can take {name}", why, "free some space, or set `folders` in importer.toml")

    def release(self) -> None:
        """Remove the leases of the job step of this process."""
        for folder in (*map(Path, self.settings.shared), *self._own_folders()) if self._step() else ():
            for lease in folder.glob(f"leases/{self._step()}+*"):
                with suppress(OSError):
                    lease.unlink()

    def sync(self, listing: Path) -> Iterator[Path]:
        """Import the listed images (one per line) into the shared folder, and remove the others that no job uses."""
        first, owner = self.settings.shared[:1], self.settings.shared_owner
        stores = self._stores([Path(each) for each in first], owner) if owner == os.geteuid() else []
        if not stores:
            why = f"in {SYSTEM}, shared = {list(first)} and shared_owner = {owner}; your user id is {os.geteuid()}"
            raise RunnerError("cannot fill a shared folder", why, "set both keys, and run this as that user")
        with files.explained(f"read {listing}"):
            lines = [line.strip() for line in listing.read_text().splitlines()]
            (stores[0].folder / "leases").chmod(0o1777)
        images = [self._resolve(line, []) for line in lines if line and not line.startswith("#")]
        for reference, name in images:
            yield self._fetch(reference, name, stores[0], "")
        for removed in stores[0].collect(0, {name for _, name in images}):
            self.report.say(f"removed {removed}, which is not listed")

    def _step(self) -> str:
        """CLUSTER+JOB+STEP+NODE of this process, with which the names of its leases begin; empty outside Slurm."""
        words = [self.environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")]
        # pyxis' last `release` has no SLURMD_NODENAME
        return "+".join([*words, os.uname().nodename]).replace("/", "-") if words[1] else ""

    def _own_folders(self) -> list[Path]:
        """The user's own folders, without those that name a variable which is not set."""
        variables = {"HOME": str(folders.home(self.environ)), "UID": str(os.geteuid()), **self.environ}
        texts = [each for each in self.settings.folders if all(map(variables.get, expansion.names(each)))]
        return [Path("/", expansion.expand(text, variables, "folders")) for text in texts]

    def _stores(self, paths: list[Path], owner: int) -> list[Store]:
        """The stores that other users cannot change. Folders of this user are created."""
        found = []
        for path in paths:
            try:
                if owner == os.geteuid():
                    path.mkdir(0o755 if owner == self.settings.shared_owner else 0o700, parents=True, exist_ok=True)
                    (path / "leases").mkdir(exist_ok=True)
                danger = Store(path, owner).danger(path)
            except OSError as error:
                danger = error.strerror or str(error)
            found += [] if danger else [Store(path, owner)]
            if danger:
                self.report.warn(f"not using {path}: {danger}")
        return found

    def _fetch(self, reference: Reference, name: str, store: Store, step: str) -> Path:
        """The image's file in this store; imported unless another process does so."""

        def make() -> None:
            from runner.images.importer.importer import import_image
            from runner.images.importer.plan import ImportOptions, ImportRequest
            from runner.project import find_project

            source = f"docker://{reference.user}@{reference}" if reference.user else f"docker://{reference}"
            chosen, http = self.settings.compression, int(self.settings.allow_http)
            options = ImportOptions(output=store.folder / name, compression=chosen, allow_http=http, force=True)
            project = find_project(Path("/"))
            import_image(ImportRequest(source, store.folder, project, self.environ, options), self.report)

        with files.explained(f"write to {store.folder}"):
            return store.fetch(name, step, make, self.report)

    def _resolve(self, image: str, digests: list[Path]) -> tuple[Reference, str]:
        """Where to read the image that a tag names now, by digest, and the name of its file."""
        source = parse_source(image if "://" in image else f"docker://{image}", Path("/"))
        if source.scheme != "docker":
            raise RunnerError(f"cannot get {image}", "the importer reads only from registries", "write docker://IMAGE")
        reference = replace(registry_reference(source.reference), user=source.user)
        place = f"{reference.registry}/{reference.repository}/"
        for allowed in self.settings.registries:
            if not any(place.startswith(f"{entry.rstrip('/')}/") for entry in allowed):
                why = f"images may come from {', '.join(allowed) or 'no registry'}"
                raise RunnerError(f"{reference} is not allowed here", why, f"see the key `registries` in {SYSTEM}")
        if not reference.digest:
            reference = self._with_digest(reference, digests)
        inputs = f"{reference.digest} {probe.architecture()} {self.settings.compression}"
        return reference, f"{source.name[:120]}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}.sqsh"

    def _with_digest(self, reference: Reference, digests: list[Path]) -> Reference:
        """The reference with its tag's digest, from a mirror or the registry, or the last one noted in `digests`."""
        note = _note(reference)
        if mirror := self.settings.mirrors.get(reference.registry):
            try:
                mirrored = registry_reference(f"{mirror}/{reference.repository}:{reference.tag}")
                return replace(mirrored, digest=self._ask(mirrored))
            except RunnerError as error:
                self.report.warn(f"{error.what}: {error.why}; asking {reference.registry}")
        try:
            digest = self._ask(reference)
            if digests and files.text_of(digests[0] / note) != digest:
                with suppress(RunnerError):
                    files.write(digests[0] / note, digest)
        except Unreachable as error:
            digest = next((text for folder in digests if (text := files.text_of(folder / note))), "")
            if not self.settings.last_digest or not digest:
                raise
            self.report.warn(f"{error.what}: {error.why}; using the last known digest of {reference}: {digest}")
        return replace(reference, digest=digest)

    def _ask(self, reference: Reference) -> str:
        """The tag's digest, from a request that began after this process, by this or another process on this node."""
        place = Path(self.environ.get("TMPDIR") or "/tmp", f"runner-importer-{os.geteuid()}")
        notes = [here.folder / _note(reference) for here in self._stores([place], os.geteuid())]
        with ExitStack() as stack:
            for note in notes:
                with suppress(RunnerError, OSError):  # the other process gets no answer: ask too
                    stack.enter_context(files.locked(note, timeout_seconds=_TURN_SECONDS))
                if (files.modified(note) or 0.0) >= self.began and (digest := files.text_of(note)):
                    return digest
            from runner.images.sources.registry.repository import ask_digest

            asked = time.time()
            digest = ask_digest(reference, self.environ, int(self.settings.allow_http))
            for note in notes:
                with suppress(RunnerError, OSError):
                    files.write(note, digest)
                    os.utime(note, (asked, asked))
        return digest


def _note(reference: Reference) -> str:
    """The name of the file with the digest of a tag."""
    return hashlib.sha256(str(reference).encode()).hexdigest()[:16]
