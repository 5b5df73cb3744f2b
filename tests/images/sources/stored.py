"""What a storage of podman gives, against what podman says: `python -m tests.images.sources.stored` as any user."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runner.images.layers.layer import LayeredImage
from runner.images.reference import Source
from runner.machine import probe
from runner.machine.report import Quiet
from tests.images.handmade import diff_ids, make_tar, open_source, plain_digests, write_docker_archive
from tests.lab.podman import Podman

HANDMADE = "localhost/handmade:1"
BUILT = "localhost/built:1"
CONTAINERFILE = """\
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin
RUN mkdir -p /data/inner && echo one > /data/one && ln /data/one /data/two && cp /bin/busybox /data/copy
RUN rm /data/one /bin/cat && rm -r /data/inner && mkdir /data/inner && chmod 000 /data/copy && mkfifo /data/fifo
ENTRYPOINT ["/bin/sh"]
"""


def handmade_layers() -> list[bytes]:
    """Two layers with all that could go wrong: links to folders, odd names, whiteouts, bytes behind the end."""
    noise = random.Random(3).randbytes(300_000)
    low = {
        "real/": None, "link": "real", "link/file": noise[:100_000], "real/ü": b"1", "n\udcffx": b"raw",
        "d/" * 60 + "long": b"2", "big": noise, "folder/": None, "folder/file": noise[:5000], "empty": b"",
    }  # fmt: skip
    high = {".wh.big": b"", "real/.wh..wh..opq": b"", "./dot": b"5", "/absolute": b"3", "a/../b": b"33", "b.": b"4"}
    return [make_tar(low) + b"\0" * 3000 + b"behind the end", make_tar(high, tarfile.GNU_FORMAT)]


def load_handmade(podman: Podman) -> str:
    """Put the image of these layers into podman's storage; its name."""
    path = write_docker_archive(podman.folder / "tmp/handmade.tar", handmade_layers(), compress=True)
    podman.run("load", "--quiet", "--input", str(path))
    return HANDMADE


def build(podman: Podman) -> str:
    """Build an image with removed, replaced and linked files; its name."""
    context = podman.folder / "tmp/context"
    context.mkdir(exist_ok=True)
    shutil.copy("/bin/busybox", context / "busybox")
    (context / "Containerfile").write_text(CONTAINERFILE)
    podman.run("build", "--quiet", "--tag", BUILT, str(context))
    return BUILT


@contextmanager
def opened(podman: Podman, name: str, report: Quiet | None = None) -> Iterator[LayeredImage]:
    """An image in a podman's storage."""
    source = Source("podman", name)
    with open_source(source, podman.environ, probe.architecture(), report) as image:
        yield image


def report(podman: Podman, name: str) -> dict[str, Any]:
    """What reading an image gives, and what podman says about it."""
    told = json.loads(podman.run("image", "inspect", name).stdout)[0]
    quiet = Quiet()
    with opened(podman, name, quiet) as image:
        notes = [line for line in quiet.lines if "as one layer" in line]
        listed = podman.run("ps", "--all", "--quiet", "--filter=name=runner-import", check=False)
        return {
            "id": image.id, "podman's id": told["Id"], "digest": image.digest, "podman's digest": told["Digest"],
            "entrypoint": image.config.get("Entrypoint"), "notes": notes,
            "diff_ids": diff_ids(image), "read": plain_digests(image), "podman's layers": told["RootFS"]["Layers"],
            "size": image.size_bytes, "left": listed.stdout + listed.stderr,
        }  # fmt: skip


def main() -> None:
    with Podman() as podman:
        driver = podman.run("info", "--format={{.Store.GraphDriverName}}").stdout.strip()
        found = {name: report(podman, name) for name in (load_handmade(podman), build(podman))}
        json.dump({"driver": driver, "images": found}, sys.stdout)


if __name__ == "__main__":
    main()
