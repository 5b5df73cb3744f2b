"""A trace's files are in one region of the squashfs, in order, and every reader sees the same tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.importer import hot
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.machine.report import Quiet
from runner.project import Project
from tests.images import trees
from tests.images.handmade import file, folder, hard_link, layout, symlink, tar
from tests.images.test_incremental import BASE, MIDDLE, TOP, Shop, noise

BLOCK = 131072
LARGE = noise(11, 40 * BLOCK + 5)
UPPER = [
    folder("bin"),
    file("bin/program", noise(12, 3 * BLOCK + 1)),
    symlink("bin/link", "program"),
    hard_link("bin/other", "bin/program"),
    hard_link("late", "share/199"),
    file("large", LARGE),
    file("empty", b""),
    file("holes", bytes(2 * BLOCK)),
    file("odd\nname", b"odd\n"),
    file("compressible", b"text " * 100_000),
]
LAYERS = (BASE, MIDDLE, TOP, UPPER)
HOT = [f"share/{number:03}" for number in range(199, 0, -7)]
"""small files, in another order than in their layer"""
FEW = f"0-100,{20 * BLOCK}-{21 * BLOCK + 1}"  # of `large`
TRACE = "".join(
    f"{line}\n"
    for line in (
        *("/bin/program", "/bin/other", "/bin/link", "/bin", "/empty", "/holes", "/lib/holes", "/not/there"),
        *(f"0-3000 /{name}" for name in HOT),
        *(f"{FEW} /large", "0-700000 /lib/large", "/lib/again", "/late", "/compressible", "/etc/environment"),
    )
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "start.trace"
    path.write_text(TRACE)
    return path


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def listed(image: Path) -> list[tuple[int, int]]:
    """What the end of the file lists: offset and length of each region."""
    lines = image.read_bytes()[-hot.LIST_SIZE :].rstrip(b"\0").decode().splitlines()
    return [(int(offset), int(length)) for word, offset, length in map(str.split, lines) if word == "hot"]


@pytest.mark.uses("unsquashfs", "squashfuse", "/dev/fuse", "tar2sqfs")
@pytest.mark.parametrize("compression", ["lz4", "zstd:1", "gzip:1", "xz:0", "none"])
def test_every_reader_sees_the_same_tree(compression: str, shop: Shop, trace: Path) -> None:
    plain = shop.bring(*LAYERS, compression=compression).squashfs.path
    made = shop.bring(*LAYERS, compression=compression, trace=trace)
    readers = [*trees.READERS] if compression == "lz4" else ["unsquashfs"]
    if os.geteuid() != 0 and "kernel" in readers:
        readers.remove("kernel")  # only root mounts
    for name in readers:
        read = trees.READERS[name]
        expected, found = (read(image, shop.folder / image.stem / name) for image in (plain, made.squashfs.path))
        assert trees.differences(expected, found) == [], name
        assert len(found) > 200
    # one of two names of a file is enough; a folder, a symlink and what is not there are no files
    assert made.packed.traced == len(HOT) + 9 and made.packed.layers_reused == len(LAYERS)


@pytest.mark.uses("unsquashfs", "squashfuse", "/dev/fuse")
def test_a_start_reads_only_the_superblock_and_what_is_listed(shop: Shop, trace: Path) -> None:
    """With noise in place of everything else, the files of the trace can still be read."""
    image = shop.bring(*LAYERS, trace=trace).squashfs.path
    data = bytearray(image.read_bytes())
    region, *others = listed(image)
    assert sum(region) == len(data) - hot.LIST_SIZE
    assert 3 * BLOCK <= sum(length for _, length in others) <= 4 * BLOCK  # of `large`, in two places
    cold = bytearray(noise(13, len(data)))
    for offset, length in ((0, 200), region, *others):
        cold[offset : offset + length] = data[offset : offset + length]
    image.write_bytes(cold)
    whole = {**{name: noise(int(name[-3:]), 3000) for name in HOT}, "lib/large": noise(1, 700_000)}
    whole |= {"bin/program": noise(12, 3 * BLOCK + 1), "lib/again": b"small\n", "compressible": b"text " * 100_000}
    with trees.mounted(image, shop.folder / "mount", "squashfuse") as mount:
        for name, content in whole.items():
            assert (mount / name).read_bytes() == content, name
        with (mount / "large").open("rb", buffering=0) as large:
            assert os.pread(large.fileno(), 100, 0) == LARGE[:100]
            assert os.pread(large.fileno(), BLOCK, 20 * BLOCK) == LARGE[20 * BLOCK : 21 * BLOCK]
    # small files, in the order of the trace, then large ones
    places = [data.find(noise(int(name[-3:]), 3000), region[0]) for name in HOT]
    assert places == sorted(places)
    assert places[-1] < data.rfind(noise(12, 1000)) < data.rfind(noise(1, 1000))


def test_the_same_image_and_trace_give_the_same_bytes(shop: Shop, trace: Path) -> None:
    """With other threads, and from the layers of an earlier file, with or without a trace of its own."""
    plain = shop.bring(*LAYERS).squashfs
    fresh = shop.anew(*LAYERS, trace=trace, threads=1)
    copied = shop.bring(*LAYERS, trace=trace)
    assert copied.packed.layers_reused == len(LAYERS) and copied.squashfs.path.read_bytes() == fresh
    assert shop.bring(*LAYERS, trace=trace, again=True).squashfs.path.read_bytes() == fresh
    plain.path.unlink()
    more = [file("more", b"more\n")]
    grown = shop.bring(*LAYERS, more, trace=trace)
    assert grown.packed.layers_reused == len(LAYERS)
    assert grown.squashfs.path.read_bytes() == shop.anew(*LAYERS, more, trace=trace)
    assert shop.bring(*LAYERS).squashfs.content == plain.content != copied.squashfs.content
    trace.write_text(TRACE.replace("/bin/program\n", ""))
    assert shop.bring(*LAYERS, trace=trace).squashfs.content not in (plain.content, copied.squashfs.content)


@pytest.mark.parametrize("labels", [{"runner.recipe": "my_own"}, {"runner.recipe": "../containers/my_own"}, {}])
def test_the_trace_beside_the_recipe_is_used(labels: dict[str, str], tmp_path: Path, trace: Path) -> None:
    """If the image was built from the recipe; a path is not a name."""
    (tmp_path / "containers").mkdir()
    trace.rename(tmp_path / "containers/my_own.trace")
    image = layout(tmp_path / "image", [tar(layer) for layer in LAYERS], {"Labels": labels})
    project = Project(tmp_path, tmp_path / "shipped", tmp_path)
    made = import_image(ImportRequest(f"oci:{image}", tmp_path / "images", project, {}, ImportOptions()), Quiet())
    assert (made.packed.traced > 0) == (labels.get("runner.recipe") == "my_own") == ("trace" in made.squashfs.settings)


@pytest.mark.parametrize("text", ["lib/large\n", "0-1\n", "0- /a\n", "1-2,/a\n", "/a\n\n/b\n", ""])
def test_an_invalid_line_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(RunnerError, match=r"bad\.trace:\d is not a line of a trace"):
        hot.read_trace(path)
    with pytest.raises(RunnerError, match="nowhere"):
        hot.read_trace(tmp_path / "nowhere")


def test_a_list_of_many_places_fits(shop: Shop, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest places are joined; none is left out."""
    monkeypatch.setattr(hot, "LIST_SIZE", 256)
    far = noise(14, 200 * BLOCK)
    read = [count * (count + 1) // 2 * BLOCK for count in range(19)]
    trace.write_text(",".join(f"{at}-{at + 1}" for at in read) + " /far\n")
    image = shop.bring([file("far", far)], trace=trace, compression="none").squashfs.path
    _, *others = listed(image)
    offset = image.read_bytes().find(far[:4096])
    assert 4 < len(others) < 12
    for at in read:
        assert any(first <= offset + at < first + length for first, length in others), at


def test_the_recorded_traces_belong_to_recipes() -> None:
    containers = Path(__file__).parents[2] / "containers"
    traces = sorted(containers.glob("*.trace"))
    assert containers / "cpu.trace" in traces
    for path in traces:
        assert path.with_suffix(".toml").is_file() and len(hot.read_trace(path)) > 1000


LOG = rb"""unique: 20, opcode: OPEN (14), nodeid: 9, insize: 48, pid: 17534
open flags: 0x8000 /usr/bin/python3.11
   open[94625409983952] flags: 0x8000 /usr/bin/python3.11
   unique: 20, success, outsize: 32
unique: 22, opcode: READ (15), nodeid: 9, insize: 80, pid: 17534
read[94625409983952] 131072 bytes from 0 flags: 0x8000
   read[94625409983952] 4096 bytes from 0
   unique: 22, success, outsize: 4112
   read[94625409983952] 131072 bytes from 4194304
   read[94625409983952] 4096 bytes from 131072
   open[94625409983953] flags: 0x8000 /a b
   read[94625409983953] 10 bytes from 0
   open[94625409983952] flags: 0x8000 /never read
   read[94625409983952] 0 bytes from 0
   read[7] 10 bytes from 0
   open[94625409983952] flags: 0x8000 /usr/bin/python3.11
   read[94625409983952] 10 bytes from 8388608
"""


def test_the_trace_of_a_log(tmp_path: Path) -> None:
    """Files in the order of their first read; handles are used again; near ranges are one."""
    log, target = tmp_path / "log", tmp_path / "x.trace"
    log.write_bytes(LOG)
    assert hot.write_trace(target, log) == 2 and not log.exists()
    expected = b"0-135168,4194304-4325376,8388608-8388618 /usr/bin/python3.11\n0-10 /a b\n"
    assert target.read_bytes() == expected
    assert list(hot.read_trace(target)) == [b"usr/bin/python3.11", b"a b"]
    with pytest.raises(RunnerError, match="there is no record of what the command reads"):
        hot.write_trace(target, log)
    assert target.read_bytes() == expected
