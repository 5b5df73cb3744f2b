"""Rules for the image: its name, its file, its architecture."""

import re
from collections.abc import Iterator

from runner.environments.engines.ce import lost_path
from runner.environments.engines.shared import bare_squashfs
from runner.environments.lint.finding import Finding, Subject
from runner.environments.rewriting import Set
from runner.errors import RunnerError
from runner.expansion import names
from runner.images.reference import HUB_NAMES, parse_reference
from runner.images.sources.registry.credentials import (
    TOKEN_HOSTS,
    enroot_file,
    find_login,
    how_to_add,
    without_port,
)
from runner.images.squashfs_file import is_whole
from runner.machine import files


def in_registry(subject: Subject) -> bool:
    """Whether the image is a name in a registry."""
    image = subject.own.image
    return (
        bool(image)
        and not subject.own.is_squashfs
        and not bare_squashfs(subject.own)
        and "${" not in image
    )


def empty(subject: Subject) -> Iterator[Finding]:
    """A missing image: most engines need one."""
    if not subject.own.image and subject.setting.engine_facts.needs_image:
        reason = f"the EDF does not set an image, and {subject.setting.engine} needs one"
        yield subject.say("image-empty", "image", reason)


def relative_squashfs(subject: Subject) -> Iterator[Finding]:
    """A bare file name, which engines treat as the name of an image in a registry."""
    if bare_squashfs(subject.own):
        image = subject.own.image
        reason = (
            f"{image!r} is not a path, so an image of that name would be pulled from a registry"
        )
        fix, changes = f"write an absolute path, or ./{image}", (Set(("image",), f"./{image}"),)
        yield subject.say("relative-squashfs", "image", reason, fix, changes=changes)


def file(subject: Subject) -> Iterator[Finding]:
    """A squashfs file that is missing, incomplete, or not readable."""
    path = subject.image_path
    if path is None:
        return
    if denied := files.why_denied(path):
        reason, fix = f"cannot read {path}: {denied}", "ask the owner for access"
        yield subject.say("image-missing", "image", reason, fix)
    elif not path.exists():
        recipe = path.name.removesuffix(".sqsh")
        ours = "RUNNER_IMAGES" in names(subject.own.image)
        fix = f"runner import {recipe}, or for an image of a registry: runner import docker://…"
        fix = fix if ours else "correct the path"
        yield subject.say("image-missing", "image", f"{path} does not exist", fix)
    elif path.is_dir():
        yield subject.say(
            "image-not-squashfs", "image", f"{path} is a folder", "give the path of a .sqsh file"
        )
    elif not is_whole(path):
        yield subject.say(
            "image-not-squashfs", "image", f"{path} is not a squashfs file, or is truncated"
        )


def architecture(subject: Subject) -> Iterator[Finding]:
    """An image for another architecture (`exec format error`), or for GPUs of another vendor."""
    image, site = subject.image, subject.setting.site
    if image.architecture and site.architecture and image.architecture != site.architecture:
        reason = f"the image is for {image.architecture}, but the nodes of {site.name} are {site.architecture}"
        yield subject.say(
            "image-architecture",
            "image",
            reason,
            f"runner import SOURCE --site {site.name}; or build it with --platform linux/{site.architecture}",
        )
    elif image.rocm and not image.cuda and (site.gpu or "").startswith("NVIDIA"):
        reason = f"the image is for AMD's GPUs (ROCm), but the nodes of {site.name} have {site.gpu}"
        yield subject.say("image-architecture", "image", reason, "use an image built for CUDA")


def login_shell(subject: Subject) -> Iterator[Finding]:
    """Folders of the image's PATH that the Container Engine's login shell drops."""
    path = subject.image_path
    if not subject.setting.engine_facts.starts_login_shell or path is None:
        return
    if subject.environment.env.get("PATH"):
        return
    lost = lost_path(path)
    if lost:
        reason = "the engine's login shell runs /etc/profile, which replaces the image's PATH"
        yield subject.say("path-lost", "env.PATH", reason, f"PATH = {lost!r} in [env]")


def separator(subject: Subject) -> Iterator[Finding]:
    """`#` or `/` after the registry. Source: enroot 4.0.0 accepts both; raster@20f75bd passes the name to podman."""
    if not in_registry(subject):
        return
    found, engine = parse_reference(subject.own.image), subject.setting.engine
    enroot = subject.setting.enroot
    if (
        found.separator == "/"
        and subject.setting.pulls_with_enroot
        and (enroot is None or enroot < (4,))
    ):
        older = f"enroot {'.'.join(map(str, enroot))}" if enroot else "enroot before 4.0"
        image = subject.own.image.replace(f"{found.registry}/", f"{found.registry}#", 1)
        reason = (
            f"{older} looks for {found.registry!r} on Docker Hub unless `#` follows the registry"
        )
        severity = "error" if enroot else "warning"
        yield subject.say(
            "slash-after-registry",
            "image",
            reason,
            f"image = {image!r}",
            severity=severity,
            changes=(Set(("image",), image),),
        )
    if found.separator == "#" and not subject.setting.engine_facts.accepts_hash:
        image, changes = found.with_slash, (Set(("image",), found.with_slash),)
        reason = f"{engine} itself does not accept `#` in the name of an image; only runner writes it as `/`"
        yield subject.say(
            "hash-after-registry", "image", reason, f"image = {image!r}", changes=changes
        )


