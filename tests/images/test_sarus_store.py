"""Sarus Suite's store: what is built, pulled, listed and removed there; nothing is half-listed, no tag moves unnoticed.

`sarusctl` is a stand-in that follows the documentation (tests/lab/sarusctl.py); podman below it is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images import sarus_store
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.images.importer.sarus import explain, store_image
from runner.images.sarus_store import Row, Stored, find, name_in, parse_images
from runner.images.squashfs_file import is_whole
from tests.images.bench import TINY, Bench
from tests.lab.podman import Podman
from tests.lab.sarus import WHOLE, Sarus
from tests.schemas import check

# Source: CSCS documentation, container-engine/sarus-suite/user-guide.md (2026-08-20), "Querying Available Images"
GUIDE = """\
REPOSITORY                                                         TAG                                       IMAGE ID      CREATED        SIZE        R/O
docker.io/library/debian                                           trixie                                    94d8be26824c  2 weeks ago    146 MB      false
debian                                                             trixie                                    24fa35cacf16  2 weeks ago    3.49 kB     true
docker.io/library/debian                                           trixie                                    24fa35cacf16  2 weeks ago    3.49 kB     true
jfrog.svc.cscs.ch/ghcr/sarus-suite/containerfiles-ci/pyfr          2.1-ompi5.0.9-ofi1.22-cuda12.8.1          e45475209a1d  8 weeks ago    66.3 kB     true
jfrog.svc.cscs.ch/ghcr/sarus-suite/containerfiles-ci/megatron-lm   0.15.2-pt25.11                            e5b9e1e7a18e  8 weeks ago    136 kB      true
ubuntu                                                             24.04                                     917b79865e78  3 months ago   6.11 kB     true
docker.io/library/ubuntu                                           24.04                                     917b79865e78  3 months ago   6.11 kB     true
"""  # noqa: E501


def test_the_list_of_the_user_guide_is_read() -> None:
    rows = parse_images(GUIDE)
    assert len(rows) == 7
    assert rows[0] == Row("docker.io/library/debian", "trixie", "94d8be26824c", "2 weeks ago", "146 MB", False)
    assert [row.read_only for row in rows] == [False, True, True, True, True, True, True]


def test_a_list_without_an_image_of_the_store_has_no_column_for_it() -> None:
    lines = [
        "REPOSITORY  TAG     IMAGE ID      CREATED      SIZE",
        "<none>      <none>  94d8be26824c  2 weeks ago  146 MB",
    ]
    (row,) = parse_images("\n".join(lines))
    assert (row.tag, row.read_only) == ("<none>", False)
    assert parse_images("") == ()


@pytest.mark.parametrize("text", ["NAME  TAG\n", GUIDE.replace("2 weeks ago    146 MB", "")])
def test_another_list_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(RunnerError, match="cannot read the output of `sarusctl images`"):
        parse_images(text)


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("debian:trixie", "24fa35cacf16"),
        ("docker.io/library/debian:trixie", "24fa35cacf16"),
        ("docker://ubuntu:24.04", "917b79865e78"),
        ("jfrog.svc.cscs.ch#ghcr/sarus-suite/containerfiles-ci/megatron-lm:0.15.2-pt25.11", "e5b9e1e7a18e"),
        ("debian:13", None),
        ("quay.io/library/debian:trixie", None),
    ],
)
def test_an_image_is_found_by_its_short_and_its_full_name(reference: str, found: str | None) -> None:
    row = find(reference, parse_images(GUIDE))
    assert (row.id if row else None) == found


def test_a_local_image_is_found_without_its_registry() -> None:
    row = Row("localhost/mine", "1", "24fa35cacf16", "now", "1 kB", True)
    assert find("mine:1", [row]) == row and find("mine", [row]) is None


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("${RUNNER_IMAGES}/ngc-deepspeed.sqsh", "ngc-deepspeed"),
        ("${RUNNER_IMAGES:-/x}/a.sqsh", "a"),
        ("/images/a.sqsh", "a"),
        ("/other/a.sqsh", ""),
        ("${RUNNER_IMAGES}/a/b.sqsh", ""),
        ("${SCRATCH}/a.sqsh", ""),
        ("quay.io/a/b:1", ""),
    ],
)
def test_an_imported_image_is_known_by_its_name_in_the_image_folder(image: str, name: str) -> None:
    assert name_in(image, Path("/images")) == name


@pytest.fixture
def sarus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sarus:
    """A store, with its configuration in a folder of the test."""
    site = Sarus(tmp_path / "sarus")
    for name, value in site.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sarus_store, "CONFIGURATION", site.folder / "etc")
    return site


@pytest.fixture
def bench(tmp_path: Path, sarus: Sarus, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A project, the lab's podman, and the store."""
    for name, value in podman.environ.items():
        if name not in sarus.environ:
            monkeypatch.setenv(name, value)
    yield Bench(tmp_path, {**podman.environ, **sarus.environ})


