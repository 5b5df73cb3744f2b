"""References of images in registries, taken apart: REGISTRY/NAME[:TAG][@sha256:HEX]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runner.errors import RunnerError
from runner.images.oci.remote.credentials import DOCKER_HUB, HUB_NAMES

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
