"""Images in a tar: read in place, layers by seek; what podman and Docker write, and damage of all kinds."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage
from runner.images.reference import Source
from tests.images.handmade import (
    CONFIG,
    LAYERS,
    MANIFEST,
    MANIFEST_TYPE,
    describe,
    diff_ids,
    digest_of,
    make_index,
    make_tar,
    open_source,
    plain_digests,
    read_layer,
    to_json,
    write_docker_archive,
)
from tests.images.sources import stored
from tests.lab.podman import Podman


def read(path: Path, form: str = "docker-archive", tag: str = "") -> list[str]:
    """The digests of the plain layers."""
    with open_source(Source(form, str(path), tag)) as image:
        assert plain_digests(image) == diff_ids(image)
        return diff_ids(image)


def refuse(path: Path, words: str, form: str = "docker-archive", tag: str = "") -> None:
    with pytest.raises(RunnerError) as caught:
        read(path, form, tag)
    assert words in str(caught.value)


@pytest.mark.uses("podman")
@pytest.mark.parametrize("form", ["oci-archive", "docker-archive"])
def test_what_podman_saves(podman: Podman, tmp_path: Path, form: str) -> None:
    name = stored.load_handmade(podman)
    told = stored.report(podman, name)
    path = tmp_path / "image.tar"
    podman.run("save", "--quiet", f"--format={form}", "--output", str(path), name)
    assert read(path, form) == told["diff_ids"]
    with open_source(Source(form, str(path))) as image:
        assert image.config["Env"] == ["A=b"]
        # for OCI's form podman writes the configuration anew
        assert (image.id == told["id"]) == (form == "docker-archive")
        assert image.size_bytes == sum(layer.size_bytes for layer in image.layers) > 0
        # another layer while one is open, and one opened twice
        with image.layers[0].open() as first, image.layers[0].open() as again:
            first.read(1000)
            assert plain_digests(image) == told["diff_ids"]
            assert again.read(1000)[:1000] == read_layer(image.layers[0])[:1000]
    gzipped = tmp_path / "image.tar.gz"
    gzipped.write_bytes(gzip.compress(path.read_bytes(), 1))
    refuse(gzipped, "gzip -dc", form)


@pytest.mark.parametrize("compress", [False, True])
def test_layers_of_a_docker_archive_may_be_compressed(tmp_path: Path, compress: bool) -> None:
    path = write_docker_archive(tmp_path / "x", LAYERS, compress=compress)
    assert read(path) == read(path, tag="1") == read(path, tag="localhost/handmade:1") == [*map(digest_of, LAYERS)]
    refuse(path, "does not contain the image 'absent'", tag="absent")


def docker_25(path: Path) -> Path:
    """Both forms in one file, as Docker writes it from version 25 on."""
    names = {data: f"blobs/sha256/{digest_of(data)[7:]}" for data in (CONFIG, MANIFEST, *LAYERS)}
    entry = {"Config": names[CONFIG], "RepoTags": ["x:1"], "Layers": [names[layer] for layer in LAYERS]}
    entry["LayerSources"] = {}  # type: ignore[assignment]
    annotations = {"io.containerd.image.name": "docker.io/library/x:1", "org.opencontainers.image.ref.name": "1"}
    index = make_index(describe(MANIFEST, MANIFEST_TYPE, annotations=annotations))
    files = {name: data for data, name in names.items()}
    more = {"index.json": index, "manifest.json": to_json([entry]), "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    path.write_bytes(make_tar({"blobs/": None, "blobs/sha256/": None, **files, **more}))
    return path


def test_dockers_file_of_both_forms_is_read_either_way(tmp_path: Path) -> None:
    path = docker_25(tmp_path / "x")
    assert read(path) == read(path, "oci-archive") == read(path, "oci-archive", "1") == [*map(digest_of, LAYERS)]


def test_layers_may_be_links_to_other_members_and_nowhere_else(tmp_path: Path) -> None:
    path, secret = tmp_path / "x", tmp_path / "secret.tar"
    secret.write_bytes(LAYERS[1])
    entry = to_json([{"Config": "c.json", "RepoTags": None, "Layers": ["0/layer.tar", "1/layer.tar"]}])
    files = {"./c.json": CONFIG, "manifest.json": entry, "0/layer.tar": LAYERS[0], "2/layer.tar": LAYERS[1]}
    for target, words in (
        ("../2/layer.tar", ""),
        ("../../../../../2/layer.tar", "the archive has no file"),
        (str(secret), "the archive has no file"),
        ("layer.tar", "at the end of too many links"),
        ("../absent", "the archive has no file"),
    ):
        path.write_bytes(make_tar({**files, "1/layer.tar": target}))
        refuse(path, words) if words else read(path)


def test_several_images_in_one_docker_archive(tmp_path: Path) -> None:
    entries = [{"Config": "c", "RepoTags": [f"x:{n}"], "Layers": ["0", "1"]} for n in (1, 2)]
    files = {"c": CONFIG, "0": LAYERS[0], "1": LAYERS[1], "manifest.json": to_json(entries)}
    (tmp_path / "x").write_bytes(make_tar(files))
    refuse(tmp_path / "x", "it has: x:1, x:2")
    assert read(tmp_path / "x", tag="2")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no manifest.json"),
        ({"index.json": b"{}"}, "which oci-archive:FILE reads"),
        ({"manifest.json": b"{}"}, "'list' is not a list"),
        ({"manifest.json": b"[]"}, "its manifest.json lists no images"),
        ({"manifest.json": b"[null]"}, "list of objects"),
        ({"manifest.json": b"[{}]"}, "the archive has no file"),
        ({"manifest.json": to_json([{"Config": "../../etc/passwd", "Layers": []}])}, "the archive has no file"),
        (
            {"manifest.json": to_json([{"Config": "c", "Layers": None}]), "c": CONFIG},
            "names 2 layers, but the manifest names 0",
        ),
        (
            {"manifest.json": to_json([{"Config": "c", "Layers": ["x\0y", "/"]}]), "c": CONFIG},
            "the archive has no file",
        ),
        ({"manifest.json": to_json([{"Config": "c", "Layers": ["c"] * 10_001}]), "c": CONFIG}, "more than 10000"),
        ({"manifest.json": to_json([{"Config": "c", "Layers": []}]), "c": b" " * (17 << 20)}, "more than 4194304"),
        ({"manifest.json": b"[" * 300_000}, "nested too deeply"),
    ],
)
def test_hostile_docker_archives(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    (tmp_path / "x").write_bytes(make_tar(files))
    refuse(tmp_path / "x", words)


def test_what_is_no_tar(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"", b"nothing" * 500, LAYERS[0][:700], b"\0" * 10240):
        path.write_bytes(data)
        refuse(path, "cannot read")
        refuse(path, "cannot read", "oci-archive")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refuse(fifo, "not a regular file")
    refuse(tmp_path / "absent", "No such file")
    refuse(tmp_path, "not a regular file")


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    """A PAX header is read whole: one of 5 GB, in a file with a hole, would fill the memory."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = tarfile.XHDTYPE, 5 << 30
    with (tmp_path / "x").open("wb") as file:
        file.write(entry.tobuf())
        file.truncate(6 << 30)
    refuse(tmp_path / "x", "a header of")


