"""What a recipe starts from here: the registry's image where one answers, else a Debian root file system."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from runner.errors import RunnerError
from runner.images.build.host_settings import release
from runner.images.engine import Engine
from runner.images.image import Image, split_reference
from runner.images.build.run import run_logged
from runner.images.recipe import Base, Recipe
from runner.machine import folders, process
from runner.machine.plan import Step
from collections.abc import Callable
from runner.images.sources.engine_storage import Store
from runner.machine.report import Report


_PROBE_SECONDS = 8.0  # a registry that needs longer to show a manifest is no use for gigabytes of layers
_DEBIAN_FORMAT = 3  # raised when a Debian base is made in another way


@dataclass(frozen=True)
class ResolvedBase:
    """A base that lies in the engine's storage, or that the engine will fetch by this very name."""

    reference: str
    """what the build argument BASE becomes"""
    digest: str
    """what the content hash takes: the manifest's digest, or the hash of suite and packages"""
    why: str
    named: str = ""
    """as the recipe names it"""
    release: tuple[str, str] = ("", "")
    """(ID, VERSION_CODENAME), where it is known"""


BASE_LABEL = "runner.base"
_NAME, _DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"
NO_BASE = ResolvedBase("", "", "the Containerfile names its base itself")


def debian_reference(base: Base, platform: str) -> str:
    """The name of a Debian base in the storage: its tag is the hash of suite, packages and platform."""
    inputs = json.dumps([_DEBIAN_FORMAT, base.debian, sorted(base.packages), platform])
    return f"localhost/runner/base-debian-{base.debian}:{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"


def known_bases(recipe: Recipe, at: Workplace) -> list[ResolvedBase]:
    """The bases whose digest is known without asking anybody, in the recipe's order."""
    if not recipe.bases:
        return [NO_BASE]
    found = []
    for base in recipe.bases:
        if base.image is None:
            found.append(_debian(base, at.platform, "made before"))
        elif (image := at.store.find(base.image)) and image.architecture == at.architecture:
            found.append(_pinned(base.image, image, "in the storage already"))
        elif (latest := at.store.find(f"{recipe.repository}:latest")) and latest.labels.get(BASE_LABEL) == base.image:
            # the base itself was removed from the storage (podman image prune), what was built on it was not
            found.append(ResolvedBase(latest.labels[_NAME], latest.labels[_DIGEST], "that of the image built last"))
    return found


def resolve_base(recipe: Recipe, at: Workplace, *, refresh: bool) -> ResolvedBase:
    """The first base of the recipe that can be had here; it is fetched or made (again, with `refresh`).

    Raises RunnerError that says of each base why not.
    """
    if not recipe.bases:
        return NO_BASE
    reasons: list[str] = []
    for base in recipe.bases:
        try:
            if base.image is not None:
                return _fetch(base.image, at, refresh)
            return _make_debian(base, at, refresh, f" ({reasons[-1]})" if reasons else "")
        except RunnerError as error:
            last = error.why.strip().splitlines()[-1] if error.why.strip() else ""
            reasons.append(f"{base}: {error.what}{': ' if last else ''}{last}")
    raise RunnerError(
        f"no base of recipe {recipe.name!r} can be had here",
        "\n".join(reasons),
        f"{at.engine.name} pull {recipe.bases[0]}   (says more; where it needs an account, {at.engine.name} login "
        "first); a [[base]] with debian = … is made here by mmdebstrap",
    )


def base_release(base: ResolvedBase, engine: Engine) -> tuple[str, str]:
    """(ID, VERSION_CODENAME) of a base, asked of the image itself; empty where it has no os-release."""
    if base.release[0] or not base.reference:
        return base.release
    flags = ("--rm", "--pull=never", "--network=none", "--entrypoint=cat")
    argv = (engine.name, "run", *flags, base.reference, "/etc/os-release")
    done = process.run(argv, env=engine.env, check=False)
    return release(done.stdout) if done.exit_code == 0 else ("", "")


def _debian(base: Base, platform: str, why: str) -> ResolvedBase:
    reference = debian_reference(base, platform)
    digest = f"debian:{split_reference(reference)[1]}"
    return ResolvedBase(reference, digest, why, str(base), ("debian", base.debian or ""))


def _pinned(reference: str, image: Image, why: str) -> ResolvedBase:
    """A registry image by its digest; one without a digest (made here) by its name, its id counts."""
    name = split_reference(reference)[0]
    digests = [entry for entry in image.repo_digests if entry.startswith(f"{name}@")]
    exact = next((entry for entry in digests if entry.endswith(image.digest)), None) if image.digest else None
    chosen = exact or (sorted(digests)[0] if digests else None)
    if chosen is None or name.startswith("localhost/"):
        return ResolvedBase(reference, image.id, why, reference)
    return ResolvedBase(chosen, chosen.partition("@")[2], why, reference)


