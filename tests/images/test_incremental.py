"""What an earlier import packed is copied, never read again; and the bytes are those of an import from nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.importer.importer import Imported, import_image
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.machine.report import Quiet
from runner.project import Project
from tests.images.handmade import Member, file, folder, hard_link, layout, opaque, symlink, tar, whiteout


def noise(seed: int, size: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


BASE = [
    folder("lib"),
    file("lib/large", noise(1, 700_000)),
    file("lib/small", b"small\n"),
    file("lib/holes", noise(2, 1000) + bytes(400_000) + noise(3, 1000)),
    hard_link("lib/again", "lib/small"),
    symlink("lib/link", "large"),
]
MIDDLE = [file(f"share/{number:03}", noise(number, 3000)) for number in range(200)]
TOP = [file("app", noise(5, 200_000))]


class Shop:
    """Imports layouts of three layers into one image folder, under one name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def bring(self, *layers: Sequence[Member], images: str = "images", **options: object) -> Imported:
        self.count += 1
        place = self.folder / f"{self.count}" / "image"
        place.parent.mkdir()
        layout(place, [tar(layer) for layer in layers])
        project = Project(self.folder, self.folder, self.folder)
        settings = ImportOptions(**options)  # type: ignore[arg-type]
        return import_image(ImportRequest(f"oci:{place}", self.folder / images, project, {}, settings), Quiet())

    def anew(self, *layers: Sequence[Member], **options: object) -> bytes:
        """The bytes of an import from nothing, elsewhere."""
        made = self.bring(*layers, images=f"elsewhere-{self.count}", **options)
        assert made.packed.layers_reused == 0
        return made.squashfs.path.read_bytes()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


