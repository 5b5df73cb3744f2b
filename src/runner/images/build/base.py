"""The base of a build: an image from a registry, or a Debian root file system if no registry answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import RunnerError
from runner.images.build.host_settings import release
from runner.images.build.steps import Step, run_logged
from runner.images.engine import Engine
from runner.images.recipe import Base, Recipe
from runner.images.reference import split_tag
from runner.images.sources.engine_storage import Image, Store
from runner.machine import folders, process
from runner.machine.report import Report

_PROBE_SECONDS = (
    8.0  # a registry that needs longer for a manifest is too slow for gigabytes of layers
)
_DEBIAN_FORMAT = 3  # increase it when the way to make a Debian base changes


@dataclass(frozen=True)
class ResolvedBase:
    """A base in the engine's storage, or one that the engine fetches by this name."""

    reference: str
    """value of the build argument BASE"""
    digest: str
    """part of the content hash: the manifest's digest, or the hash of suite and packages"""
    why: str
    named: str = ""
    """the name in the recipe"""
    release: tuple[str, str] = ("", "")
    """(ID, VERSION_CODENAME); empty if unknown"""


BASE_LABEL = "runner.base"
_NAME, _DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"
NO_BASE = ResolvedBase("", "", "the Containerfile names its base")


def debian_reference(base: Base, platform: str) -> str:
    """The name of a Debian base in the storage. Its tag is the hash of suite, packages and platform."""
    inputs = json.dumps([_DEBIAN_FORMAT, base.debian, sorted(base.packages), platform])
    return f"localhost/runner/base-debian-{base.debian}:{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"


def known_bases(recipe: Recipe, build: BuildContext) -> list[ResolvedBase]:
    """The bases whose digest is known without asking a registry, in the recipe's order, up to the one in the storage.

    A build would take that one: an image on a later base, from when this one was not available, is out of date.
    """
    if not recipe.bases:
        return [NO_BASE]
    found = []
    for base in recipe.bases:
        if base.image is None:
            found.append(_debian(base, build.platform, "already built"))
            continue
        image = build.store.find(base.image)
        if image and image.architecture == build.architecture:
            found.append(_pinned(base.image, image, "already in the engine's storage"))
            break
        latest = build.store.find(f"{recipe.repository}:latest")
        if latest and latest.labels.get(BASE_LABEL) == base.image:
            # the base was removed from the storage (podman image prune), but the image built on it still exists
            labels = latest.labels
            why = "the base of the newest image"
            found.append(ResolvedBase(labels[_NAME], labels[_DIGEST], why))
    return found


def resolve_base(recipe: Recipe, build: BuildContext, *, refresh: bool) -> ResolvedBase:
    """The recipe's first base that is available here, fetched or made (again, with `refresh`).

    Raises RunnerError with the reason for each base if none is.
    """
    if not recipe.bases:
        return NO_BASE
    reasons: list[str] = []
    for base in recipe.bases:
        try:
            resolved = (
                _fetch(base.image, build, refresh)
                if base.image
                else _make_debian(base, build, refresh)
            )
        except RunnerError as error:
            last = error.why.strip().splitlines()[-1] if error.why.strip() else ""
            reasons.append(f"{base}: {error.what}{': ' if last else ''}{last}")
            continue
        if reasons:
            build.report.warn(
                f"using the base {base} instead of {recipe.bases[0]} ({'; '.join(reasons)})"
            )
        return resolved
    pull = f"{build.engine.name} pull --platform={build.platform}"
    login = f"(if needed, {build.engine.name} login first)"
    fixes = [f"{pull} {base.image}   {login}" for base in recipe.bases if base.image][:1]
    if all(base.image for base in recipe.bases):
        fixes.append("or add a [[base]] with debian = … to the recipe")
    raise RunnerError(
        f"none of the bases of recipe {recipe.name!r} is available on this machine",
        "\n".join(reasons),
        "\n".join(fixes) or "see the reasons above; a Debian base needs mmdebstrap, and a network",
    )


def base_release(base: ResolvedBase, engine: Engine) -> tuple[str, str]:
    """(ID, VERSION_CODENAME) of a base, read from the image; empty if it has no os-release."""
    if base.release[0] or not base.reference:
        return base.release
    flags = ("--rm", "--pull=never", "--network=none", "--entrypoint=cat")
    argv = (engine.name, "run", *flags, base.reference, "/etc/os-release")
    done = process.run(argv, env=engine.env, check=False)
    return release(done.stdout) if done.exit_code == 0 else ("", "")


def _debian(base: Base, platform: str, why: str) -> ResolvedBase:
    reference = debian_reference(base, platform)
    digest = f"debian:{split_tag(reference)[1]}"
    return ResolvedBase(reference, digest, why, str(base), ("debian", base.debian or ""))


def _pinned(reference: str, image: Image, why: str) -> ResolvedBase:
    """A registry image by its digest; a local image without a digest by its name, with its id as digest."""
    name = split_tag(reference)[0]
    digests = [entry for entry in image.repo_digests if entry.startswith(f"{name}@")]
    exact = [entry for entry in digests if image.digest and entry.endswith(image.digest)]
    chosen = next(iter(exact or sorted(digests)), None)
    if chosen is None or name.startswith("localhost/"):
        return ResolvedBase(reference, image.id, why, reference)
    return ResolvedBase(chosen, chosen.partition("@")[2], why, reference)