def put(bench: Bench, source: str, **options: object) -> Stored:
    settings = ImportOptions(**options)  # type: ignore[arg-type]
    return store_image(ImportRequest(source, bench.images, bench.project, bench.environ, settings), bench.report)


def in_store(reference: str) -> bool:
    return find(reference, sarus_store.list_images()) is not None


def test_sarusctl_missing_says_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunnerError, match="sarusctl is not on PATH"):
        sarus_store.list_images()


def test_the_true_size_is_that_of_the_squashfs_file(sarus: Sarus) -> None:
    sarus.add("quay.io/a/b:1", data=WHOLE + bytes(5000))
    (row,) = (row for row in sarus_store.list_images() if row.read_only)
    file = sarus_store.squash_file(sarus_store.store_folder(sarus.environ), row)
    assert file is not None and file.stat().st_size == len(WHOLE) + 5000


def test_a_store_that_cannot_be_read_has_no_sizes(sarus: Sarus, monkeypatch: pytest.MonkeyPatch) -> None:
    sarus.add("quay.io/a/b:1")
    (row,) = (row for row in sarus_store.list_images() if row.read_only)
    monkeypatch.setattr(sarus_store, "CONFIGURATION", sarus.folder / "none")
    assert sarus_store.store_folder(sarus.environ) is None
    assert sarus_store.squash_file(None, row) is None and not sarus_store.is_half(row, None)


def test_a_recipe_is_migrated_under_the_tag_of_its_content_and_recorded(bench: Bench, sarus: Sarus) -> None:
    bench.write("one", TINY + "LABEL one=1\n")
    image = bench.build("one")
    stored = put(bench, "one")
    assert sarus.calls() == [f"migrate {image.reference}"]
    assert (stored.name, stored.reference, stored.image_digest) == ("one", image.reference, image.id)
    assert stored.id != image.id[:12] and stored.labels["runner.recipe"] == "one"
    assert sarus_store.read_record(bench.images, image.reference) == stored == sarus_store.newest(bench.images, "one")
    row = find(stored.reference, sarus_store.list_images())
    file = sarus_store.squash_file(sarus_store.store_folder(sarus.environ), row) if row else None
    assert file is not None and is_whole(file)
    assert put(bench, "one") == stored and len(sarus.calls()) == 1


def test_build_and_import_print_the_reference(bench: Bench, sarus: Sarus) -> None:
    sarus.write_site(Path(bench.environ["HOME"]))
    bench.write("cli", TINY + "LABEL cli=1\n")
    del bench.environ["RUNNER_IMAGES"]

    def runner(*words: str) -> str:
        child = bench.start(*words, "--site", "sarus-lab", env=sarus.environ)
        stdout, stderr = child.communicate(timeout=300)
        assert child.returncode == 0, stderr
        return stdout

    built = check("build", runner("build", "cli", "--import", "--json"))
    assert built["name"] == "cli" and sarus.calls() == [f"migrate {built['reference']}"]
    assert runner("import", "cli") == f"{built['reference']}\n"
    assert check("import", runner("import", "cli", "--json")) == built
    assert runner("import", "cli", "--dry-run") == "" and len(sarus.calls()) == 1


def test_an_image_of_a_registry_is_pulled(bench: Bench, sarus: Sarus, podman: Podman, busybox_image: str) -> None:
    name = f"{_address(podman)}/tools/pulled:1"
    podman.run("push", busybox_image, name)
    stored = put(bench, f"docker://{name}")
    assert sarus.calls() == [f"pull {name}"] and in_store(name)
    assert (stored.name, stored.digest[:7]) == ("tools+pulled+1", "sha256:")


