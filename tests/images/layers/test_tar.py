"""Entries of tar streams as GNU tar, Python's tarfile and others write them; what is damaged is refused."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.layers.tar import Entry, entries

ZEROS = bytes(1024)


def read(data: bytes) -> list[tuple[Entry, bytes]]:
    return [(entry, content.read()) for entry, content in entries(io.BytesIO(data))]


def header(
    name: bytes,
    kind: bytes = b"0",
    size: int = 0,
    *,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    rest: bytes = b"",
) -> bytes:
    """A header as POSIX lays it out; `rest` is what stands behind the device numbers."""
    fields = [name, b"0000644\0", b"0001750\0", b"0001750\0", b"%011o\0" % size, b"14000000000\0", b" " * 8, kind, link]
    widths = [100, 8, 8, 8, 12, 12, 8, 1, 100]
    plain = b"".join(field.ljust(width, b"\0") for field, width in zip(fields, widths, strict=True)) + magic
    plain = plain.ljust(345, b"\0") + rest
    return sealed(plain.ljust(512, b"\0"))


def sealed(block: bytes) -> bytes:
    blank = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(blank) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    data = b""
    for key, value in records:
        length = len(key) + len(value) + 3
        while len(b"%d" % length) + len(key) + len(value) + 3 != length:
            length += 1
        data += b"%d %s=%s\n" % (length, key, value)
    return header(b"PaxHeaders/x", kind, len(data)) + padded(data)


def sparse(pieces: bytes, size: int, *, stored: int) -> bytes:
    records = (b"GNU.sparse.map", pieces), (b"GNU.sparse.size", b"%d" % size)
    return pax(*records) + header(b"a", size=stored) + padded(b"x" * stored)


def one(data: bytes) -> Entry:
    ((entry, _),) = read(data + ZEROS)
    return entry


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_writes_comes_back(form: int) -> None:
    long, deep = "n" * 200, "/".join(["directory"] * 30)
    made = [
        ("./etc/", tarfile.DIRTYPE, "", b""),
        ("etc/passwd", tarfile.REGTYPE, "", b"root" * 1000),
        (long, tarfile.REGTYPE, "", b"x"),
        (deep, tarfile.SYMTYPE, "/absolute/" + "t" * 150, b""),
        ("etc/ä\n", tarfile.LNKTYPE, "./etc/" + long, b""),
        ("pipe", tarfile.FIFOTYPE, "", b""),
        ("disk", tarfile.BLKTYPE, "", b""),
    ]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, kind, link, data in made:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(data), 0o4751
            entry.mtime, entry.uid, entry.gid, entry.devmajor, entry.devminor = 1700000000, 3000000, 5, 8, 1
            archive.addfile(entry, io.BytesIO(data))
    found = read(out.getvalue())
    assert [entry.path.decode() for entry, _ in found] == ["etc", "etc/passwd", long, deep, "etc/ä\n", "pipe", "disk"]
    assert [data for _, data in found] == [data for *_, data in made]
    kinds = [stat.S_IFMT(entry.mode) for entry, _ in found]
    assert kinds == [stat.S_IFDIR, stat.S_IFREG, stat.S_IFREG, stat.S_IFLNK, 0, stat.S_IFIFO, stat.S_IFBLK]
    assert found[3][0].target.decode() == "/absolute/" + "t" * 150, "a symlink's target is left as it is"
    assert found[4][0].hard_link and found[4][0].target.decode() == "etc/" + long
    assert found[6][0].device == (8, 1)
    assert {(entry.uid, entry.gid, entry.mtime) for entry, _ in found} == {(3000000, 5, 1700000000)}
    assert found[1][0].mode == stat.S_IFREG | 0o4751


def test_contents_are_read_in_pieces_or_skipped() -> None:
    first, second = os.urandom(3_000_000), b"second"
    data = b"".join(header(name, size=len(text)) + padded(text) for name, text in ((b"a", first), (b"b", second)))
    source = entries(io.BytesIO(data + ZEROS))
    _, content = next(source)
    assert content.read(5) + content.read(0) + content.read(1_000_000) == first[:1_000_005]
    _, content = next(source)
    assert [content.read(4), content.read(4), content.read(4)] == [b"seco", b"nd", b""]
    assert list(source) == []


@pytest.mark.parametrize(
    "options", [["--format=gnu"], *(["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))]
)
@pytest.mark.parametrize("pieces", [1, 60])
def test_sparse_files_of_gnu_tar(tmp_path: Path, options: list[str], pieces: int) -> None:
    """60 pieces need more than the map in the header. The file behind one still comes right."""
    file = tmp_path / "sparse"
    with file.open("wb") as stream:
        for number in range(pieces):
            stream.seek(number * 100_000 + 50_000)
            stream.write(b"%d" % number * 2000)
        stream.truncate(pieces * 100_000 + 70_001)
    (tmp_path / "next").write_bytes(b"behind it")
    argv = ["tar", "--create", "--sparse", "--hole-detection=raw", *options, "--file=-", "sparse", "next"]
    data = subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True).stdout
    assert len(data) < file.stat().st_size
    found = read(data)
    assert [(entry.path, entry.size) for entry, _ in found] == [(b"sparse", file.stat().st_size), (b"next", 9)]
    assert found[0][1] == file.read_bytes() and found[1][1] == b"behind it"
    in_pieces = (
        b"".join(iter(lambda: content.read(777), b"")) if (content := next(entries(io.BytesIO(data)))[1]) else b""
    )
    assert in_pieces == file.read_bytes()


def test_xattrs_of_gnu_tar(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    os.setxattr(file, "user.binary", b"\0\n=\xff" * 100)
    os.setxattr(file, "user.a", b"1")
    argv = ["tar", "--create", "--xattrs", "--file=-", "file"]
    entry = read(subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True).stdout)[0][0]
    assert entry.xattrs == ((b"user.a", b"1"), (b"user.binary", b"\0\n=\xff" * 100))


def test_pax_records_say_what_the_header_cannot() -> None:
    entry = one(
        pax((b"path", b"./long"), (b"uid", b"4000000000"), (b"gid", b"7"), (b"mtime", b"-1.5"), (b"comment", b"x"))
        + header(b"short")
    )
    assert (entry.path, entry.uid, entry.gid, entry.mtime) == (b"long", 4000000000, 7, -2)
    assert one(pax((b"mtime", b"12.999")) + header(b"a")).mtime == 12
    assert one(pax((b"path", b"b"), (b"path", b"")) + header(b"a")).path == b"a", "an empty value takes it back"


def test_pax_size_is_what_counts() -> None:
    big = pax((b"size", b"5")) + header(b"a") + padded(b"12345") + header(b"b")
    assert [(entry.path, data) for entry, data in read(big + ZEROS)] == [(b"a", b"12345"), (b"b", b"")]


def test_sizes_beyond_8_gib_and_other_numbers_in_base_256() -> None:
    block = bytearray(header(b"a"))
    block[124:136] = b"\x80" + (9 << 30).to_bytes(11, "big")
    block[108:116] = b"\xff" * 7 + b"\xfe"
    entry, _ = next(entries(io.BytesIO(sealed(bytes(block)))))
    assert (entry.size, entry.uid) == (9 << 30, -2)


def test_global_headers_volume_labels_and_unknown_types() -> None:
    data = pax((b"path", b"everything"), kind=b"g") + header(b"label", b"V") + header(b"a", b"Z", 3) + padded(b"abc")
    ((entry, content),) = read(data + ZEROS)
    assert (entry.path, content, stat.S_ISREG(entry.mode)) == (b"a", b"abc", True)


def test_old_headers() -> None:
    v7 = header(b"folder/", b"\0", magic=b"") + header(b"file", b"\0", 2, magic=b"") + padded(b"ab")
    assert [(entry.path, stat.S_IFMT(entry.mode)) for entry, _ in read(v7 + ZEROS)] == [
        (b"folder", stat.S_IFDIR),
        (b"file", stat.S_IFREG),
    ]
    assert one(header(b"name", rest=b"the/prefix")).path == b"the/prefix/name"
    star = b"star/prefix".ljust(131, b"\0") + b"14000000000 14000000000 ".ljust(32, b"\0") + b"tar\0"
    assert one(header(b"name", rest=star)).path == b"star/prefix/name"
    gnu = header(b"name", magic=b"ustar  \0", rest=b"14000000000\0")
    assert one(gnu).path == b"name", "GNU keeps times where others have the prefix"
    contiguous = one(header(b"a", b"7"))
    assert stat.S_ISREG(contiguous.mode)


def test_a_checksum_may_be_of_signed_bytes() -> None:
    block = header("ä".encode())
    blank = block[:148] + b" " * 8 + block[156:]
    total = sum(byte - 256 if byte > 127 else byte for byte in blank)
    assert one(block[:148] + b"%06o\0 " % total + block[156:]).path == "ä".encode()


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 512, b"x" * 1500])
def test_a_hard_link_may_carry_a_content_or_only_say_a_size(content: bytes) -> None:
    link = header(b"b", b"1", len(content) or 700, link=b"/./a") + padded(content)
    found = read(link + header(b"c", size=1) + padded(b"1") + ZEROS)
    assert [(entry.path, entry.size) for entry, _ in found] == [(b"b", 0), (b"c", 1)]
    assert found[0][0].target == b"a" and found[1][1] == b"1"
    assert len(read(link)) == len(read(link + ZEROS)) == 1


@pytest.mark.parametrize("kind", list(b"23456"))
def test_what_has_no_content_has_none_whatever_its_size(kind: int) -> None:
    data = header(b"a", bytes([kind]), 5000, link=b"x") + header(b"b") + ZEROS
    assert [entry.path for entry, _ in read(data)] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (b"./a", b"a"),
        (b"/a//b/./c/", b"a/b/c"),
        (b"./", b""),
        (b"..a/b..", b"..a/b.."),
        (b"a/.b", b"a/.b"),
        (b".", b""),
    ],
)
def test_names_are_made_plain(name: bytes, path: bytes) -> None:
    assert one(header(name)).path == path


@pytest.mark.parametrize("name", [b"../a", b"a/../b", b"a/..", b"..", b"/../a"])
def test_names_that_leave_the_root_are_refused(name: bytes) -> None:
    for data in (header(name), header(b"a", b"1", link=name), pax((b"path", name)) + header(b"a")):
        with pytest.raises(RunnerError, match="not a valid tar stream"):
            read(data + ZEROS)


LIMITS = {
    "NUL in a name": pax((b"path", b"a\0b")) + header(b"a"),
    "NUL in a target": pax((b"linkpath", b"a\0b")) + header(b"a", b"2"),
    "symlink to nothing": header(b"a", b"2"),
    "long symlink": pax((b"linkpath", b"x" * 4096)) + header(b"a", b"2"),
    "name of 256 bytes": pax((b"path", b"x" * 256)) + header(b"a"),
    "path of 4096 bytes": pax((b"path", b"x/" * 2050)) + header(b"a"),
    "PAX header over 1 MiB": pax((b"comment", b"x" * (1 << 20))) + header(b"a"),
    "xattrs over 64 KiB": pax(*((b"SCHILY.xattr.user.%d" % n, b"x" * 1000) for n in range(66))) + header(b"a"),
    "xattr with a long name": pax((b"SCHILY.xattr." + b"x" * 260, b"1")) + header(b"a"),
    "long name over 64 KiB": header(b"././@LongLink", b"L", 70_000) + padded(b"a/" * 35_000) + header(b"a"),
    "huge PAX header": header(b"x", b"x", 8 << 30),
    "negative size": sealed(header(b"a")[:124] + b"\xff" * 12 + header(b"a")[136:]),
    "size is no number": sealed(header(b"a")[:124] + b"12x456789012" + header(b"a")[136:]),
    "bad checksum": header(b"a")[:148] + b"0000001\0" + header(b"a")[156:],
    "no header": os.urandom(512),
    "cut header": header(b"a")[:300],
    "cut content": header(b"a", size=600) + bytes(512),
    "description without an entry": pax((b"path", b"a")),
    "next volume": header(b"a", b"M"),
    "device too large": sealed(header(b"a", b"3")[:329] + b"0010000\0" + header(b"a", b"3")[337:]),
    "record without a length": header(b"x", b"x", 9) + padded(b"path=abc\n") + header(b"a"),
    "record too long": header(b"x", b"x", 9) + padded(b"99 path=a\n") + header(b"a"),
    "record of length 0": header(b"x", b"x", 9) + padded(b"0 path=a\n") + header(b"a"),
    "uid is no number": pax((b"uid", b"1_0")) + header(b"a"),
    "number of 5000 digits": pax((b"size", b"9" * 5000)) + header(b"a"),
    "sparse, odd map": pax((b"GNU.sparse.map", b"0,1,2"), (b"GNU.sparse.size", b"9")) + header(b"a"),
    "sparse, overlap": sparse(b"0,2,1,2", 9, stored=4),
    "sparse, too long": sparse(b"8,2", 9, stored=2),
    "sparse, less stored": sparse(b"0,2", 9, stored=1),
    "sparse, no size": pax((b"GNU.sparse.map", b"0,0")) + header(b"a"),
    "sparse, huge": pax((b"GNU.sparse.map", b"0,0"), (b"GNU.sparse.size", b"%d" % (1 << 40))) + header(b"a"),
    "sparse, out of order": pax((b"GNU.sparse.numbytes", b"1"), (b"GNU.sparse.offset", b"1")) + header(b"a"),
    "sparse 1.0, endless map": pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9"))
    + header(b"a", size=1024)
    + bytes(1024),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_damaged_or_too_large_is_refused(name: str) -> None:
    with pytest.raises(RunnerError, match="not a valid tar stream") as caught:
        read(LIMITS[name] + ZEROS if not name.startswith("cut") else LIMITS[name])
    assert caught.value.why and caught.value.fix


def test_gnu_s_long_name_wins_over_pax() -> None:
    data = header(b"././@LongLink", b"L", 4) + padded(b"gnu\0") + pax((b"path", b"pax")) + header(b"a")
    assert one(data).path == b"gnu"


def test_the_end_is_a_block_of_zeros_or_the_end_of_the_stream() -> None:
    assert read(b"") == read(ZEROS) == read(bytes(512) + b"anything") == []
    assert one(header(b"a")[:512]).path == b"a"
    assert [entry.path for entry, _ in read(header(b"a"))] == [b"a"]
