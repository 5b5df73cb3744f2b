"""The fields of a tar header and of its PAX records.

Sources: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header"; GNU tar 1.34 manual, appendix "Tar Internals".
"""

import functools

from isal import isal_zlib

from runner.errors import RunnerError

BLOCK = 512
LARGEST_PAX = 1 << 20
LARGEST_XATTRS = 1 << 16
LARGEST_LONG_NAME = 1 << 16
# Linux's limits (limits.h): squashfs readers and every engine refuse longer names
_LONGEST_NAME = 255
LONGEST_PATH = 4095
_XATTR = b"SCHILY.xattr."
# sum of a header whose 512 bytes are all 255: larger than adler32's modulus, see `is_header`
_LARGEST_SUM = BLOCK * 255
_ADLER = 65521
_ENDS = b"\0 "  # terminators of a number
_SPARSE_PAIR = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")


def shown(name: bytes) -> str:
    """A name in quotes, for messages."""
    return repr(name[:200].decode(errors="backslashreplace"))


def damaged(why: str) -> RunnerError:
    """The error for a layer with an invalid tar stream."""
    return RunnerError(
        "a layer of the image is not a valid tar stream", why, "pull or build the image again"
    )


def cut_off() -> RunnerError:
    """The error for a stream that ends within an entry."""
    return damaged("it ends in the middle of an entry")


def is_header(block: bytes) -> bool:
    """Whether the checksum of a 512-byte block is right, over unsigned bytes, or signed ones as in old tars.

    The low half of adler32 is 1 + the sum of the bytes modulo 65521: 50 times faster than sum() over the bytes.
    """
    stored, expected = _checksum(block[148:156])
    if isal_zlib.adler32(block) & 0xFFFF == expected:
        return True
    if stored < 0:
        return False
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:]) + 8 * 32
    return signed == stored


@functools.lru_cache(maxsize=4096)
def _checksum(field: bytes) -> tuple[int, int]:
    """A checksum, and the low half of adler32 of a block with that checksum over unsigned bytes; -1: invalid."""
    try:
        stored = int(field.rstrip(b" \0") or b"0", 8)
    except ValueError:
        return -1, -1
    right = (stored + (isal_zlib.adler32(field) & 0xFFFF) - 8 * 32) % _ADLER
    return stored, right if 0 < stored <= _LARGEST_SUM else -1


def number(field: bytes) -> int:
    """A number in octal, or in base 256 if the first bit is set. Raises RunnerError."""
    if field[-1] in _ENDS:
        try:
            return int(field[:-1], 8)  # nearly always: digits and a terminator
        except ValueError:
            pass
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise damaged(f"{shown(field)} in a tar header is not a number") from None


def decimal(text: bytes) -> int:
    """A PAX number, rounded down. Raises RunnerError."""
    whole, _, fraction = text.partition(b".")
    digits = whole.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 20 or (fraction and not fraction.isdigit()):
        raise damaged(f"{shown(text[:40])} in a PAX header is not a number")
    value = int(whole)
    return value - 1 if whole[:1] == b"-" and fraction.strip(b"0") else value


def normalised(name: bytes) -> bytes:
    """A path without "." components and without "/" at its ends. Raises RunnerError if it leaves the image."""
    # find(): `in` first tries its left side as a number and handles the error, which takes longer than the search
    if (
        name
        and name[0] not in b"./"
        and name.find(b"/.") < 0
        and name.find(b"//") < 0
        and len(name) < _LONGEST_NAME
    ):
        plain = name[:-1] if name[-1] == 0x2F else name
    else:
        parts = [part for part in name.split(b"/") if part and part != b"."]
        if b".." in parts:
            raise damaged(f"the path {shown(name[:200])} leads out of the image's root")
        plain = b"/".join(parts)
        if len(plain) > LONGEST_PATH or max(map(len, parts), default=0) > _LONGEST_NAME:
            raise damaged(f"the path {shown(name[:60])}... is longer than Linux allows")
    if plain.find(0) >= 0:
        raise damaged(f"the path contains NUL: {shown(plain[:200])}")
    return plain


def symlink_target(text: bytes) -> bytes:
    """The target of a symlink, unchanged. Raises RunnerError if Linux cannot hold it."""
    if not text or len(text) > LONGEST_PATH or b"\0" in text:
        raise damaged(f"{shown(text[:60])} ({len(text)} bytes) cannot be the target of a symlink")
    return text


def pax_records(data: bytes) -> dict[bytes, bytes]:
    """The records of a PAX header; the pairs of a sparse map of version 0.0 are joined as version 0.1 has them.

    An empty value resets the header's, so it is omitted. Raises RunnerError.
    """
    records: dict[bytes, bytes] = {}
    pairs: list[bytes] = []
    position, length = 0, len(data)
    while position < length:
        blank = data.find(b" ", position, position + 10)
        digits = data[position:blank] if blank >= 0 else b""
        if not digits.isdigit():
            if not data[position:].strip(b"\0"):
                break  # some writers pad with NUL
            raise damaged("a record of a PAX header has no length")
        end = position + int(digits)
        key, separator, value = data[blank + 1 : end - 1].partition(b"=")
        if end > length or data[end - 1 : end] != b"\n" or not separator or not key:
            raise damaged(
                f"a record of a PAX header is invalid: {shown(data[position : position + 40])}"
            )
        position = end
        if key in _SPARSE_PAIR:
            if (key == _SPARSE_PAIR[1]) != len(pairs) % 2:
                raise damaged("the pieces of a sparse file are out of order")
            pairs.append(value)
        elif value:
            records[key] = value
        else:
            records.pop(key, None)
    if pairs:
        records[b"GNU.sparse.map"] = b",".join(pairs)
    return records


def xattrs(records: dict[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """The extended attributes among PAX records, sorted by name. Raises RunnerError if Linux cannot hold them."""
    keys = [key for key in records if key.startswith(_XATTR)]
    if not keys:
        return ()
    found = sorted((key[len(_XATTR) :], records[key]) for key in keys)
    if sum(len(name) + len(value) for name, value in found) > LARGEST_XATTRS:
        raise damaged(f"an entry's extended attributes take more than {LARGEST_XATTRS >> 10} KiB")
    for name, _ in found:
        if not name or len(name) > _LONGEST_NAME or b"\0" in name:
            raise damaged(f"{shown(name[:60])} cannot be the name of an extended attribute")
    return tuple(found)