CHANGES = {
    "another last layer": (BASE, MIDDLE, [file("app", noise(6, 210_000))]),
    "one layer more": (BASE, MIDDLE, TOP, [file("more", b"more\n")]),
    "the last layer gone": (BASE, MIDDLE),
    "another first layer": ([file("lib/other", b"other\n")], MIDDLE, TOP),
    "the same layer twice": (BASE, MIDDLE, MIDDLE, TOP),
    "layers in another order": (MIDDLE, BASE, TOP),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unchanged_layers_are_copied(change: str, shop: Shop) -> None:
    shop.bring(BASE, MIDDLE, TOP)
    layers = CHANGES[change]
    made = shop.bring(*layers)
    assert made.packed.layers_reused >= len({id(layer) for layer in layers} & {id(BASE), id(MIDDLE), id(TOP)})
    assert made.squashfs.path.read_bytes() == shop.anew(*layers)


HIDING = {
    "replaced": [file("lib/small", b"another\n")],
    "deleted": [whiteout("lib/large")],
    "emptied": [opaque("lib"), file("lib/new", b"new\n")],
    "a folder turned into a file": [file("lib", b"no folder\n")],
    "linked": [hard_link("kept", "lib/large"), whiteout("lib/large")],
}


@pytest.mark.parametrize("hiding", HIDING)
def test_a_layer_of_which_other_files_show_is_packed_anew(hiding: str, shop: Shop) -> None:
    shop.bring(BASE, MIDDLE, TOP)
    layers = (BASE, MIDDLE, HIDING[hiding])
    made = shop.bring(*layers)
    assert made.packed.layers_reused == 1 + (hiding == "linked")
    assert made.squashfs.path.read_bytes() == shop.anew(*layers)
    back = shop.bring(BASE, MIDDLE, TOP, again=True)
    assert back.squashfs.path.read_bytes() == shop.anew(BASE, MIDDLE, TOP)


def test_the_layers_that_are_copied_are_not_read(shop: Shop) -> None:
    shop.bring(BASE, MIDDLE, TOP)
    place = shop.folder / "gone/image"
    place.parent.mkdir()
    layout(place, [tar(layer) for layer in (BASE, MIDDLE, [file("app", b"new\n")])])
    sizes = {path: path.stat().st_size for path in (place / "blobs/sha256").iterdir()}
    largest = max(sizes, key=lambda path: sizes[path])
    largest.write_bytes(bytes(sizes[largest]))  # of the right size, and nothing but zeros
    project = Project(shop.folder, shop.folder, shop.folder)
    made = import_image(ImportRequest(f"oci:{place}", shop.folder / "images", project, {}), Quiet())
    assert made.packed.layers_reused == 2


@pytest.mark.parametrize("options", [{"compression": "zstd:3"}, {"compression": "gzip"}])
def test_another_compression_copies_nothing(options: dict[str, str], shop: Shop) -> None:
    shop.bring(BASE, MIDDLE, TOP)
    assert shop.bring(BASE, MIDDLE, TOP, **options).packed.layers_reused == 0


def test_owners_and_attributes_may_change_over_copied_contents(shop: Shop) -> None:
    layers = ([file("a", b"text\n", uid=7, gid=8)], MIDDLE)
    shop.bring(*layers)
    made = shop.bring(*layers, owners="keep")
    assert made.packed.layers_reused == 2
    assert made.squashfs.path.read_bytes() == shop.anew(*layers, owners="keep")


@pytest.mark.parametrize("harm", ["cut", "empty", "noise", "of another file", "gone"])
def test_a_spoilt_index_counts_as_none(harm: str, shop: Shop) -> None:
    first = shop.bring(BASE, MIDDLE, TOP).squashfs.path
    index = first.with_suffix(".layers")
    data = index.read_bytes()
    if harm == "cut":
        index.write_bytes(data[:-5])
    elif harm == "empty":
        index.write_bytes(b"")
    elif harm == "noise":
        index.write_bytes(noise(9, len(data) - 16) + data[-16:])
    elif harm == "of another file":
        first.write_bytes(b"hsqs" + bytes(8) + first.read_bytes()[12:])
    else:
        index.unlink()
    layers = (BASE, MIDDLE, [file("app", b"new\n")])
    made = shop.bring(*layers)
    assert made.packed.layers_reused == 0
    assert made.squashfs.path.read_bytes() == shop.anew(*layers)


@pytest.mark.parametrize("verify", ["all", "digest"])
def test_a_damaged_run_is_not_copied(verify: str, shop: Shop) -> None:
    """With `--verify all` every copied byte is checked: the layer is read again, the others are copied."""
    first = shop.bring(BASE, MIDDLE, TOP, verify=verify).squashfs.path
    with first.open("r+b") as stream:
        stream.seek(5000)  # in the run of the uppermost layer
        byte = stream.read(1)[0]
        stream.seek(5000)
        stream.write(bytes([byte ^ 1]))
    layers = ([file("new", b"new\n")], BASE, MIDDLE, TOP)
    made = shop.bring(*layers, verify=verify)
    whole = made.squashfs.path.read_bytes() == shop.anew(*layers)
    assert (made.packed.layers_reused, made.packed.layers_damaged, whole) == (
        (2, 1, True) if verify == "all" else (3, 0, False)
    )


def test_a_damaged_run_is_told(shop: Shop) -> None:
    first = shop.bring(BASE).squashfs.path
    data = bytearray(first.read_bytes())
    data[5000] ^= 1
    first.write_bytes(data)
    layout(shop.folder / "told/image", [tar(BASE), tar(TOP)])
    report = Quiet()
    project = Project(shop.folder, shop.folder, shop.folder)
    import_image(ImportRequest(f"oci:{shop.folder}/told/image", shop.folder / "images", project, {}), report)
    assert any(first.name in line and "is damaged" in line for line in report.lines)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_index_is_not_believed(place: float, shop: Shop) -> None:
    """One bit anywhere: the layer, or all of them, are read again."""
    first = shop.bring(BASE, MIDDLE, TOP).squashfs.path
    index = first.with_suffix(".layers")
    data = bytearray(index.read_bytes())
    data[int(len(data) * place)] ^= 16
    index.write_bytes(data)
    layers = (BASE, MIDDLE, [file("app", b"new\n")])
    made = shop.bring(*layers)
    assert made.packed.layers_reused < 2
    assert made.squashfs.path.read_bytes() == shop.anew(*layers)


def test_threads_and_time_decide_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = (shop.anew(BASE, MIDDLE, TOP, threads=count) for count in (1, 7))
    assert one == many
    monkeypatch.setenv(
        "SOURCE_DATE_EPOCH", "1000000000"
    )  # read from the environment given to the import, not from ours
    assert shop.anew(BASE, MIDDLE, TOP) == one


def test_source_date_epoch_limits_times(shop: Shop) -> None:
    place = shop.folder / "dated/image"
    place.parent.mkdir()
    layout(place, [tar([file("old", mtime=5), file("young", mtime=2_000_000_000)])])
    project = Project(shop.folder, shop.folder, shop.folder)
    environ = {"SOURCE_DATE_EPOCH": "1000000000"}
    made = import_image(ImportRequest(f"oci:{place}", shop.folder / "dated", project, environ), Quiet())
    data = made.squashfs.path.read_bytes()
    assert int.from_bytes(data[8:12], "little") == 1_000_000_000
    assert (2_000_000_000).to_bytes(4, "little") not in data[-8192:]
    assert (1_000_000_000).to_bytes(4, "little") in data[-8192:]


def test_a_diff_id_that_is_only_claimed_brings_no_other_images_contents(shop: Shop) -> None:
    """An image whose configuration lies about a layer must not lend its bytes to one that tells the truth."""
    place = shop.folder / "liar/image"
    place.parent.mkdir()
    true = tar([file("a", b"true\n")])
    layout(place, [tar([file("a", b"evil\n")])], diff_ids=[f"sha256:{hashlib.sha256(true).hexdigest()}"])
    project = Project(shop.folder, shop.folder, shop.folder)
    images = shop.folder / "images"
    with pytest.raises(RunnerError, match="damaged"):
        import_image(ImportRequest(f"oci:{place}", images, project, {}), Quiet())
    import_image(ImportRequest(f"oci:{place}", images, project, {}, ImportOptions(verify="digest")), Quiet())
    made = shop.bring([file("a", b"true\n")])
    assert made.packed.layers_reused == 0
    assert made.squashfs.path.read_bytes() == shop.anew([file("a", b"true\n")])
    again = import_image(
        ImportRequest(f"oci:{place}", images, project, {}, ImportOptions(verify="digest", owners="keep")), Quiet()
    )
    assert again.packed.layers_reused == 1


def test_another_version_of_the_compressor_copies_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older library has packed would not be the bytes that this one makes."""
    shop.bring(BASE, MIDDLE)
    monkeypatch.setattr("lz4.library_version_string", lambda: "1.8.0")
    assert shop.bring(BASE, MIDDLE, TOP).packed.layers_reused == 0
    monkeypatch.undo()
    assert shop.bring(BASE, MIDDLE, again=False).made is False
