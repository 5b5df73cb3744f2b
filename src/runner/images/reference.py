"""Where an image is: the names that enroot, podman, docker and skopeo use, parsed once for all of runner."""

import re
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError

DOCKER_HUB = "docker.io"
HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
SCHEMES = ("podman", "dockerd", "docker", "oci", "oci-archive", "docker-archive")
_PATHS = ("oci", "oci-archive", "docker-archive")
_NAME = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """The name of an image: `[docker://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]`, or `/` in the place of `#`."""

    registry: str
    """HOST[:PORT]; docker.io if the text names none"""
    repository: str
    tag: str = ""
    digest: str = ""
    """`sha256:HEX`; takes precedence over the tag"""
    user: str = ""
    """the login to use: enroot's USER@"""
    separator: str = "/"
    """between registry and repository: `#`, `/`, or empty if the text names no registry"""

    @property
    def host(self) -> str:
        """The server of the registry."""
        return "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry

    @property
    def version(self) -> str:
        """The digest, else the tag: what selects a manifest."""
        return self.digest or self.tag

    @property
    def with_slash(self) -> str:
        """The form that podman, docker, apptainer and Sarus Suite accept: no `#`, no USER@."""
        return f"{self.registry}/{self._image}" if self.separator else self._image

    @property
    def with_hash(self) -> str:
        """`[USER@]REGISTRY#IMAGE`: with the `#`, no registry is taken for a folder of Docker Hub."""
        return f"{f'{self.user}@' if self.user else ''}{self.registry}#{self._image}"

    @property
    def _image(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"

    def __str__(self) -> str:
        return f"{self.registry}/{self._image}"


def parse_reference(text: str) -> Reference:
    """The parts of an image's name; nothing is refused. Source: enroot 4.1.2, src/docker.sh."""
    rest = text.removeprefix("docker://")
    user = ""
    if match := re.match(r"([^@/#]+)@(?!sha256:)", rest):
        user, rest = match[1], rest[match.end() :]
    name, _, digest = rest.partition("@")
    registry, separator, path = name.partition("#")
    if not separator:
        first, slash, below = name.partition("/")
        named = bool(slash) and (first == "localhost" or bool(re.search("[.:]", first)))
        registry, separator, path = (first, "/", below) if named else (DOCKER_HUB, "", name)
    return Reference(registry, *split_tag(path), digest, user, separator)


def split_tag(name: str) -> tuple[str, str]:
    """NAME and TAG of `NAME[:TAG][@DIGEST]`; the port of a registry is not a tag."""
    name = name.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "")


def registry_reference(text: str) -> Reference:
    """A reference that a registry accepts: Docker Hub's short names completed, `latest` if neither tag nor digest.

    Raises RunnerError for an invalid name. Source: the distribution project, reference/reference.go.
    """
    registry, slash, rest = text.partition("/")
    path, at, digest = rest.partition("@")
    repository, colon, tag = path.rpartition(":") if ":" in path else (path, "", "")
    if not slash or not _HOST.fullmatch(registry):
        raise _invalid_name(text, "the name of the registry is missing or invalid")
    if registry in HUB_NAMES:
        registry = DOCKER_HUB
        if "/" not in repository:
            repository = f"library/{repository}"
    if not _NAME.fullmatch(repository):
        raise _invalid_name(
            text, f"{repository!r} is not a valid name: use lower-case letters, digits and . _ - /"
        )
    if colon and not _TAG.fullmatch(tag):
        raise _invalid_name(
            text, f"{tag!r} is not a valid tag: a tag has at most 128 letters, digits and . _ -"
        )
    if at and not _DIGEST.fullmatch(digest):
        raise _invalid_name(
            text, f"{digest!r} is not a digest: a digest is sha256: and 64 hex digits"
        )
    return Reference(registry, repository, tag or ("" if digest else "latest"), digest)


def _invalid_name(text: str, why: str) -> RunnerError:
    return RunnerError(
        f"invalid image reference {text!r}", why, "docker://[USER@]REGISTRY#IMAGE[:TAG][@sha256:…]"
    )