def test_a_tag_that_moved_is_refused_until_it_is_forced(
    bench: Bench, sarus: Sarus, podman: Podman, busybox_image: str
) -> None:
    name = f"{_address(podman)}/tools/moved:1"
    podman.run("push", busybox_image, name)
    first = put(bench, f"docker://{name}")
    bench.write("other", TINY + "LABEL other=1\n")
    podman.run("push", bench.build("other").reference, name)
    with pytest.raises(RunnerError, match="has moved") as error:
        put(bench, f"docker://{name}")
    assert f"runner import --force docker://{name}" in error.value.fix
    second = put(bench, f"docker://{name}", again=True)
    assert second.id != first.id and f"rmi {name}" in sarus.calls()


def test_an_image_that_others_put_there_is_used_with_a_warning(bench: Bench, sarus: Sarus) -> None:
    bench.write("three", TINY + "LABEL three=1\n")
    bench.build("three", tag="localhost/mine:3")
    sarus.add("localhost/mine:3")
    stored = put(bench, "podman://localhost/mine:3")
    assert stored.image_digest == "" and sarus.calls() == []
    assert any("was already in the store" in line for line in bench.report.lines)


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("full", "there is no space left for the image"),
        ("middle", "sarusctl failed with exit code 137"),
        ("silent", "sarusctl did not put"),
    ],
)
def test_a_migration_that_fails_leaves_nothing_in_the_list(bench: Bench, sarus: Sarus, fail: str, words: str) -> None:
    bench.write("four", TINY + "LABEL four=1\n")
    image = bench.build("four")
    (sarus.folder / "fail").write_text(fail)
    with pytest.raises(RunnerError, match=words) as error:
        put(bench, "four")
    assert error.value.fix and not in_store(image.reference)
    assert sarus_store.list_records(bench.images) == []
    (sarus.folder / "fail").unlink()
    assert in_store(put(bench, "four").reference)


def test_what_a_killed_migration_left_is_replaced(bench: Bench, sarus: Sarus) -> None:
    bench.write("five", TINY + "LABEL five=1\n")
    reference = bench.build("five").reference
    sarus.add(reference, data=None)
    planned = explain(ImportRequest("five", bench.images, bench.project, bench.environ, ImportOptions()), bench.report)
    assert planned[1:] == (f"runs:   sarusctl rmi {reference}", f"runs:   sarusctl migrate {reference}")
    put(bench, "five")
    assert sarus.calls() == [f"rmi {reference}", f"migrate {reference}"]
    assert any("is incomplete in the store" in line for line in bench.report.lines)


@pytest.mark.parametrize(
    ("data", "again", "verbs"),
    [(WHOLE, False, ["pull"]), (WHOLE, True, ["rmi", "pull"]), (None, False, ["rmi", "pull"])],
)
def test_a_dry_run_tells_that_an_image_is_replaced(sarus: Sarus, tmp_path: Path, data, again, verbs) -> None:
    bench = Bench(tmp_path, sarus.environ)
    sarus.add("quay.io/a/b:1", data=data)
    options = ImportOptions(again=again)
    request = ImportRequest("docker://quay.io/a/b:1", bench.images, bench.project, bench.environ, options)
    lines = [f"runs:   sarusctl {verb} quay.io/a/b:1" for verb in verbs]
    assert explain(request, bench.report) == ("image:  quay.io/a/b:1", *lines) and sarus.calls() == []


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (
            "docker://me@quay.io#a/b:1",
            {},
            "(?s)cannot log in as me.*uses the login that `podman login` has saved",
        ),
        ("dockerd://a", {}, "sarusctl cannot take"),
        ("one", {"output": Path("x.sqsh")}, "-o FILE has no effect"),
    ],
)
def test_what_sarusctl_cannot_do_is_refused(sarus: Sarus, tmp_path: Path, source, options, words) -> None:
    bench = Bench(tmp_path, sarus.environ)
    with pytest.raises(RunnerError, match=words):
        put(bench, source, **options)


def test_records_are_listed_newest_first_and_damaged_ones_left_out(tmp_path: Path) -> None:
    first = Stored("a", "localhost/runner/a:1", "a", "1" * 12, "1" * 64, created=1.0)
    second = replace(first, reference="localhost/runner/a:2", created=2.0)
    for stored in (first, second):
        sarus_store.write_record(tmp_path, stored)
    (tmp_path / "x.stored.json").write_text("{")
    assert sarus_store.list_records(tmp_path) == [second, first]
    assert json.loads(json.dumps(second.record()))["created"].startswith("1970-01-01")


def _address(podman: Podman) -> str:
    return podman.insecure_registries[0]
