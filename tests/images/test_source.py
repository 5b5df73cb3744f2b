"""Where an image comes from, in enroot's, podman's and skopeo's words, and the file name that it gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.reference import Source, parse_source, registry_of, registry_reference


@pytest.mark.parametrize(
    ("text", "scheme", "reference", "user", "name"),
    [
        ("cpu", "", "cpu", "", "cpu"),
        ("localhost/runner/cpu:0123456789ab", "", "localhost/runner/cpu:0123456789ab", "", "cpu"),
        ("podman://localhost/a/b:1", "podman", "localhost/a/b:1", "", "a+b+1"),
        ("dockerd://b:latest", "dockerd", "b:latest", "", "b"),
        ("docker://ubuntu:24.04", "docker", "docker.io/library/ubuntu:24.04", "", "ubuntu+24.04"),
        ("docker://nvidia/cuda", "docker", "docker.io/nvidia/cuda", "", "nvidia+cuda"),
        ("docker://nvcr.io#nvidia/pytorch:24.06-py3", "docker", "nvcr.io/nvidia/pytorch:24.06-py3", "",
         "nvidia+pytorch+24.06-py3"),
        ("docker://nvcr.io/nvidia/pytorch:24.06-py3", "docker", "nvcr.io/nvidia/pytorch:24.06-py3", "",
         "nvidia+pytorch+24.06-py3"),
        ("docker://$oauthtoken@nvcr.io#nvidia/x", "docker", "nvcr.io/nvidia/x", "$oauthtoken", "nvidia+x"),
        ("docker://me@ghcr.io/a/b:1", "docker", "ghcr.io/a/b:1", "me", "a+b+1"),
        ("docker://localhost:5000#a:1", "docker", "localhost:5000/a:1", "", "a+1"),
        ("docker://127.0.0.1:5000/a", "docker", "127.0.0.1:5000/a", "", "a"),
        ("docker://harbor#team/img:1", "docker", "harbor/team/img:1", "", "team+img+1"),
        ("docker://team/img:1", "docker", "docker.io/team/img:1", "", "team+img+1"),
        ("docker://ghcr.io#a/b@sha256:00", "docker", "ghcr.io/a/b@sha256:00", "", "a+b"),
    ],
)  # fmt: skip
def test_the_forms(text: str, scheme: str, reference: str, user: str, name: str) -> None:
    source = parse_source(text, Path("/"))
    assert (source.scheme, source.reference, source.user, source.name) == (scheme, reference, user, name)


@pytest.mark.parametrize(
    "name", ["harbor/team/img:1", "docker.io/library/ubuntu:24.04", f"ghcr.io/a/b@sha256:{'0' * 64}"]
)
def test_a_reference_stays_what_it_is_as_the_text_of_a_source(name: str) -> None:
    """Also a registry without a dot, which looks like a folder of Docker Hub without the `#`."""
    reference = registry_reference(name)
    source = parse_source(f"docker://{replace(reference, user='me').with_hash}", Path("/"))
    assert (source.reference, source.user) == (name, "me")
    assert registry_reference(source.reference) == reference


def test_layouts_and_archives_are_paths(tmp_path: Path) -> None:
    (tmp_path / "lay:out").mkdir()
    (tmp_path / "dir").mkdir()
    (tmp_path / "a.oci.tar").write_text("")
    assert parse_source("oci:dir:v1", tmp_path) == Source("oci", f"{tmp_path}/dir", "v1")
    assert parse_source("oci:dir:v1", tmp_path).name == "dir+v1"
    whole = parse_source("oci:lay:out:docker.io/a/b:1", tmp_path)
    assert (whole, whole.name) == (Source("oci", f"{tmp_path}/lay:out", "docker.io/a/b:1"), "lay+out+docker.io+a+b+1")
    assert parse_source("oci:lay:out", tmp_path) == Source("oci", f"{tmp_path}/lay:out")
    assert parse_source("oci-archive:a.oci.tar", tmp_path).name == "a"
    assert parse_source("oci-archive:a.oci.tar:v1", tmp_path) == Source("oci-archive", f"{tmp_path}/a.oci.tar", "v1")
    assert parse_source("docker-archive:./a.oci.tar", tmp_path).reference == f"{tmp_path}/a.oci.tar"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://x/y", "http:// is not supported"),
        ("oci:absent", "does not exist"),
        ("docker-archive:dir", "a file"),
        ("oci:file", "the folder"),
        ("docker://", "//IMAGE"),
        ("podman://", "//IMAGE"),
        ("docker://nvcr.io#", "name is missing"),
    ],
)
def test_other_forms_are_refused_with_the_known_ones(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunnerError) as caught:
        parse_source(text, tmp_path)
    assert words in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "registry"),
    [("docker://nvcr.io#a/b:1", "nvcr.io"), ("docker://harbor#a/b:1", "harbor"), ("docker://ubuntu", "docker.io"),
     ("podman://localhost/a", "localhost"),
     ("a/b:1", ""), ("docker://localhost:5000/a@sha256:00", "localhost:5000"), ("oci:/x.y/z", ""), ("docker://", "")],
)  # fmt: skip
def test_the_registry_of_a_recorded_source(text: str, registry: str) -> None:
    assert registry_of(text) == registry
