"""Rules over logins: what fetches the image must find one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from runner.environments.lint.finding import Finding
from runner.environments.lint.image import in_registry
from runner.environments.lint.subject import Subject
from runner.errors import RunnerError
from runner.images.sources.registry.credentials import HUB_NAMES, TOKEN_HOSTS, enroot_file, find_login, how_to_add
from runner.images.sources.registry.reference import written

# registries whose images are public as a rule: a login lifts limits, or opens private ones
_PUBLIC = {"docker.io", "ghcr.io", "quay.io", "public.ecr.aws", "registry.k8s.io", "mcr.microsoft.com"}


def credentials(subject: Subject) -> Iterator[Finding]:
    """A login for the registry; nvcr.io asks for two, of itself and of the host that hands out its tokens."""
    if not in_registry(subject) or not subject.setting.here:
        return
    registry = written(subject.own.image).registry
    if registry in HUB_NAMES:
        registry = "docker.io"
    if registry == "localhost" or registry.startswith("localhost:"):
        return
    yield from (_enroot if subject.setting.pulls else _podman)(subject, registry)


def _machines(environ: Mapping[str, str]) -> set[str]:
    """The hosts of enroot's file. Source: enroot 4.1.2: one entry a line, `machine` first."""
    try:
        text = enroot_file(environ).read_text(errors="replace")
    except OSError:
        return set()
    return set(re.findall(r"^machine\s+(\S+)\s.*\bpassword\s+\S", text, re.MULTILINE))


def _enroot(subject: Subject, registry: str) -> Iterator[Finding]:
    environ = subject.setting.environ
    there, path = _machines(environ), enroot_file(environ)
    wanted = {registry} if registry != "docker.io" else {"docker.io", "registry-1.docker.io"}
    tokens = set(TOKEN_HOSTS.get(registry, ()))
    if not there & (wanted | tokens):
        yield _missing(subject, registry, str(path))
    elif tokens and registry != "docker.io" and not (there & wanted and there & tokens):
        has, lacks = (registry, *tokens) if there & wanted else (*tokens, registry)
        reason = f"{path} has a line for {has}, and none for {lacks}: the pull asks both"
        yield subject.say("credentials-half", "image", reason, f"add the same line for machine {lacks}")


def _podman(subject: Subject, registry: str) -> Iterator[Finding]:
    if subject.setting.engine not in {"podman", "docker", "sarus", "apptainer"}:
        return
    # enroot's file counts for nothing here
    environ = {**subject.setting.environ, "ENROOT_CONFIG_PATH": "/dev/null"}
    try:
        search = find_login(registry, written(subject.own.image).repository, "", environ)
    except RunnerError as error:
        yield subject.say("credentials-missing", "image", f"{error.what}: {error.why}", error.fix)
        return
    if search.login is None:
        yield _missing(subject, registry, "podman's auth.json, docker's config.json", f"podman login {registry}")


def _missing(subject: Subject, registry: str, place: str, fix: str = "") -> Finding:
    public = registry in _PUBLIC
    reason = f"there is no login for {registry} in {place}" + (
        ": pulls are limited, and private images refused" if public else ""
    )
    fix = fix or how_to_add(registry, subject.setting.environ).replace(f", or: podman login {registry}", "")
    others = "".join(f", and the same for machine {host}" for host in TOKEN_HOSTS.get(registry, ()))
    return subject.say(
        "credentials-missing",
        "image",
        reason,
        fix + ("" if "podman" in fix else others),
        "note" if public else "warning",
    )


RULES = (credentials,)
