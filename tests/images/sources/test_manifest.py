"""Manifests and indexes: the right platform, the right digest, nothing too large, and always a RunnerError."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage, Reader
from runner.images.sources import manifest
from runner.images.sources.manifest import Descriptor, choose, read_image
from tests.images.handmade import (
    CONFIG,
    CONFIG_TYPE,
    INDEX_TYPE,
    LAYER_TYPE,
    LAYERS,
    MANIFEST,
    MANIFEST_TYPE,
    describe,
    digest_of,
    make_config,
    make_index,
    make_manifest,
    to_json,
)


class Shelf:
    """Blobs in memory; nobody opens a layer."""

    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {digest_of(blob): blob for blob in blobs}

    def read(self, descriptor: Descriptor, limit: int) -> bytes:
        return self.blobs[descriptor.digest][: limit + 1]

    def opener(self, descriptor: Descriptor) -> Callable[[], AbstractContextManager[Reader]]:
        def never() -> AbstractContextManager[Reader]:
            raise AssertionError(descriptor)

        return never


def read(data: bytes, *blobs: bytes, digest: str = "", architecture: str = "amd64") -> LayeredImage:
    return read_image(data, digest, Shelf(CONFIG, *blobs), architecture=architecture, reference="docker://x")


def platform(architecture: str, os: str = "linux", **more: str) -> dict[str, Any]:
    return {"platform": {"architecture": architecture, "os": os, **more}}


def test_a_manifest_gives_configuration_and_layers_in_their_order() -> None:
    image = read(MANIFEST, digest=digest_of(MANIFEST))
    assert (image.id, image.digest) == (digest_of(CONFIG)[7:], digest_of(MANIFEST))
    assert image.config == {"Env": ["A=b"]}
    assert [layer.digest for layer in image.layers] == [layer.diff_id for layer in image.layers]
    assert [layer.digest for layer in image.layers] == [digest_of(layer) for layer in LAYERS]
    assert image.size_bytes == sum(map(len, LAYERS))


def test_docker_schema_2_reads_the_same() -> None:
    text = MANIFEST.decode().replace(MANIFEST_TYPE, manifest.MANIFEST_TYPES[1])
    text = text.replace(CONFIG_TYPE, manifest.CONFIG_TYPES[1])
    text = text.replace(LAYER_TYPE, "application/vnd.docker.image.rootfs.diff.tar.gzip")
    assert read(text.encode()).id == read(MANIFEST).id


def test_an_index_leads_to_the_platform_that_was_asked_for() -> None:
    other = make_manifest(make_config(LAYERS, architecture="arm64"), LAYERS)
    attestation = describe(to_json({"x": 1}), MANIFEST_TYPE, **platform("unknown", "unknown"))
    index = make_index(
        attestation,
        describe(other, MANIFEST_TYPE, **platform("arm64")),
        describe(other, MANIFEST_TYPE, **platform("amd64", "windows")),
        describe(MANIFEST, MANIFEST_TYPE, **platform("amd64")),
        describe(b"", "application/vnd.unheard.of", **platform("amd64")),
    )
    nested = make_index(describe(index, INDEX_TYPE))
    assert read(index, MANIFEST, other).digest == digest_of(MANIFEST)
    assert read(nested, index, MANIFEST, other).digest == digest_of(MANIFEST)
    with pytest.raises(RunnerError, match="docker://x has no image for linux/s390x") as caught:
        read(index, MANIFEST, other, architecture="s390x")
    assert caught.value.why == "it has: linux/amd64, linux/arm64, windows/amd64"


@pytest.mark.parametrize(
    ("variants", "chosen"), [(("v3", "v2"), 1), (("v9", "v8"), 1), (("v9", ""), 1), (("", "v8"), 0), (("v9",), 0)]
)
def test_of_several_variants_the_plainest_is_taken(variants: tuple[str, ...], chosen: int) -> None:
    entries = [
        Descriptor(MANIFEST_TYPE, f"sha256:{number:064}", 1, "arm64", "linux", variant)
        for number, variant in enumerate(variants)
    ]
    assert choose(entries, "arm64", "x") is entries[chosen]


def test_an_image_for_other_machines_is_refused() -> None:
    config = make_config(LAYERS, architecture="arm64")
    with pytest.raises(RunnerError, match="is an image for arm64") as caught:
        read(make_manifest(config, LAYERS), config)
    assert "exec format error" in caught.value.why
    config = make_config(LAYERS, os="windows")
    with pytest.raises(RunnerError, match="is an image for windows"):
        read(make_manifest(config, LAYERS), config)


def test_null_fields_are_as_good_as_none() -> None:
    config = make_config(LAYERS, config=None, architecture=None, os=None, history=None)
    data = make_manifest(config, LAYERS, annotations=None, subject=None, mediaType=None)
    assert read(data, config).config == {}
    runtime = {"Env": None, "Cmd": None, "Entrypoint": "/one", "Labels": {"a": None, "b": "c"}, "Volumes": {"/v": {}}}
    config = make_config(LAYERS, config={**runtime, "WorkingDir": None, "User": "me", "Healthcheck": {"Test": []}})
    assert read(make_manifest(config, LAYERS), config).config == {
        "Entrypoint": ["/one"], "User": "me", "Labels": {"a": "", "b": "c"}, "Volumes": {"/v": {}},
    }  # fmt: skip
    with pytest.raises(RunnerError, match="no image for linux/amd64"):
        read(to_json({"schemaVersion": 2, "manifests": [], "annotations": None}))


def changed(**fields: Any) -> bytes:
    return to_json({**json.loads(MANIFEST), **fields})


def without(name: str) -> bytes:
    return to_json({key: value for key, value in json.loads(MANIFEST).items() if key != name})


def with_config(**more: Any) -> tuple[bytes, tuple[bytes]]:
    config = make_config(LAYERS, **more)
    return make_manifest(config, LAYERS), (config,)


TOO_MANY = to_json({"schemaVersion": 2, "config": {}, "layers": [describe(b"", LAYER_TYPE)] * 10_001})


@pytest.mark.parametrize(
    ("data", "blobs", "words"),
    [
        (b"", (), "not JSON"),
        (b"\xff\xfe", (), "not JSON"),
        (b"[]", (), "not a JSON object"),
        (b'"' * 3, (), "not JSON"),
        (b"[" * 200_000, (), "nested too deeply"),
        (b'{"a":' * 100_000, (), "nested too deeply"),
        (b'{"schemaVersion": ' + b"9" * 5000 + b"}", (), "not JSON"),
        (b'{"schemaVersion": 2, "x": "\\ud800"}', (), "not JSON"),
        (b" " * (4 << 20) + MANIFEST, (), "more than 4194304"),
        (to_json({"schemaVersion": 1, "fsLayers": []}), (), "schema 1"),
        (to_json({"schemaVersion": 2, "fsLayers": [], "signatures": []}), (), "schema 1"),
        (to_json({"schemaVersion": 2, "layers": [], "manifests": []}), (), "neither"),
        (MANIFEST.replace(b"image.manifest", b"image.index"), (), "neither"),
        (make_index().replace(b"image.index", b"image.manifest"), (), "neither"),
        (to_json({"schemaVersion": 2}), (), "neither"),
        (to_json({"schemaVersion": [2]}), (), "'schemaVersion' is not a number"),
        (without("config"), (), "'' is not a digest"),
        (without("layers"), (), "names 2 layers, but the manifest names 0"),
        (MANIFEST.replace(b"sha256:", b"sha256:../../etc/passwd"), (), "is not a digest"),
        (MANIFEST.replace(b"sha256:", b"sha512:"), (), "is not a digest"),
        (MANIFEST.replace(b'"size": ', b'"size": -'), (), "'size' is -"),
        (MANIFEST.replace(b'"size": ', b'"size": 0.'), (), "'size' is not a number"),
        (changed(layers={"a": 1}), (), "'layers' is not a list"),
        (changed(layers=[None]), (), "not a list of objects"),
        (changed(config="x"), (), "'config' is not an object"),
        (make_manifest(CONFIG, LAYERS[:1]), (), "names 2 layers, but the manifest names 1"),
        (TOO_MANY, (), "10001 layers, more than 10000"),
        (MANIFEST.replace(b"image.config", b"empty"), (), "configuration is application/vnd.oci.empty"),
        (MANIFEST.replace(b"layer.v1", b"layer.nondistributable.v1"), (), "must be downloaded from its vendor"),
        (MANIFEST.replace(b"layer.v1.tar", b"layer.v1.tar+encrypted"), (), "encrypted"),
        (changed(config={**describe(CONFIG, CONFIG_TYPE), "size": 1 << 40}), (), "more than 4194304"),
        (make_index({**describe(MANIFEST, MANIFEST_TYPE), "size": 1 << 40}), (MANIFEST,), "more than 4194304"),
        (
            make_index(*[describe(b"%d" % n, MANIFEST_TYPE) for n in range(2)]),
            (),
            "it lists 2 images without a platform",
        ),
        (*with_config(rootfs=None), "names 0 layers"),
        (*with_config(rootfs={"diff_ids": ["sha256:1"] * 2}), "is not a digest"),
        (*with_config(config={"Env": {"A": 1}}), "'Env' is not a list"),
        (*with_config(config={"Cmd": [1]}), "not a list of strings"),
        (*with_config(config={"Labels": {"a": [1]}}), "not an object of strings"),
        (*with_config(config={"WorkingDir": 5}), "not a string"),
    ],
)
def test_what_is_not_an_image_is_refused(data: bytes, blobs: tuple[bytes, ...], words: str) -> None:
    with pytest.raises(RunnerError) as caught:
        read(data, *blobs)
    assert words in str(caught.value)


def test_bytes_must_hash_to_what_was_announced() -> None:
    with pytest.raises(RunnerError, match="cannot read the manifest of docker://x"):
        read(MANIFEST, digest=digest_of(b"other"))
    shelf = Shelf(CONFIG)
    shelf.blobs[digest_of(CONFIG)] = CONFIG + b" "
    with pytest.raises(RunnerError, match="cannot read the configuration of docker://x") as caught:
        read_image(MANIFEST, "", shelf, architecture="amd64", reference="docker://x")
    assert "hash to" in caught.value.why


def test_indexes_within_indexes_end_after_four() -> None:
    """A loop cannot be made (its digest would have to hold itself); a long chain can."""
    chain = [MANIFEST]
    for _ in range(4):
        chain.append(make_index(describe(chain[-1], MANIFEST_TYPE if chain[-1] is MANIFEST else INDEX_TYPE)))
    assert read(chain[3], *chain).digest == digest_of(MANIFEST)
    with pytest.raises(RunnerError, match="cannot read the manifest") as caught:
        read(chain[4], *chain)
    assert "nested more than 4 levels deep" in caught.value.why


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([digest_of(CONFIG), "linux"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 40), JSON), min_size=1, max_size=3), st.sampled_from(["manifest", "config"]))
def test_any_value_in_any_place_is_read_or_refused(changes: list[tuple[int, Any]], where: str) -> None:
    value = json.loads(MANIFEST if where == "manifest" else CONFIG)
    for place, new in changes:
        spots = list(_spots(value))
        holder, key = spots[place % len(spots)]
        holder[key] = new
        if not isinstance(value, dict) or not list(_spots(value)):
            break
    config = CONFIG if where == "manifest" else to_json(value)
    data = to_json(value) if where == "manifest" else make_manifest(config, LAYERS)
    try:
        assert isinstance(read(data, config), LayeredImage)
    except RunnerError:
        pass
    except KeyError as error:  # a digest that the shelf does not hold
        assert str(error.args[0]).startswith("sha256:")


def _spots(value: Any) -> Any:
    """Every (container, key) of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _spots(inner)
