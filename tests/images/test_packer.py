"""The tar stream goes through entry by entry: nothing lost, enroot's files in place of the image's, /dev left out."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.squashfs.packer import compression_flags, pack
from tests.images.bench import content, listing

EXTRA = {"etc/rc": ("#!/bin/sh\n", 0o755), "etc/environment": ("A=b\n", 0o644)}
LONG = "/".join(["folder-with-a-rather-long-name"] * 6) + "/file"


def entry(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    found.size = len(data)
    for key, value in fields.items():
        setattr(found, key, value)
    return found, data


def stream(entries: list[tuple[tarfile.TarInfo, bytes]], form: int) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    out.seek(0)
    return out


ENTRIES = [
    entry("./", type=tarfile.DIRTYPE, mode=0o755),
    entry("etc/", type=tarfile.DIRTYPE, mode=0o750),
    entry("etc/rc", b"the image's own"),
    entry("etc/rc.d", b"stays"),
    entry("etc/environment/", type=tarfile.DIRTYPE, mode=0o755),
    entry("etc/environment/below", b"goes with its folder"),
    entry("dev/", type=tarfile.DIRTYPE, mode=0o755),
    entry("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    entry("devices", b"stays"),
    entry(".dockerenv", b""),
    entry(LONG, b"deep"),
    entry("umlaut-\u00e9-\U0001f600", b"x", mode=0o644),
    entry("large", os.urandom(3_000_001), mode=0o4755, uid=2_999_999, gid=3_000_000),
    entry("hard", type=tarfile.LNKTYPE, linkname="large"),
    entry("link", type=tarfile.SYMTYPE, linkname="/" + LONG),
    entry("capable", b"y", pax_headers={"SCHILY.xattr.user.note": "kept"}),
]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_every_entry_arrives_but_those_that_are_replaced(tmp_path: Path, form: int) -> None:
    target = tmp_path / "a.sqsh"
    counted: list[int] = []
    source = stream(ENTRIES, form)
    size = len(source.getvalue())
    pack(source, target, EXTRA, "zstd:1", counted.append)
    found = listing(target)
    assert set(found) >= {"etc/rc", "etc/rc.d", "etc/environment", "dev", "devices", LONG, "large", "hard", "link"}
    assert not {"dev/null", ".dockerenv", "etc/environment/below"} & set(found)
    assert content(target, "etc/rc") == "#!/bin/sh\n"
    assert found["etc/rc"].startswith("-rwxr-xr-x")
    assert found["etc"].startswith("drwxr-x---")
    assert found["large"].startswith("-rwsr-xr-x 2999999/3000000 3000001")
    assert found["link"].endswith("/" + LONG)
    assert found["hard"] == found["large"]
    assert any(name.startswith("umlaut-") for name in found)
    assert 0 < sum(counted) <= size


def test_the_same_stream_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(stream(ENTRIES, tarfile.PAX_FORMAT), tmp_path / name, EXTRA, "zstd:1", lambda count: None)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("cut", [100, 512, 1024, 5_000, 1_000_000])
def test_a_stream_that_breaks_off_is_an_error(tmp_path: Path, cut: int) -> None:
    data = stream(ENTRIES, tarfile.PAX_FORMAT).getvalue()
    boundary = io.BytesIO(data[: cut if cut not in (512, 1024) else len(data) - 10_240 - 700])
    with pytest.raises(RunnerError):
        pack(boundary, tmp_path / "a", EXTRA, "zstd:1", lambda count: None)


def test_what_is_no_tar_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunnerError):
        pack(io.BytesIO(b"no tar at all " * 1000), tmp_path / "a", EXTRA, "zstd:1", lambda count: None)


@pytest.mark.parametrize("compression", ["zstd", "zstd:3", "gzip:9", "lzo", "xz"])
def test_every_compressor_works(tmp_path: Path, compression: str) -> None:
    pack(stream(ENTRIES[:4], tarfile.PAX_FORMAT), tmp_path / "a", EXTRA, compression, lambda count: None)
    assert content(tmp_path / "a", "etc/rc.d") == "stays"


@pytest.mark.parametrize("compression", ["", "brotli", "lz4", "xz:3", "zstd:x", "zstd:1:2"])
def test_an_unknown_compressor_is_refused(compression: str) -> None:
    with pytest.raises(RunnerError, match="no compression"):
        compression_flags(compression)