def _fetch(reference: str, build: BuildContext, refresh: bool) -> ResolvedBase:
    image = build.store.find(reference)
    if (
        image
        and image.architecture == build.architecture
        and (not refresh or reference.startswith("localhost/"))
    ):
        build.report.say(f"base: {reference} (in {build.engine.name}'s storage)")
        return _pinned(reference, image, "already in the engine's storage")
    _probe(reference)
    build.report.say(f"pulling the base image {reference}")
    argv = (build.engine.name, "pull", f"--platform={build.platform}", reference)
    build.run(Step(f"fetch {reference}", argv, build.engine.env), "the pull failed")
    image = build.store.find(reference)
    if image is None or image.architecture != build.architecture:
        has = image.architecture if image else "nothing"
        why = f"the registry has {has}, not {build.architecture}"
        raise RunnerError("the image has the wrong architecture", why, "use another tag")
    return _pinned(reference, image, "its registry answers")


def _probe(reference: str) -> None:
    """Raise RunnerError if the registry does not answer soon. Without skopeo, this check is left to the pull."""
    if process.which("skopeo") is None:
        return
    # podman reads this variable; skopeo 1.9 has only a flag
    configured = os.environ.get("CONTAINERS_REGISTRIES_CONF")
    registries = (f"--registries-conf={configured}",) if configured else ()
    argv = ("skopeo", *registries, "inspect", "--raw", "--retry-times=0", f"docker://{reference}")
    done = process.run(argv, check=False, timeout_seconds=_PROBE_SECONDS)
    if done.exit_code != 0:
        words = done.stderr.strip().splitlines() or ["it printed nothing"]
        message = (words[-1].partition("msg=")[2].strip('"') or words[-1]).replace('\\"', '"')
        raise RunnerError(
            "the registry cannot be read",
            re.sub(r"^Error parsing image name .*?: ", "", message),
            "",
        )


def _make_debian(base: Base, build: BuildContext, refresh: bool) -> ResolvedBase:
    made = _debian(base, build.platform, "made by mmdebstrap")
    if build.store.find(made.reference) and not refresh:
        build.report.say(f"base: {base} (already built by mmdebstrap)")
        return made
    build.report.say(
        f"building the base {base} with mmdebstrap: {len(base.packages)} packages and their dependencies"
    )
    with folders.temporary("runner-debian-", build.log.parent) as folder:
        first, *rest = debian_steps(
            base, build.engine, build.platform, made.reference, folder / "root.tar"
        )
        build.run(first, "mmdebstrap failed")
        for step in rest:
            process.run(step.argv, env=step.env)
    return made


def debian_steps(
    base: Base, engine: Engine, platform: str, reference: str, archive: Path
) -> tuple[Step, ...]:
    """The steps that make a Debian base by way of the file `archive`: imported under a temporary name, then tagged.

    The final name comes last, so that a broken import never leaves an incomplete base under it.
    """
    suite, architecture = base.debian or "", platform.split("/")[1]
    # mmdebstrap copies the host's mirror, proxy, name and name servers: remove them from the image. The public servers
    # of the release, from the example that its apt ships, replace the mirror.
    clean = (
        'cd "$1/etc" && rm -f apt/sources.list.d/* apt/apt.conf.d/99mmdebstrap hostname resolv.conf && '
        'grep "^deb " "$1/usr/share/doc/apt/examples/sources.list" > apt/sources.list'
    )
    # it runs with a subordinate id of the user, which cannot enter a temporary folder with mode 700
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    elsewhere = () if folders.open_to_others(temporary) else ("env", "TMPDIR=/tmp")
    packages = (f"--include={','.join(base.packages)}",) if base.packages else ()
    flags = (
        "--variant=minbase",
        f"--architectures={architecture}",
        *packages,
        f"--customize-hook={clean}",
    )
    make = (*elsewhere, "mmdebstrap", *flags, suite, str(archive))
    unfinished = f"{reference}-unfinished"
    drop = ("rmi", "--no-prune") if engine.name == "docker" else ("untag", unfinished)
    take = (engine.name, "import", "--change", 'CMD ["/bin/bash"]', str(archive), unfinished)
    return (
        Step(f"Debian {suite} root file system", make, engine.env),
        Step("import it", take, engine.env),
        Step("give it its name", (engine.name, "tag", unfinished, reference), engine.env),
        Step("drop the temporary name", (engine.name, *drop, unfinished), engine.env),
    )


def shown(base: ResolvedBase) -> Mapping[str, str]:
    """The OCI labels about the base."""
    if not base.reference:
        return {}
    return {_NAME: base.reference, _DIGEST: base.digest, BASE_LABEL: base.named}


@dataclass(frozen=True)
class BuildOptions:
    """The user's options for a build."""

    engine: str | None = None
    tag: str | None = None
    """an additional name for the image"""
    no_cache: bool = False
    platform: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildContext:
    """What all steps of a build need."""

    engine: Engine
    store: Store
    platform: str
    """`linux/amd64`, `linux/arm64`"""
    log: Path
    report: Report
    options: BuildOptions = field(default_factory=BuildOptions)

    @property
    def staging(self) -> Path:
        """The private folder for the files of the build."""
        return self.log.with_name(f"{self.log.stem}-context")

    @property
    def architecture(self) -> str:
        """The platform's architecture as OCI names it."""
        return self.platform.split("/")[1]

    def run(self, step: Step, failure: str) -> None:
        """Run a step whose output goes to the log, and is shown with -v. Raises RunnerError with its last lines."""
        last: deque[str] = deque(maxlen=5)

        def listen(line: str) -> None:
            last.append(line)
            self.report.detail(line)

        if run_logged(step, self.log, listen) != 0:
            raise RunnerError(
                failure, "\n".join(last) or "it printed nothing", f"read the log {self.log}"
            )
