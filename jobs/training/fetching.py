"""One file over HTTP, complete or not at all; the next transfer continues where a killed one stopped.

huggingface_hub (2.4) gives each process a new partial file, so a killed transfer starts from the beginning. This needs
nothing but Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from training import files
from training.errors import JobError

CHUNK_BYTES = 1 << 20
STALL_SECONDS = 60.0
# A partial file without a lock that was not written to for so long has no owner. The lock alone is not enough: on some
# file systems flock always succeeds.
QUIET_SECONDS = 5.0
SHA256_LETTERS = 64
OURS = os.urandom(4).hex()  # in the names of this process' partial files


def fetch(url: str, headers: Mapping[str, str], target: Path, size_bytes: int, etag: str) -> None:
    """Make `target` of what `url` gives. Raises OSError where the connection breaks, JobError for other content.

    The hub's etag of a large file is its SHA-256: it is then checked.
    """
    partial = _take_partial(target)
    with partial.open("ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.tell() > size_bytes:
            file.truncate(0)
        if file.tell() < size_bytes:
            _transfer(url, headers, file)
        file.flush()
        os.fsync(file.fileno())
        if file.tell() != size_bytes or not _is_digest_right(partial, etag):
            partial.unlink()
            found = f"{file.tell():,} bytes of other content" if file.tell() == size_bytes else f"{file.tell():,} bytes"
            why = f"{found} came, {size_bytes:,} were announced"
            raise JobError(f"{url.split('?')[0]} is not what the hub lists", why, "try again")
        partial.replace(target)
    files.sync_folder(target.parent)


def _transfer(url: str, headers: Mapping[str, str], file: IO[bytes]) -> None:
    """Append what is missing; a server that begins at the beginning is taken at its word."""
    start = file.tell()
    asked = {**headers, "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    request = urllib.request.Request(url, headers=asked)
    with urllib.request.urlopen(request, timeout=STALL_SECONDS, context=_certificates(url)) as answer:
        if start and answer.status != 206:
            file.seek(0)
            file.truncate(0)
        expected = file.tell() + int(answer.headers["Content-Length"] or 0)
        while chunk := answer.read1(CHUNK_BYTES):
            file.write(chunk)
            file.flush()
        # urllib takes an answer that ends early for the whole one
        if file.tell() < expected:
            raise ConnectionError(f"{expected - file.tell():,} bytes of {url.split('?')[0]} did not come")


def _take_partial(target: Path) -> Path:
    """Return the name of our own partial file: that of a transfer which has ended, or a new one."""
    own = target.with_name(f"{target.name}.{OURS}.part")
    if own.exists():
        return own
    left = [path for path in target.parent.glob(f"{target.name}.*.part") if _is_abandoned(path)]
    for path in sorted(left, key=lambda path: path.stat().st_size, reverse=True):
        with contextlib.suppress(OSError):  # another one was quicker
            path.rename(own)
            break
    return own


def _is_abandoned(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - path.stat().st_mtime > QUIET_SECONDS
    except OSError:
        return False


def _is_digest_right(path: Path, etag: str) -> bool:
    if len(etag) != SHA256_LETTERS or not all(letter in "0123456789abcdef" for letter in etag):
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == etag


def _certificates(url: str) -> Any:
    """Return a context with the certificates that the user names, else certifi's where it is, else the system's."""
    if not url.startswith("https:"):
        return None
    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if not named:
        with contextlib.suppress(ImportError):
            import certifi

            named = certifi.where()
    return ssl.create_default_context(cafile=named)
