"""References of images in registries, taken apart: REGISTRY/NAME[:TAG][@sha256:HEX]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runner.errors import RunnerError
from runner.images.sources.registry.credentials import DOCKER_HUB, HUB_NAMES

NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """An image in a registry."""

    registry: str
    """HOST[:PORT]; docker.io for Docker Hub"""
    repository: str
    tag: str = ""
    digest: str = ""
    """where it is given, the tag is not asked for"""

    @property
    def host(self) -> str:
        """The host that answers for the registry."""
        return "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry

    @property
    def version(self) -> str:
        """What the manifest is asked for by."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


@dataclass(frozen=True)
class Written:
    """An image as users name it: `[docker://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]`, or with a slash for `#`."""

    user: str
    registry: str
    """docker.io where none is named"""
    separator: str
    """`#`, `/`, or empty where no registry is named"""
    repository: str
    tag: str
    digest: str
    """64 hex digits; empty where none is given"""
    rest: str
    """the text without scheme and user"""

    @property
    def with_slash(self) -> str:
        """The same image as podman, docker, apptainer and Sarus Suite name it, none of which knows `#` or USER@."""
        return self.rest.replace("#", "/", 1) if self.separator == "#" else self.rest


def written(text: str) -> Written:
    """The parts of an image's name. Source: enroot 4.1.2, src/docker.sh."""
    rest = text.removeprefix("docker://")
    user = ""
    if found := re.match(r"([^@/#]+)@(?!sha256:)", rest):
        user, rest = found[1], rest[found.end() :]
    name, _, digest = rest.partition("@sha256:")
    registry, separator, path = name.partition("#")
    if not separator:
        first, slash, below = name.partition("/")
        named = bool(slash) and ("." in first or ":" in first or first == "localhost")
        registry, separator, path = (first, "/", below) if named else (DOCKER_HUB, "", name)
    path, colon, tag = path.rpartition(":") if ":" in path.rpartition("/")[2] else (path, "", "")
    return Written(user, registry, separator, path, tag if colon else "", digest, rest)


def parse_reference(text: str) -> Reference:
    """The parts of a reference whose first component is the registry. Raises RunnerError for one that cannot be.

    Source: the distribution project, reference/reference.go.
    """
    name, _, digest = text.partition("@")
    registry, slash, path = name.partition("/")
    head, colon, tag = path.rpartition(":")
    path, tag = (head, tag) if colon else (path, "")
    if not slash or not HOST.fullmatch(registry):
        raise _bad(text, "the registry's name is missing, or is none")
    if registry in HUB_NAMES:
        registry = DOCKER_HUB
        path = path if "/" in path else f"library/{path}"
    if not NAME.fullmatch(path):
        raise _bad(text, f"{path!r} is no name of an image: small letters, digits and . _ - / only")
    if colon and not TAG.fullmatch(tag):
        raise _bad(text, f"{tag!r} is no tag: letters, digits and . _ - only, at most 128")
    if "@" in text and not DIGEST.fullmatch(digest):
        raise _bad(text, f"{digest!r} is no digest: sha256: and 64 hex digits")
    return Reference(registry, path, tag or ("" if digest else "latest"), digest)


def _bad(text: str, why: str) -> RunnerError:
    return RunnerError(f"cannot read the image's name {text!r}", why, "docker://[USER@]REGISTRY#IMAGE[:TAG][@sha256:…]")
