"""A finding of the linter, and what its rules check: an environment, the site, the engine, this machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.environments.engines import engine_of, with_site
from runner.environments.engines.engine import Engine
from runner.environments.environment import Environment
from runner.environments.lint.codes import CODES
from runner.environments.rewriting import Change, rewrite
from runner.errors import RunnerError
from runner.expansion import expand
from runner.images.squashfs_file import find_squashfs
from runner.located_toml import Place
from runner.site import Site


@dataclass(frozen=True)
class Finding:
    """One problem. An `error` makes the job fail or changes what it does; a `warning` affects results, speed or safety;
    a `note` is information."""

    code: str
    """a key of CODES"""
    severity: str
    """`error`, `warning` or `note`"""
    field: str
    """the field of the environment, as in `env show`: `image`, `mounts.0`, `env.NAME`; a script's: `#SBATCH`, `srun`"""
    place: Place | None
    """None: the value does not come from a file of the user"""
    reason: str
    fix: str
    changes: tuple[Change, ...] = dataclasses.field(default=(), compare=False)
    """the changes that fix it in the file of `place`"""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.severity}: {self.reason} [{self.code}]\n  try: {self.fix}"


def finding(
    code: str,
    field: str,
    place: Place | None,
    reason: str,
    fix: str = "",
    severity: str = "",
    changes: tuple[Change, ...] = (),
) -> Finding:
    """A finding, with the severity and fix of its code unless given."""
    known = CODES[code]
    severity = severity or known.severities[0]
    assert severity in known.severities, f"{code} is never a {severity}"
    return Finding(
        code=code,
        severity=severity,
        field=field,
        place=place,
        reason=reason,
        fix=fix or known.fix,
        changes=changes,
    )


def as_data(finding: Finding) -> dict[str, Any]:
    """The finding for JSON."""
    place = finding.place
    return {
        "code": finding.code,
        "severity": finding.severity,
        "field": finding.field,
        "reason": finding.reason,
        "fix": finding.fix,
        "path": str(place.path) if place else None,
        "line": place.line if place else None,
    }


def by_file(findings: Sequence[Finding]) -> dict[Path, list[Finding]]:
    """The findings that can be fixed automatically, by file."""
    found: dict[Path, list[Finding]] = {}
    for one in findings:
        if one.changes and one.place is not None:
            found.setdefault(one.place.path, []).append(one)
    return found


def fixed(text: str, path: Path, findings: Sequence[Finding]) -> tuple[str, tuple[Finding, ...]]:
    """The text with one change per key path, and the findings that this fixes. Comments and order are kept.

    Other findings about the same key need another pass. Changes that cannot be made automatically are left out.
    """
    touched: set[tuple[str, ...]] = set()
    done: list[Finding] = []
    for one in findings:
        keys = {change.keys for change in one.changes}
        if keys & touched:
            continue
        try:
            text = rewrite(text, one.changes, path)
        except RunnerError:
            continue
        touched |= keys
        done.append(one)
    return text, tuple(done)


# variables that the batch script or `launch` sets on every site
OURS = {"RUNNER_RUN": "", "RUNNER_CACHE": "", "RUNNER_ATTEMPT": ""}


@dataclass(frozen=True)
class Setting:
    """The site, engine and machine, which are the same for all environments of one call."""

    site: Site
    engine: str
    """the engine's name"""
    environ: Mapping[str, str]
    here: bool = True
    """whether this machine belongs to the site; if not, its files and variables are not checked"""
    enroot: tuple[int, ...] | None = None
    """enroot's version; None: not known"""

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """The variables of this machine and of every run."""
        known = {**OURS, **self.environ}
        try:
            known["RUNNER_IMAGES"] = str(self.site.images(self.environ))
        except RunnerError:
            known.pop("RUNNER_IMAGES", None)  # reported by the rule for undefined variables
        return known

    @cached_property
    def engine_facts(self) -> Engine:
        """What is known about the engine."""
        return engine_of(self.engine)

    @property
    def pulls_with_enroot(self) -> bool:
        """Whether the engine downloads images with enroot."""
        return self.engine_facts.pulls_with == "enroot"


