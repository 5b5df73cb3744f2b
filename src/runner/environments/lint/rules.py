"""The rules: what is wrong with an environment on a site, found before a job waits in the queue for it.

A rule is a function from a Subject to findings; RULES is the whole list. What a reader of EDFs refuses anyway (unknown
keys, broken mounts, a table opened twice) never comes this far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.environments.engines import attach, with_site
from runner.environments.engines.shared import bare_squashfs
from runner.environments.environment import Environment
from runner.environments.lint.finding import Finding
from runner.errors import RunnerError
from runner.expansion import expand, names, parts
from runner.site import Site

# set by the batch script or by launch, on every site
_OURS = {"RUNNER_RUN": "", "RUNNER_CACHE": "", "RUNNER_ATTEMPT": "", "RUNNER_IMAGES": ""}
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(_|$)", re.I)
_SECRET_VALUE = re.compile(r"(hf_|ghp_|github_pat_|glpat-|nvapi-|sk-|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}")
_TUNING = re.compile(r"(NCCL|FI|OFI_NCCL)_[A-Z0-9_]+")
_HARMLESS_TUNING = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "FI_LOG_LEVEL", "FI_EFA_USE_HUGE_PAGE"}


@dataclass(frozen=True)
class Subject:
    """What is looked at: an environment, on a site, by an engine, from this machine."""

    environment: Environment
    site: Site
    engine: str
    environ: Mapping[str, str]

    def finding(self, code: str, severity: str, field: str, reason: str, fix: str) -> Finding:
        origin = self.environment.origins.get(field)
        return Finding(code, severity, field, origin.place if origin else None, reason, fix)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of this machine, and those that every run has."""
        known = {**_OURS, **self.environ}
        try:
            known["RUNNER_IMAGES"] = str(self.site.images(self.environ))
        except RunnerError:
            known.pop("RUNNER_IMAGES")  # the rule on undefined variables says so
        return known


def texts(environment: Environment) -> Iterator[tuple[str, str]]:
    """(field, text) of everything in which variables are expanded."""
    yield "image", environment.image
    if environment.workdir is not None:
        yield "workdir", environment.workdir
    for index, mount in enumerate(environment.mounts):
        yield f"mounts.{index}", mount.text()
    for name, value in environment.env.items():
        yield f"env.{name}", value
    for name, value in environment.annotations.items():
        yield f"annotations.{name}", value


def undefined_variable(subject: Subject) -> Iterator[Finding]:
    """A variable that is not defined ends the job; in [env] the image may define it."""
    for field, text in texts(subject.environment):
        bare = {part.name for part in parts(text, field) if not isinstance(part, str) and part.default is None}
        for name in names(text, field):
            if name in bare and name not in subject.variables:
                in_env = field.startswith("env.")
                reason = f"{field} needs {name}, which is not defined here" + (
                    "; the image must define it" if in_env else ""
                )
                yield subject.finding(
                    "undefined-variable",
                    "warning" if in_env else "error",
                    field,
                    reason,
                    f"export {name}=…, or give it a default: ${{{name}:-…}}",
                )


def no_braces(subject: Subject) -> Iterator[Finding]:
    """`$VAR` is plain text to every engine."""
    for field, text in texts(subject.environment):
        plain = "".join(part for part in parts(text, field) if isinstance(part, str))
        for match in re.finditer(r"\$([A-Za-z_][A-Za-z0-9_]*)", plain):
            severity = "warning" if field.startswith(("env.", "annotations.")) else "error"
            reason = f"{field} has {match[0]} without braces: it stays the text {match[0]}"
            yield subject.finding("variable-without-braces", severity, field, reason, f"write ${{{match[1]}}}")


def relative_squashfs(subject: Subject) -> Iterator[Finding]:
    """A bare file name is taken for the name of an image in a registry."""
    if bare_squashfs(subject.environment):
        image = subject.environment.image
        reason = f"{image!r} is taken for an image in a registry, and pulled"
        yield subject.finding("relative-squashfs", "error", "image", reason, f"write an absolute path, or ./{image}")


def missing_image(subject: Subject) -> Iterator[Finding]:
    """The squashfs file is not there."""
    if not subject.environment.is_squashfs:
        return
    try:
        path = Path(expand(subject.environment.image, subject.variables, "image"))
    except RunnerError:
        return  # the rule on undefined variables says so
    if not path.exists():
        recipe = path.name.removesuffix(".sqsh")
        ours = "RUNNER_IMAGES" in names(subject.environment.image)
        fix = f"runner build {recipe} && runner import {recipe}" if ours else "correct the path"
        yield subject.finding("image-missing", "error", "image", f"there is no {path}", fix)


def missing_mount_source(subject: Subject) -> Iterator[Finding]:
    """A mount whose source is not there ends the job; a compute node may see other folders than this machine."""
    variables = subject.variables
    for index, mount in enumerate(subject.environment.mounts):
        try:
            source = expand(mount.source, variables, f"mounts.{index}")
        except RunnerError:
            continue  # the rule on undefined variables says so
        if {"RUNNER_RUN", "RUNNER_CACHE"} & {*names(mount.source)} or Path(source).exists():
            continue
        local = subject.site.scheduler == "local"
        yield subject.finding(
            "mount-source-missing",
            "error" if local else "warning",
            f"mounts.{index}",
            f"{source} is not on this node" + ("" if local else "; the compute nodes may have it"),
            "make it, correct the path, or take the mount out",
        )


def secret_value(subject: Subject) -> Iterator[Finding]:
    """A secret in an EDF is copied into run folders, locks and repositories."""
    for name, value in subject.environment.env.items():
        literal = "".join(part for part in parts(value, name) if isinstance(part, str))
        if (_SECRET_NAME.search(name) and literal.strip()) or _SECRET_VALUE.search(literal):
            reason = f"env.{name} holds a secret as plain text"
            fix = f"take it out of the file and export {name} where you launch: the host's variables enter"
            yield subject.finding("secret-value", "error", f"env.{name}", reason, fix)


def stale_tuning(subject: Subject) -> Iterator[Finding]:
    """An NCCL_* or FI_* entry wins over what the engine's hook sets, and stays when the hook learns better."""
    for name in subject.environment.env:
        if subject.engine == "ce" and _TUNING.fullmatch(name) and name not in _HARMLESS_TUNING:
            reason = f"env.{name} overrides what the network hook of the Container Engine sets for its libraries"
            yield subject.finding("stale-tuning", "warning", f"env.{name}", reason, "remove it, and measure")


def engine_refuses(subject: Subject) -> Iterator[Finding]:
    """The engine of the site cannot express a field."""
    try:
        attach(subject.environment, subject.site, subject.engine, subject.environ)
    except RunnerError as error:
        reason = error.what.partition(": ")[2] if error.what.startswith("/") else error.what
        field = error.what.rsplit(" ", 1)[-1]
        yield subject.finding("engine-refuses", "error", field, f"{reason}: {error.why}", error.fix)


RULES: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    undefined_variable,
    no_braces,
    relative_squashfs,
    missing_image,
    missing_mount_source,
    secret_value,
    stale_tuning,
    engine_refuses,
)


def lint(environment: Environment, site: Site, engine: str, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Everything that the rules find, errors first; what two rules say about the same field is said once."""
    subject = Subject(with_site(environment, site), site, engine, environ)
    found = [finding for rule in RULES for finding in rule(subject)]
    said = {finding.field for finding in found if finding.code == "relative-squashfs"}
    kept = [finding for finding in found if not (finding.code == "engine-refuses" and finding.field in said)]
    return tuple(sorted(kept, key=lambda finding: (finding.severity != "error",)))