@dataclass(frozen=True)
class Source:
    """What `import` reads: an image in a registry or an engine's storage, a layout or an archive."""

    scheme: str
    """one of SCHEMES; empty for a bare name"""
    reference: str
    """the engine's name of the image, `REGISTRY/IMAGE:TAG`, or the path of a layout or archive"""
    tag: str = ""
    """oci, oci-archive: which image of the layout"""
    user: str = ""
    """docker: the login to use"""

    @property
    def registry(self) -> str:
        """The registry that the reference names; empty for paths and for names without a registry."""
        if self.scheme in _PATHS:
            return ""
        # the reference is complete, and a registry's name may have no dot
        if self.scheme == "docker":
            return self.reference.partition("/")[0]
        name = parse_reference(self.reference)
        return name.registry if name.separator else ""

    @property
    def name(self) -> str:
        """The stem of the squashfs file: `nvidia+pytorch+24.06-py3`, as enroot names it; the recipe's name for images
        that runner built."""
        if self.scheme in _PATHS:
            stem = Path(self.reference).name.removesuffix(".tar").removesuffix(".oci")
            return file_name("+".join(part for part in (stem, self.tag) if part))
        name, tag = split_tag(self.reference)
        if name.startswith("localhost/runner/"):
            return file_name(name.removeprefix("localhost/runner/"))
        parts = (name.removeprefix(f"{self.registry}/") if self.registry else name).split("/")
        if len(parts) > 1 and parts[0] == "library":
            parts = parts[1:]
        if tag and tag != "latest":
            parts.append(tag)
        return file_name("+".join(parts))

    def __str__(self) -> str:
        """As the user writes it: `oci:DIR:TAG`, `podman://NAME`."""
        if self.scheme in _PATHS:
            return ":".join(part for part in (self.scheme, self.reference, self.tag) if part)
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{self.reference}" if self.scheme else self.reference


def parse_source(text: str, start: Path) -> Source:
    """The source that a user wrote; paths are relative to `start`. Raises RunnerError for other forms."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in SCHEMES:
        if "://" in text:
            raise _invalid_source(text, f"{scheme}:// is not supported")
        return Source("", text)
    if scheme in _PATHS:
        return _path_source(text, scheme, rest, start)
    if not rest.startswith("//") or not rest[2:]:
        if rest and "/" not in rest:
            return Source("", text)  # an image named `podman` or `docker`, with a tag
        raise _invalid_source(text, f"write {scheme}://IMAGE")
    if scheme != "docker":
        return Source(scheme, rest[2:])
    name = parse_reference(rest[2:])
    if not name.repository:
        raise _invalid_source(text, "the image's name is missing")
    if re.search(r"\s", rest):
        raise _invalid_source(text, "an image's name cannot contain spaces")
    library = "library/" if not name.separator and "/" not in name.repository else ""
    return Source("docker", str(name).replace("/", f"/{library}", 1), user=name.user)


def _path_source(text: str, scheme: str, rest: str, start: Path) -> Source:
    path, tags = rest, list[str]()
    # a tag may contain colons too: podman and containerd write whole references, such as docker.io/a:1
    while (
        scheme != "docker-archive"
        and ":" in path
        and not (start / Path(path).expanduser()).exists()
    ):
        path, _, last = path.rpartition(":")
        tags.insert(0, last)
    whole = (start / Path(path).expanduser()).resolve()
    if not path or not whole.exists():
        raise RunnerError(
            f"cannot read {text!r}",
            f"{whole} does not exist" if path else "the path is missing",
            f"write {scheme}:PATH with the path of an existing folder or file",
        )
    if (scheme == "oci") != whole.is_dir():
        raise _invalid_source(
            text, "oci: needs the folder of a layout; oci-archive: and docker-archive: need a file"
        )
    return Source(scheme, str(whole), ":".join(tags))


def registry_of(text: str) -> str:
    """The registry that the text of a source names, as a sidecar records it; empty if none, and for paths."""
    if text.startswith(tuple(f"{scheme}:" for scheme in _PATHS)):
        return ""
    try:
        return parse_source(text, Path("/")).registry
    except RunnerError:
        return ""


def _invalid_source(text: str, why: str) -> RunnerError:
    return RunnerError(
        f"invalid image reference {text!r}",
        why,
        "write one of: NAME, podman://IMAGE, dockerd://IMAGE, docker://[USER@]REGISTRY#IMAGE[:TAG], oci:DIR[:TAG], "
        "oci-archive:FILE[:TAG], docker-archive:FILE",
    )


def file_name(text: str) -> str:
    """The text as one plain file name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "+", text).strip(".+-") or "image"
