"""Parse manifests and indexes of OCI and Docker images to an image whose layers can be opened.

The caller provides the bytes, from a folder, an archive or a registry. Nothing is trusted before its digest is
verified, and sizes and nesting are limited.
Source: image-spec 1.1 (manifest.md, image-index.md, config.md, media-types.md); distribution 2.8, schema 2.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from runner.errors import RunnerError
from runner.images.layers.layer import Layer, LayeredImage, Reader
from runner.machine import probe

MANIFEST_BYTES = 4 << 20
CONFIG_BYTES = 4 << 20
LAYERS = 10_000
DEPTH = 4
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
# annotations with the name; the second one is containerd's and Docker's, with registry and tag
NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# the variant if an image names none; images of newer variants may not run on older processors
_BASELINE = {"arm64": "v8", "amd64": "v1", "arm": "v7"}


@dataclass(frozen=True)
class Descriptor:
    """What a manifest or index says about another blob."""

    media_type: str
    digest: str
    """"sha256:HEX"; its syntax is verified, so that it is safe in a path or URL"""
    size_bytes: int
    architecture: str = ""
    """of an entry of an index; empty if it does not say"""
    os: str = ""
    variant: str = ""
    names: tuple[str, ...] = ()
    """its names in a layout: tags or whole references"""

    @property
    def platform(self) -> str:
        """`linux/arm64/v8`, for messages."""
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Blobs(Protocol):
    """Gives access to the blobs of an image."""

    def read(self, descriptor: Descriptor, limit: int) -> bytes:
        """Read a manifest, index or config, at most `limit` + 1 bytes. The caller verifies its digest."""

    def opener(self, descriptor: Descriptor) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens the blob of a layer."""


def read_image(
    data: bytes, digest: str, blobs: Blobs, *, architecture: str, reference: str
) -> LayeredImage:
    """The image that a manifest or index describes. In an index, the entry for the right platform is used.

    `digest` is what the bytes must hash to, empty if unknown. Raises RunnerError for damage, for anything
    that is not an image, and for an image of another architecture.
    """
    what = f"the manifest of {reference}"
    for _ in range(DEPTH):
        _within(len(data), MANIFEST_BYTES, what)
        digest = verified(data, digest, what)
        fields = parse_object(data, what)
        if not is_index(fields):
            return _image(fields, digest, blobs, architecture, reference)
        chosen = choose(descriptors(fields, "manifests"), architecture, reference)
        _within(chosen.size_bytes, MANIFEST_BYTES, what)
        data, digest = blobs.read(chosen, MANIFEST_BYTES), chosen.digest
    raise damaged(what, f"its indexes are nested more than {DEPTH} levels deep")


def verified(data: bytes, digest: str, what: str) -> str:
    """The digest of the bytes. Raises RunnerError if it differs from the expected one."""
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if digest and found != digest:
        raise damaged(what, f"its bytes hash to {found}, not to {digest}")
    return found


def is_index(fields: Fields) -> bool:
    """Whether these are the fields of an index. Raises RunnerError if they are of neither an index nor a manifest."""
    kind, version = fields.text("mediaType"), fields.number("schemaVersion")
    if version == 1 or fields.has("fsLayers") or "docker.distribution.manifest.v1" in kind:
        raise RunnerError(
            f"cannot read {fields.what}",
            "it has the obsolete format `schema 1`, which has no configuration",
            "convert the image: skopeo copy --format v2s2 docker://... docker://...",
        )
    index, manifest = fields.has("manifests"), fields.has("layers") or fields.has("config")
    # bytes that are both could be different images for different tools (CVE-2021-41190)
    if (
        index == manifest
        or (kind in INDEX_TYPES and manifest)
        or (kind in MANIFEST_TYPES and index)
    ):
        raise damaged(
            fields.what,
            f"it is neither an image's manifest nor an index{f' (it says {kind})' * bool(kind)}",
        )
    return index


def descriptors(fields: Fields, key: str) -> tuple[Descriptor, ...]:
    """The descriptors of a list. Raises RunnerError for one without a digest."""
    return tuple(descriptor(entry) for entry in fields.objects(key))


def descriptor(fields: Fields) -> Descriptor:
    """One descriptor."""
    digest = fields.text("digest")
    if not _DIGEST.fullmatch(digest):
        raise damaged(fields.what, f"{digest!r} is not a digest (sha256: and 64 hex digits)")
    platform = fields.object("platform")
    return Descriptor(
        media_type=fields.text("mediaType"),
        digest=digest,
        size_bytes=fields.number("size"),
        architecture=probe.oci_architecture(platform.text("architecture")),
        os=platform.text("os"),
        variant=platform.text("variant"),
        names=tuple(filter(None, (fields.object("annotations").text(name) for name in NAMES))),
    )