def test_a_tar_cut_at_any_place_is_an_error(tmp_path: Path) -> None:
    whole = write_docker_archive(tmp_path / "whole", LAYERS).read_bytes()
    path = tmp_path / "x"
    end = whole.rindex(b"manifest.json")
    for cut in range(0, end, 997):
        path.write_bytes(whole[:cut])
        refuse(path, "cannot read")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_any_changed_bytes_are_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]], as_oci: bool) -> None:
    path = tmp_path / "x"
    data = bytearray(docker_25(path).read_bytes())
    for place, value in changes:
        data[place % len(data)] = value
    path.write_bytes(data)
    source = Source("oci-archive" if as_oci else "docker-archive", str(path))
    with ExitStack() as stack:
        try:
            image = stack.enter_context(open_source(source))
            assert isinstance(image, LayeredImage)
            for layer in image.layers:
                read_layer(layer)
        except RunnerError:
            pass


def test_a_member_of_the_same_name_later_counts(tmp_path: Path) -> None:
    """As unpacking would leave it."""
    buffer = io.BytesIO(make_tar({"manifest.json": b"[]"}))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        other = write_docker_archive(tmp_path / "y", LAYERS)
        with tarfile.open(other) as old:
            for member in old:
                tar.addfile(member, old.extractfile(member))
    (tmp_path / "x").write_bytes(buffer.getvalue())
    assert read(tmp_path / "x") == [*map(digest_of, LAYERS)]