def name(subject: Subject) -> Iterator[Finding]:
    """Names that a registry or enroot rejects. Source: enroot 4.1.2, src/docker.sh, regular expressions for the URI."""
    if not in_registry(subject) or re.search(r"[{<]", subject.own.image):
        return
    image, found = subject.own.image, parse_reference(subject.own.image)
    if image.startswith("docker://"):
        plain = image.removeprefix("docker://")
        reason = "`image` in an EDF does not take a scheme: `docker:` would be read as a registry"
        yield subject.say(
            "image-scheme", "image", reason, f"image = {plain!r}", changes=(Set(("image",), plain),)
        )
    if not re.fullmatch(r"[a-z0-9/._-]+", found.repository):
        yield subject.say("image-name", "image", f"{found.repository!r} is not a valid image name")
    elif (
        found.digest
        and subject.setting.pulls_with_enroot
        and (subject.setting.enroot or (4,)) < (4,)
    ):
        yield subject.say(
            "image-digest", "image", "enroot before 4.0 cannot pull an image by digest"
        )
    elif not found.digest and found.tag in {"", "latest"}:
        what = "the tag `latest`" if found.tag else "no tag, which means `latest`"
        yield subject.say("image-no-tag", "image", f"{image!r} has {what}")


# registries whose images are usually public: a login raises limits, or gives access to private images
_PUBLIC = {
    "docker.io",
    "ghcr.io",
    "quay.io",
    "public.ecr.aws",
    "registry.k8s.io",
    "mcr.microsoft.com",
}


def credentials(subject: Subject) -> Iterator[Finding]:
    """A missing login for the registry. nvcr.io needs two: for itself, and for the host that issues its tokens."""
    if not in_registry(subject) or not subject.setting.here:
        return
    registry = parse_reference(subject.own.image).registry
    if registry in HUB_NAMES:
        registry = "docker.io"
    if registry == "localhost" or registry.startswith("localhost:"):
        return
    pulls_with = subject.setting.engine_facts.pulls_with
    if pulls_with == "enroot":
        yield from _enroot(subject, registry)
    elif pulls_with == "podman":
        yield from _podman(subject, registry)


def _enroot(subject: Subject, registry: str) -> Iterator[Finding]:
    path = enroot_file(subject.setting.environ)
    # Source: enroot 4.1.2: one entry a line, `machine` first
    there = set(
        re.findall(r"^\s*machine\s+(\S+)\s.*\bpassword\s+\S", files.text_of(path), re.MULTILINE)
    )
    wanted = {registry, without_port(registry)}
    if registry == "docker.io":
        wanted.add("registry-1.docker.io")
    tokens = set(TOKEN_HOSTS.get(registry, ()))
    if not there & (wanted | tokens):
        yield _missing(subject, registry, str(path))
    elif tokens and registry != "docker.io" and not (there & wanted and there & tokens):
        has, lacks = (registry, *tokens) if there & wanted else (*tokens, registry)
        reason = f"{path} has a line for {has}, but not for {lacks}; a pull needs both"
        yield subject.say(
            "credentials-half", "image", reason, f"copy the line of {has} as `machine {lacks}`"
        )


def _podman(subject: Subject, registry: str) -> Iterator[Finding]:
    # these engines do not read enroot's file
    environ = {**subject.setting.environ, "ENROOT_CONFIG_PATH": "/dev/null"}
    try:
        search = find_login(registry, parse_reference(subject.own.image).repository, "", environ)
    except RunnerError as error:
        yield subject.say("credentials-missing", "image", f"{error.what}: {error.why}", error.fix)
        return
    if search.login is None:
        yield _missing(
            subject,
            registry,
            "podman's auth.json or docker's config.json",
            f"podman login {registry}",
        )


def _missing(subject: Subject, registry: str, place: str, fix: str = "") -> Finding:
    public = registry in _PUBLIC
    reason = f"there is no login for {registry} in {place}" + (
        ": pulls are rate-limited, and private images are refused" if public else ""
    )
    fix = fix or how_to_add(registry, subject.setting.environ).replace(
        f", or: podman login {registry}", ""
    )
    others = "".join(
        f", and the same line for machine {host}" for host in TOKEN_HOSTS.get(registry, ())
    )
    fix += "" if "podman" in fix else others
    return subject.say("credentials-missing", "image", reason, fix, "note" if public else "warning")


RULES = (empty, relative_squashfs, file, architecture, login_shell, separator, name, credentials)