def choose(entries: Sequence[Descriptor], architecture: str, reference: str) -> Descriptor:
    """The entry of an index for Linux on an architecture, or an entry without a platform if no entry names one.

    Of several variants of an architecture, the default one, or else the oldest. Attestations (platform unknown/unknown)
    and entries of unknown types are skipped.
    """
    images = [entry for entry in entries if may_be_image(entry)]
    fitting = [
        entry
        for entry in images
        if entry.architecture == architecture and entry.os in ("linux", "")
    ]
    plain = ("", _BASELINE.get(architecture, ""))
    fitting.sort(key=lambda entry: "" if entry.variant in plain else entry.variant)
    if fitting:
        return fitting[0]
    silent = [entry for entry in images if not entry.architecture]
    if len(silent) == 1:
        return silent[0]
    known = sorted({entry.platform for entry in images if entry.architecture})
    raise RunnerError(
        f"{reference} has no image for linux/{architecture}",
        f"it has: {', '.join(known[:40])}"
        if known
        else f"it lists {len(silent)} images without a platform, and runner cannot choose one of them"
        if silent
        else "it lists no images",
        f"choose {'a site whose nodes match the image (--site)' if known else 'another tag'},"
        " or an image that was built for your nodes",
    )


def may_be_image(entry: Descriptor) -> bool:
    """Whether an entry of an index can be an image: it is not an attestation, and its type is known."""
    known = not entry.media_type or entry.media_type in INDEX_TYPES + MANIFEST_TYPES
    return known and entry.architecture != "unknown"


def _image(
    fields: Fields, digest: str, blobs: Blobs, architecture: str, reference: str
) -> LayeredImage:
    layers = descriptors(fields, "layers")
    refuse_layers([layer.media_type for layer in layers], reference)
    config = descriptor(fields.object("config"))
    if config.media_type and config.media_type not in CONFIG_TYPES:
        raise RunnerError(
            f"{reference} is not a container image",
            f"the media type of its configuration is {config.media_type}",
            "",
        )
    _within(config.size_bytes, CONFIG_BYTES, f"the configuration of {reference}")
    image, diff_ids = read_config(
        blobs.read(config, CONFIG_BYTES), config.digest, len(layers), architecture, reference
    )
    pairs = zip(diff_ids, layers, strict=True)
    found = tuple(
        Layer(diff_id, layer.digest, layer.size_bytes, blobs.opener(layer))
        for diff_id, layer in pairs
    )
    return replace(image, digest=digest, layers=found)


def refuse_layers(media_types: Sequence[str], reference: str) -> None:
    """Raise RunnerError for more layers than an image may have, and for layers that cannot be fetched."""
    if len(media_types) > LAYERS:
        raise damaged(reference, f"it has {len(media_types)} layers, more than {LAYERS}")
    for kind in media_types:
        if "foreign" in kind or "nondistributable" in kind:
            raise RunnerError(
                f"cannot read {reference}",
                f"a layer must be downloaded from its vendor ({kind}), as in Windows images",
                "choose a Linux image without vendor layers",
            )
        if "encrypted" in kind:
            raise RunnerError(
                f"cannot read {reference}",
                "its layers are encrypted",
                "decrypt the image, and import the copy: skopeo copy --decryption-key KEY docker://… oci:DIR && "
                "runner import oci:DIR",
            )


def read_config(
    data: bytes, digest: str, layers: int, architecture: str, reference: str
) -> tuple[LayeredImage, tuple[str, ...]]:
    """The image of a configuration, without its digest and its layers, and the diff_ids of its layers.

    `layers` is the number of layers in the manifest; `digest` is what the bytes must hash to, empty if unknown. Raises
    RunnerError for an image of another architecture.
    """
    what = f"the configuration of {reference}"
    _within(len(data), CONFIG_BYTES, what)
    identity = verified(data, digest, what).removeprefix("sha256:")
    fields = parse_object(data, what)
    system = fields.text("os")
    if system not in ("linux", ""):
        raise RunnerError(
            f"{reference} is an image for {system}",
            "only Linux images can be imported",
            "choose a Linux image",
        )
    refuse_architecture(fields.text("architecture"), architecture, reference)
    diff_ids = fields.object("rootfs").texts("diff_ids")
    if len(diff_ids) != layers:
        raise damaged(what, f"it names {len(diff_ids)} layers, but the manifest names {layers}")
    for diff_id in diff_ids:
        if not _DIGEST.fullmatch(diff_id):
            raise damaged(what, f"{diff_id!r} is not a digest (sha256: and 64 hex digits)")
    return LayeredImage(
        reference, identity, "", architecture, _runtime_config(fields), ()
    ), diff_ids