def _fetch(reference: str, at: Workplace, refresh: bool) -> ResolvedBase:
    image = at.store.find(reference)
    if image and image.architecture == at.architecture and (not refresh or reference.startswith("localhost/")):
        at.report.say(f"base: {reference} (in {at.engine.name}'s storage)")
        return _pinned(reference, image, "in the storage already")
    _probe(reference)
    at.report.say(f"base: {reference} (its registry answers); fetching it")
    argv = (at.engine.name, "pull", f"--platform={at.platform}", reference)
    said: list[str] = []
    if run_logged(Step(f"fetch {reference}", argv, at.engine.env), at.log, at.listener(said)) != 0:
        raise RunnerError("the pull failed", "\n".join(said[-3:]) or f"see {at.log}", f"the whole log: {at.log}")
    image = at.store.find(reference)
    if image is None or image.architecture != at.architecture:
        has = image.architecture if image else "nothing"
        raise RunnerError("wrong architecture", f"the registry gave {has}, not {at.architecture}", "choose another tag")
    return _pinned(reference, image, "its registry answers")


def _probe(reference: str) -> None:
    """Raise RunnerError where the registry does not show the image soon; without skopeo the pull itself will tell."""
    if process.which("skopeo") is None:
        return
    # podman reads this variable, skopeo 1.9 only its flag
    configured = os.environ.get("CONTAINERS_REGISTRIES_CONF")
    registries = (f"--registries-conf={configured}",) if configured else ()
    argv = ("skopeo", *registries, "inspect", "--raw", "--retry-times=0", f"docker://{reference}")
    done = process.run(argv, check=False, timeout_seconds=_PROBE_SECONDS)
    if done.exit_code != 0:
        words = done.stderr.strip().splitlines() or ["it printed nothing"]
        said = (words[-1].partition("msg=")[2].strip('"') or words[-1]).replace('\\"', '"')
        raise RunnerError("its registry does not give it", re.sub(r"^Error parsing image name .*?: ", "", said), "")


def _make_debian(base: Base, at: Workplace, refresh: bool, because: str) -> ResolvedBase:
    made = _debian(base, at.platform, f"made by mmdebstrap{because}")
    if at.store.find(made.reference) and not refresh:
        at.report.say(f"base: {base} (root file system made before){because}")
        return made
    at.report.say(f"base: {base}, {len(base.packages)} packages and what they need, made by mmdebstrap{because}")
    said: list[str] = []
    first, *rest = debian_steps(base, at.engine, at.platform, made.reference)
    if run_logged(first, at.log, at.listener(said)) != 0:
        raise RunnerError("mmdebstrap failed", "\n".join(said[-5:]), f"the whole log: {at.log}")
    for step in rest:
        process.run(step.argv, env=step.env)
    return made


def debian_steps(base: Base, engine: Engine, platform: str, reference: str) -> tuple[Step, ...]:
    """How a Debian base is made: unpacked and imported under a passing name, then named.

    The final name is given last, so that a broken pipe never leaves half a base under it.
    """
    suite, architecture = base.debian or "", platform.split("/")[1]
    # mmdebstrap takes over the host's mirror, proxy, name and name servers: none of them stays in the image. Instead of
    # the mirror, the release's public servers, as its own apt names them in an example.
    clean = (
        'cd "$1/etc" && rm -f apt/sources.list.d/* apt/apt.conf.d/99mmdebstrap hostname resolv.conf && '
        'grep "^deb " "$1/usr/share/doc/apt/examples/sources.list" > apt/sources.list'
    )
    # it works as one of the user's subordinate ids, who cannot enter a temporary folder that is the user's alone
    elsewhere = () if folders.open_to_others(Path(os.environ.get("TMPDIR") or "/tmp")) else ("env", "TMPDIR=/tmp")
    make = (
        *elsewhere,
        "mmdebstrap",
        "--variant=minbase",
        f"--architectures={architecture}",
        *((f"--include={','.join(base.packages)}",) if base.packages else ()),
        f"--customize-hook={clean}",
        suite,
        "-",
    )
    passing = f"{reference}-unfinished"
    take = (engine.name, "import", "--change", 'CMD ["/bin/bash"]', "-", passing)
    return (
        Step(f"Debian {suite} root file system", make, engine.env, pipe_to=take),
        Step("its name", (engine.name, "tag", passing, reference), engine.env),
        Step("drop the passing name", (engine.name, "rmi", "--no-prune", passing), engine.env)
        if engine.name == "docker"
        else Step("drop the passing name", (engine.name, "untag", passing, passing), engine.env),
    )


def shown(base: ResolvedBase) -> Mapping[str, str]:
    """The OCI labels about the base."""
    if not base.reference:
        return {}
    return {_NAME: base.reference, _DIGEST: base.digest, BASE_LABEL: base.named}


@dataclass(frozen=True)
class Workplace:
    """What every part of a build needs."""

    engine: Engine
    store: Store
    platform: str
    """`linux/amd64`, `linux/arm64`"""
    log: Path
    report: Report

    @property
    def architecture(self) -> str:
        """The platform's architecture in OCI's words."""
        return self.platform.split("/")[1]

    def listener(self, kept: list[str]) -> Callable[[str], None]:
        """A function that keeps each line, and shows it with -v."""

        def listen(line: str) -> None:
            kept.append(line)
            self.report.detail(line)

        return listen
