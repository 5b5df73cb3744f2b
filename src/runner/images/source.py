"""What `import` reads: the words of enroot and of skopeo for where an image lies, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.images.image import split_reference

SCHEMES = ("podman", "dockerd", "docker", "oci", "oci-archive", "docker-archive")


@dataclass(frozen=True)
class Source:
    """Where an image comes from."""

    scheme: str
    """one of SCHEMES; empty for a bare name"""
    reference: str
    """the engine's name of the image, `REGISTRY/IMAGE:TAG`, or the path of a layout or archive"""
    tag: str = ""
    """oci, oci-archive: the image in the layout, where it holds several"""
    user: str = ""
    """docker: USER@ of enroot's form"""

    @property
    def registry(self) -> str:
        """The registry that the reference names; empty for a path, and where none is named."""
        if self.scheme in ("oci", "oci-archive", "docker-archive"):
            return ""
        first, slash, _ = self.reference.partition("/")
        return first if slash and (first == "localhost" or re.search("[.:]", first)) else ""

    @property
    def name(self) -> str:
        """The stem of the squashfs file: `nvidia+pytorch+24.06-py3`, as enroot names it; one of our own images by
        its recipe."""
        if self.scheme in ("oci", "oci-archive", "docker-archive"):
            stem = Path(self.reference).name.removesuffix(".tar").removesuffix(".oci")
            return _file_name("+".join(part for part in (stem, self.tag) if part))
        name, tag = split_reference(self.reference)
        if name.startswith("localhost/runner/"):
            return _file_name(name.removeprefix("localhost/runner/"))
        parts = (name.removeprefix(f"{self.registry}/") if self.registry else name).split("/")
        if len(parts) > 1 and parts[0] == "library":
            parts = parts[1:]
        return _file_name("+".join([*parts, *((tag,) if tag and tag != "latest" else ())]))


def parse_source(text: str, start: Path) -> Source:
    """The source that a user wrote; paths are relative to `start`. Raises RunnerError for other forms."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in SCHEMES:
        if "://" in text:
            raise _bad(text, f"{scheme}:// is not known here")
        return Source("", text)
    if scheme in ("podman", "dockerd", "docker"):
        if not rest.startswith("//") or not rest[2:]:
            # an image that is called `podman` or `docker`, with a tag
            return Source("", text) if "/" not in rest and rest else _refuse(text, f"after {scheme}: comes //IMAGE")
        return _registry(text, rest[2:]) if scheme == "docker" else Source(scheme, rest[2:])
    path, tag = rest, ""
    if scheme != "docker-archive" and not (start / Path(rest).expanduser()).exists() and ":" in rest:
        path, _, tag = rest.rpartition(":")
    whole = (start / Path(path).expanduser()).resolve()
    if not path or not whole.exists():
        raise RunnerError(
            f"cannot read {text!r}", f"{whole} does not exist", f"give {scheme}:PATH of a folder or file that is there"
        )
    if (scheme == "oci") != whole.is_dir():
        raise _bad(text, "oci: names the folder of a layout, oci-archive: and docker-archive: a file")
    return Source(scheme, str(whole), tag)


def registry_of(text: str) -> str:
    """The registry that the source names, as a sidecar keeps its text; empty where it names none, and for paths."""
    if text.startswith(("oci:", "oci-archive:", "docker-archive:")):
        return ""
    try:
        return parse_source(text, Path("/")).registry
    except RunnerError:
        return ""


def _registry(text: str, rest: str) -> Source:
    """[USER@][REGISTRY#]IMAGE[:TAG], enroot's form; REGISTRY/IMAGE, podman's, is taken too."""
    # the @ before a digest (IMAGE@sha256:...) is another one
    found = re.match(r"([^@/#]+)@(?!sha256:)(.*)", rest)
    user, image = (found[1], found[2]) if found else ("", rest)
    registry, hash_sign, name = image.partition("#")
    if not hash_sign:
        registry, name = "", image
    if not registry and not re.match(r"(localhost|[^/]*[.:][^/]*)/", name):
        registry = "docker.io"
        name = name if "/" in name else f"library/{name}"
    if not name or re.search(r"\s", name):
        raise _bad(text, "the image's name is missing")
    return Source("docker", f"{registry}/{name}" if registry else name, user=user)


def _refuse(text: str, why: str) -> Source:
    raise _bad(text, why)


def _bad(text: str, why: str) -> RunnerError:
    return RunnerError(
        f"cannot read the image {text!r}",
        why,
        "NAME, podman://IMAGE, dockerd://IMAGE, docker://[USER@]REGISTRY#IMAGE[:TAG], oci:DIR[:TAG], "
        "oci-archive:FILE, docker-archive:FILE",
    )


def _file_name(text: str) -> str:
    """The text as one plain file name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "+", text).strip(".+-") or "image"