@dataclass(frozen=True)
class Subject:
    """An environment in a setting."""

    own: Environment
    """the environment without the site's values"""
    setting: Setting

    @cached_property
    def environment(self) -> Environment:
        """The environment with the site's variables and mounts."""
        return with_site(self.own, self.setting.site)

    @cached_property
    def image_path(self) -> Path | None:
        """The squashfs file on this machine; None for other images, and if a variable is missing."""
        setting = self.setting
        if not self.own.is_squashfs or not setting.here or setting.engine_facts.has_store:
            return None
        text = self.expanded(self.own.image, "image")
        return Path(text) if text is not None else None

    @cached_property
    def image(self) -> ImageFacts:
        """The known facts about the image."""
        return facts_of(self.own.image, self.image_path)

    def expanded(self, text: str, what: str) -> str | None:
        """The text with its variables expanded; None if one is undefined, or defined only in a running job."""
        if re.search(r"\$\{(SLURM|RUNNER_(RUN|CACHE|ATTEMPT))", text):
            return None
        try:
            return expand(text, self.setting.variables, what)
        except RunnerError:
            return None

    def annotation(self, name: str) -> str:
        """The value of `com.hooks.NAME`, or the site's; empty if neither sets it."""
        return self.environment.annotations.get(f"com.hooks.{name}", "")

    @property
    def netstack(self) -> str:
        """Where the network hooks take their libraries from: `host`, `artifact`, or empty if that is not known."""
        return self.annotation("netstack.source") or self.setting.site.netstack_source or ""

    def place(self, field: str) -> Place | None:
        """The line of a field. A field that is in no file gets the line of `image`; one from the site has none."""
        origins = self.environment.origins
        for name in (field, f"{field}.0"):
            if name in origins and origins[name].place:
                return origins[name].place
        if field.startswith("mounts.") or field in (
            f"env.{name}" for name in self.setting.site.env
        ):
            return None
        image = origins.get("image")
        if image and image.place:
            return image.place
        return Place(self.own.path) if self.own.path else None

    def say(
        self,
        code: str,
        field: str,
        reason: str,
        fix: str = "",
        severity: str = "",
        changes: tuple[Change, ...] = (),
    ) -> Finding:
        """A finding at a field."""
        place = self.place(field)
        return finding(code, field, place, reason, fix, severity=severity, changes=changes)


Rule = Callable[[Subject], Iterator[Finding]]


_RELEASE = re.compile(r"pytorch[^/\s]*?[:+_-](\d\d)\.(\d\d)(?!\d)")
_NCCL_FRAMEWORK = re.compile(
    r"nccl|torch|nemo|jax|tensorflow|megatron|deepspeed|vllm|sglang|tensorrt.?llm|axolotl|transformers|\bngc-"
)
_ARCHITECTURES = {
    "aarch64": "arm64",
    "arm64": "arm64",
    "amd64": "amd64",
    "x86_64": "amd64",
    "x86-64": "amd64",
}


@dataclass(frozen=True)
class ImageFacts:
    """Facts about an image. None and False mean unknown."""

    architecture: str | None
    """as OCI names it"""
    cuda: int | None
    """major version"""
    rocm: bool
    rocm_version: int | None
    """major version"""
    ngc: tuple[int, int] | None
    """(year, month) of the release of NVIDIA's PyTorch image that it is, or is based on"""
    extended: bool
    """an Alps extended image, which has its own network stack"""
    nvidia: bool
    """made for NVIDIA's GPUs"""
    nccl: bool
    """its name is that of a framework that uses NCCL"""
    words: str
    """the image's name, source and labels, in lower case"""


def facts_of(image: str, path: Path | None) -> ImageFacts:
    """Facts from the image's name, and from the metadata that `runner import` stores beside a squashfs file."""
    squashfs = find_squashfs(path) if path is not None else None
    words = [image]
    if squashfs is not None:
        words += [squashfs.source, *squashfs.labels.values()]
    text = "\n".join(words).lower()
    releases = [(int(year), int(month)) for year, month in _RELEASE.findall(text)]
    ngc = next(((year, month) for year, month in releases if 0 < month < 13), None)
    rocm_version = re.search(r"rocm[-_:/]?v?(\d)", text)
    return ImageFacts(
        architecture=squashfs.architecture if squashfs is not None else _architecture(image),
        cuda=_cuda(text, ngc),
        rocm="rocm" in text,
        rocm_version=int(rocm_version[1]) if rocm_version else None,
        ngc=ngc,
        extended=bool(re.search(r"alps-images/|alps-extended-images|-alps\d+\b", text)),
        nvidia=ngc is not None or bool(re.search(r"nvcr\.io|nvidia|\bngc|cuda", text)),
        nccl=bool(_NCCL_FRAMEWORK.search(text)) and "rocm" not in text,
        words=text,
    )


def _architecture(image: str) -> str | None:
    name = image.rpartition("/")[2]
    found = re.search(r"(?<![a-z0-9])(aarch64|arm64|amd64|x86[_-]64)(?![a-z0-9])", name)
    return _ARCHITECTURES[found[1]] if found else None


def _cuda(text: str, ngc: tuple[int, int] | None) -> int | None:
    """The major version of CUDA, from the name or from NVIDIA's release.

    Source: release notes of NVIDIA's PyTorch container: 25.06 is the last with CUDA 12, 25.08 has 13.0 (2026-11-21).
    """
    named = re.search(r"(?:cuda|\bcu)[-_:/]?(1[1-9])(?:[\d.]*)(?![a-z])", text)
    if named:
        return int(named[1])
    if ngc is None or not (24, 5) <= ngc < (40, 0) or ngc == (25, 7):
        return None
    return 12 if ngc <= (25, 6) else 13
