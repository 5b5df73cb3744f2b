"""OCI layouts in folders: real ones of podman and skopeo, tags, and whatever a hostile one may hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage
from runner.images.reference import Source
from runner.images.sources.layout import Folder, read_layout
from tests.images.handmade import (
    CONFIG,
    INDEX_TYPE,
    LAYERS,
    MANIFEST,
    MANIFEST_TYPE,
    NAME,
    describe,
    diff_ids,
    digest_of,
    make_config,
    make_index,
    make_manifest,
    make_tar,
    open_source,
    plain_digests,
    read_layer,
    to_json,
    write_layout,
)
from tests.images.sources import stored
from tests.lab.podman import Podman


def read(folder: Path, tag: str = "") -> LayeredImage:
    return read_layout(Folder(folder), tag, architecture="amd64", reference=f"oci:{folder}")


def layout(folder: Path, index: bytes = make_index(describe(MANIFEST, MANIFEST_TYPE)), *more: bytes) -> Path:
    return write_layout(folder, index, MANIFEST, CONFIG, *LAYERS, *more)


def blob(folder: Path, data: bytes) -> Path:
    return folder / "blobs/sha256" / digest_of(data)[7:]


@pytest.mark.uses("podman", "skopeo")
def test_real_layouts_have_the_engines_layers(podman: Podman, tmp_path: Path) -> None:
    name = stored.load_handmade(podman)
    told = stored.report(podman, name)
    podman.run("save", "--quiet", "--format=oci-dir", "--output", str(tmp_path / "saved"), name)
    copies = {
        f"oci:{tmp_path}/gzip:tag": (),
        f"oci:{tmp_path}/zstd": ("--dest-compress-format=zstd", "--dest-compress"),
    }
    for target, flags in copies.items():
        subprocess.run(
            ("skopeo", "copy", "--quiet", *flags, f"containers-storage:{name}", target), env=podman.environ, check=True
        )
    for path, tag in (("saved", ""), ("gzip", ""), ("gzip", "tag"), ("zstd", "")):
        with open_source(Source("oci", str(tmp_path / path), tag)) as image:
            assert image.reference == f"oci:{tmp_path}/{path}{':' * bool(tag)}{tag}"
            assert diff_ids(image) == told["diff_ids"]
            if path == "zstd":  # its bytes are right; decoding them is another module's
                assert [digest_of(read_layer(layer)) for layer in image.layers] == [x.digest for x in image.layers]
            else:
                assert plain_digests(image) == told["diff_ids"]
            assert image.config["Env"] == ["A=b"]


def test_several_images_need_a_tag(tmp_path: Path) -> None:
    other_config = make_config(LAYERS[:1])
    other = make_manifest(other_config, LAYERS[:1])
    index = make_index(
        describe(MANIFEST, MANIFEST_TYPE, annotations={NAME: "one"}),
        describe(other, MANIFEST_TYPE, annotations={NAME: "localhost/x:two", "io.containerd.image.name": "y:z"}),
    )
    folder = layout(tmp_path / "x", index, other, other_config)
    assert len(read(folder, "one").layers) == 2
    assert len(read(folder, "two").layers) == len(read(folder, "localhost/x:two").layers) == 1
    assert len(read(folder, "y:z").layers) == 1
    with pytest.raises(RunnerError, match="contains several images") as caught:
        read(folder)
    assert caught.value.why == "their tags are localhost/x:two, one"
    with pytest.raises(RunnerError, match="no image has the tag 'three'") as caught:
        read(folder, "three")
    assert caught.value.why == "its tags are localhost/x:two, one"
    untagged = layout(tmp_path / "y", make_index(describe(MANIFEST, MANIFEST_TYPE)))
    with pytest.raises(RunnerError, match="no image has the tag 'three'") as caught:
        read(untagged, "three")
    assert caught.value.fix == "leave out the tag; this works if the layout contains only one image"


def test_one_tag_for_several_platforms(tmp_path: Path) -> None:
    arm_config = make_config(LAYERS, architecture="arm64")
    arm = make_manifest(arm_config, LAYERS)
    index = make_index(
        describe(arm, MANIFEST_TYPE, platform={"architecture": "arm64", "os": "linux"}, annotations={NAME: "t"}),
        describe(MANIFEST, MANIFEST_TYPE, platform={"architecture": "amd64", "os": "linux"}, annotations={NAME: "t"}),
    )
    folder = layout(tmp_path / "x", index, arm, arm_config)
    for tag in ("", "t"):
        assert read(folder, tag).architecture == "amd64"
    image = read_layout(Folder(folder), "", architecture="arm64", reference="x")
    assert image.architecture == "arm64"


def test_a_nested_index_is_followed(tmp_path: Path) -> None:
    inner = make_index(
        describe(MANIFEST, MANIFEST_TYPE, platform={"architecture": "amd64", "os": "linux"}),
        describe(b"attestation", MANIFEST_TYPE, platform={"architecture": "unknown", "os": "unknown"}),
    )
    folder = layout(tmp_path / "x", make_index(describe(inner, INDEX_TYPE, annotations={NAME: "t"})), inner)
    assert read(folder, "t").digest == digest_of(MANIFEST)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (MANIFEST, "it lists no manifests"),
        (make_index(), "lists no image"),
        (make_index(describe(b"absent", MANIFEST_TYPE)), "No such file"),
        (make_index({**describe(MANIFEST, MANIFEST_TYPE), "digest": "sha256:../../../etc/passwd"}), "is not a digest"),
        (to_json({"schemaVersion": 2, "manifests": None}), "neither"),
        (b" " * ((4 << 20) + 1), "more than 4194304"),
    ],
)
def test_hostile_indexes(tmp_path: Path, index: bytes, words: str) -> None:
    folder = layout(tmp_path / "x", index)
    with pytest.raises(RunnerError) as caught:
        read(folder)
    assert words in str(caught.value)


def test_an_index_that_lists_itself_is_not_followed(tmp_path: Path) -> None:
    """It cannot hold its own digest: the file that stands under that name is another than announced."""
    folder = layout(tmp_path / "x", make_index({**describe(b"self", INDEX_TYPE), "size": 999}))
    blob(folder, b"self").write_bytes((folder / "index.json").read_bytes())
    with pytest.raises(RunnerError, match="cannot read the manifest"):
        read(folder)


def test_damage_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    folder = layout(tmp_path / "missing")
    blob(folder, LAYERS[1]).unlink()
    with pytest.raises(RunnerError, match="cannot read") as caught:
        read(folder)
    assert "No such file" in caught.value.why
    folder = layout(tmp_path / "short")
    blob(folder, LAYERS[1]).write_bytes(LAYERS[1][:-1])
    with pytest.raises(RunnerError, match="cannot read") as caught:
        read(folder)
    assert "its descriptor says" in caught.value.why
    folder = layout(tmp_path / "changed")
    blob(folder, CONFIG).write_bytes(CONFIG.replace(b"A=b", b"A=c"))
    with pytest.raises(RunnerError, match="cannot read the configuration"):
        read(folder)
    (folder / "oci-layout").write_bytes(b'{"imageLayoutVersion": "2.0.0"}')
    with pytest.raises(RunnerError, match="cannot read"):
        read(folder)
    with pytest.raises(RunnerError, match="cannot read") as caught:
        read(tmp_path)
    assert "no index.json" in caught.value.why


def test_links_may_not_lead_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(LAYERS[0])
    folder = layout(tmp_path / "x")
    path = blob(folder, LAYERS[0])
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(RunnerError, match="cannot read") as caught:
        read(folder)
    assert "outside the layout" in caught.value.why
    path.unlink()
    (folder / "kept").write_bytes(LAYERS[0])
    path.symlink_to("../../kept")
    assert plain_digests(read(folder)) == [digest_of(layer) for layer in LAYERS]
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(RunnerError, match="cannot read"):
        read(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunnerError, match="cannot read") as caught:
        read(folder)
    assert "not a regular file" in caught.value.why


def test_a_blob_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    layer = make_tar({"big": os.urandom(3 << 20)})
    config = make_config([layer])
    manifest = make_manifest(config, [layer])
    folder = write_layout(tmp_path / "x", make_index(describe(manifest, MANIFEST_TYPE)), manifest, config, layer)
    with read(folder).layers[0].open() as stream:
        assert len(stream.read(1 << 20)) == 1 << 20
        os.truncate(blob(folder, layer), 2 << 20)
        with pytest.raises(RunnerError, match="cannot read"):
            while stream.read(1 << 20):
                pass