def refuse_architecture(found: str, wanted: str, reference: str) -> None:
    """Raise RunnerError for an image that cannot run on the nodes. An image without an architecture is accepted."""
    found = probe.oci_architecture(found)
    if found and found != wanted:
        raise RunnerError(
            f"{reference!r} is an image for {found}",
            f"the nodes are {wanted}, so the image's programs would fail with `exec format error`",
            f"build or pull the image for linux/{wanted}, or choose a site with {found} nodes (--site)",
        )


def _runtime_config(settings: Fields) -> dict[str, Any]:
    """The runtime part of the configuration, with checked types and without nulls."""
    runtime = settings.object("config")
    found: dict[str, Any] = {
        key: list(runtime.texts(key)) for key in ("Env", "Entrypoint", "Cmd") if runtime.has(key)
    }
    found |= {key: runtime.text(key) for key in ("WorkingDir", "User") if runtime.has(key)}
    if runtime.has("Labels"):
        found["Labels"] = runtime.mapping("Labels")
    if runtime.has("Volumes"):
        found["Volumes"] = dict(runtime.object("Volumes").value)
    return found


def _within(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise damaged(what, f"it has {size} bytes, more than {limit}")


class Fields:
    """A JSON object. A missing field and a null field are equivalent."""

    def __init__(self, value: Mapping[str, Any], what: str) -> None:
        self.value = value
        self.what = what

    def text(self, key: str) -> str:
        """A string; empty if missing."""
        return self._get(key, str, "a string") or ""

    def number(self, key: str) -> int:
        """A nonnegative integer; 0 if missing."""
        number: int = self._get(key, int, "a number") or 0
        if number < 0 or isinstance(number, bool):
            raise damaged(self.what, f"{key!r} is {number!r}, not a nonnegative integer")
        return number

    def object(self, key: str) -> Fields:
        """An object; empty if missing."""
        return Fields(self._get(key, dict, "an object") or {}, self.what)

    def objects(self, key: str) -> tuple[Fields, ...]:
        """A list of objects."""
        return tuple(
            Fields(self._kind(each, dict, key, "a list of objects"), self.what)
            for each in self._list(key)
        )

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings. A single string becomes a list, as in Docker's old Entrypoint and Cmd."""
        alone = self.value.get(key)
        if isinstance(alone, str):
            return (alone,)
        return tuple(self._kind(each, str, key, "a list of strings") for each in self._list(key))

    def mapping(self, key: str) -> dict[str, str]:
        """An object with string values. A null value becomes an empty string."""
        found = self._get(key, dict, "an object") or {}
        return {
            name: self._kind(each or "", str, key, "an object of strings")
            for name, each in found.items()
        }

    def has(self, key: str) -> bool:
        """Whether the field exists and is not null."""
        return self.value.get(key) is not None

    def _list(self, key: str) -> list[Any]:
        return self._get(key, list, "a list") or []

    def _get(self, key: str, kind: type, name: str) -> Any:
        value = self.value.get(key)
        return None if value is None else self._kind(value, kind, key, name)

    def _kind(self, value: Any, kind: type, key: str, name: str) -> Any:
        if not isinstance(value, kind):
            raise damaged(self.what, f"{key!r} is not {name}")
        return value


def parse_object(data: bytes, what: str) -> Fields:
    """Parse the JSON object in `data`. `what` names it in errors."""
    value = _parse(data, what)
    if not isinstance(value, dict):
        raise damaged(what, "it is not a JSON object")
    return Fields(value, what)


def parse_objects(data: bytes, what: str) -> tuple[Fields, ...]:
    """Parse the JSON list of objects in `data`."""
    return Fields({"list": _parse(data, what)}, what).objects("list")


def _parse(data: bytes, what: str) -> Any:
    try:
        value = json.loads(data)
        if b"\\u" in data:  # half a surrogate pair can be parsed, but cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise damaged(what, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise damaged(what, f"it is not JSON: {error}") from error
    return value


def damaged(what: str, why: str) -> RunnerError:
    """The error for a part of an image that is not what it should be."""
    return RunnerError(
        f"cannot read {what}",
        why,
        "check the image's name or path; if it is correct, create or pull the image again",
    )
