"""Damaged index.json, manifests, configs and archives of an image that is otherwise right."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.images.layers.layer import Reader
from runner.images.reference import Source
from runner.images.sources.layout import read_layout
from tests.images.handmade import open_source
from tests.images.sources import mutations

ARCHITECTURE = "amd64"
_LARGEST = 3 << 20
_LAYER = mutations.tar(random.Random(1))
_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda choice: None,
    lambda choice: choice.choice((0, -1, 1 << 70, 1.5, float("nan"), True)),
    lambda choice: choice.choice(
        ("", "x", "../../etc/passwd", "sha256:" + "0" * 64, "\ud800", "a\0b", "sha256:/../..")
    ),
    lambda choice: [],
    lambda choice: {},
    lambda choice: [None] * choice.choice((1, 2_000)),
    lambda choice: {"x": [{}]},
)


class Held:
    """Files in memory, as a layout's folder has them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def has(self, name: str) -> bool:
        return name in self.files

    def size(self, name: str) -> int:
        return len(self._file(name))

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return io.BytesIO(self._file(name))

    def _file(self, name: str) -> bytes:
        if name not in self.files:
            raise RunnerError(f"there is no {name}", "it is not in the layout", "make it again")
        return self.files[name]


def damaged(value: Any, choice: random.Random) -> bytes:
    """The JSON text of a value with some of its parts replaced, or its bytes changed."""
    value = json.loads(json.dumps(value))
    for number in range(choice.randrange(0, 3)):
        _replace_somewhere(value, choice, many=number == 0)  # many of many would be this test's memory, not the tool's
    data = json.dumps(value).encode()
    if choice.random() < 0.3:
        data = mutations.damaged(data, choice, blocks=False)
    if choice.random() < 0.02:
        data = choice.choice((b"[", b'{"a":')) * 100_000
    return data[:_LARGEST]


def _replace_somewhere(value: Any, choice: random.Random, *, many: bool) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = choice.choice(keys)
        if not isinstance(value[key], (dict, list)) or choice.random() < 0.3:
            break
        value = value[key]
    way = choice.randrange(4)
    if way == 0:
        del value[key]
    elif way == 1 and isinstance(value, list):
        value.extend([value[key]] * choice.choice((1, 11_000 if many and len(json.dumps(value[key])) < 200 else 2)))
    else:
        value[key] = choice.choice(_VALUES)(choice)


def layout_case(choice: random.Random) -> dict[str, bytes]:
    """A layout in which one of config, manifest, inner index and index.json is damaged, with digests that are right."""
    victim = choice.randrange(4)
    held: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(value: Any, number: int, kind: str) -> dict[str, Any]:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        if number == victim:
            data = damaged(value, choice)
        digest = hashlib.sha256(data).hexdigest()
        held[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layer = blob(_LAYER, -1, "layer.v1.tar")
    settings = {"Env": ["PATH=/bin"], "Cmd": ["sh"], "Labels": {"a": "b"}, "Volumes": {"/data": {}}, "WorkingDir": "/w"}
    config = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        "history": [{"created_by": "x", "empty_layer": True}],
    }
    manifest = {"schemaVersion": 2, "config": blob(config, 0, "config.v1+json"), "layers": [layer]}
    described = blob(manifest, 1, "manifest.v1+json") | {"platform": {"architecture": ARCHITECTURE, "os": "linux"}}
    other = described | {"platform": {"architecture": "unknown", "os": "unknown"}}
    index = {"schemaVersion": 2, "manifests": [other, described]}
    named = blob(index, 2, "index.v1+json") | {"annotations": {"org.opencontainers.image.ref.name": "latest"}}
    top = {"schemaVersion": 2, "manifests": [choice.choice((named, described))]}
    held["index.json"] = damaged(top, choice) if victim == 3 else json.dumps(top).encode()
    names = [f"blobs/{one['digest'].replace(':', '/')}" for one in (manifest["config"], layer)]
    docker = [{"Config": names[0], "RepoTags": ["a:latest"], "Layers": names[1:]}]
    held["manifest.json"] = damaged(docker, choice) if choice.random() < 0.5 else json.dumps(docker).encode()
    return held


def archive_case(choice: random.Random) -> bytes:
    """A damaged tar of a layout, which is an oci-archive and a docker-archive at once."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in layout_case(choice).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return mutations.damaged(out.getvalue(), choice, blocks=True) if choice.random() < 0.5 else out.getvalue()


def layout_taken(case: dict[str, bytes]) -> bool:
    """Whether the layout is read as an image; anything but a RunnerError comes out."""
    try:
        image = read_layout(Held(case), "latest", architecture=ARCHITECTURE, reference="oci:fuzz")
        return all(_read(layer.open) for layer in image.layers)
    except RunnerError as error:
        assert error.what and error.why
        return False


def archive_taken(case: bytes) -> bool:
    """Whether the archive is read as an image, in both ways; anything but a RunnerError comes out."""
    with _file(case) as path:
        return any(
            [_archive_taken(Source(scheme, reference=str(path))) for scheme in ("oci-archive", "docker-archive")]
        )


def _archive_taken(source: Source) -> bool:
    try:
        with open_source(source) as image:
            return all(_read(layer.open) for layer in image.layers)
    except RunnerError as error:
        assert error.what and error.why
        return False


def _read(opened: Callable[[], AbstractContextManager[Reader]]) -> bool:
    with opened() as blob:
        while blob.read(1 << 20):
            pass
    return True


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile() as held:
        held.write(data)
        held.flush()
        yield Path(held.name)
