"""The ways from an OCI layout to a squashfs file that the bench compares, each as one function."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.importing import enroot, layout

QUIET = ("-no-progress", "-quiet", "-noappend")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setting:
    """Where a way works: the image and its twin (another last layer), a folder it may fill, emptied for each run."""

    image: Path
    twin: Path
    scratch: Path
    cache: Path  # enroot's layer cache
    previous: Path  # our own file of the image, which an import of the twin may copy from

    def output(self, name: str) -> Path:
        """Where the way writes its squashfs file."""
        return self.scratch / f"{name}.sqsh"


@dataclass(frozen=True)
class Way:
    """One way; `prepare` is what it may find done already, not measured."""

    title: str
    run: Callable[[Setting], Path]
    prepare: Callable[[Setting], object] = lambda setting: None


def _enroot(setting: Setting) -> Path:
    shutil.rmtree(setting.cache, ignore_errors=True)
    return _enroot_cached(setting)


def _enroot_cached(setting: Setting, options: tuple[str, ...] = enroot.DEFAULTS, name: str = "enroot") -> Path:
    layers = layout.layers_of(setting.image)
    return enroot.import_layers(layers, setting.cache, setting.scratch / "enroot", setting.output(name), options)


def _enroot_twin(setting: Setting) -> Path:
    """The usual second import: all layers but the last are in enroot's cache."""
    layers = layout.layers_of(setting.twin)
    (setting.cache / layers[-1].name).unlink(missing_ok=True)
    return enroot.import_layers(layers, setting.cache, setting.scratch / "enroot", setting.output("enroot-twin"))


def fill_cache(setting: Setting) -> None:
    """Put the image's layers into enroot's cache."""
    for blob in layout.layers_of(setting.image):
        setting.cache.mkdir(parents=True, exist_ok=True)
        enroot.into_cache(blob, setting.cache)


def _enroot_zstd(setting: Setting) -> Path:
    shutil.rmtree(setting.cache, ignore_errors=True)
    return _enroot_cached(setting, enroot.ZSTD, "enroot-zstd")


def _umoci(setting: Setting) -> Path:
    bundle, target = setting.scratch / "bundle", setting.output("umoci")
    subprocess.run(("umoci", "unpack", "--image", f"{setting.image}:latest", str(bundle)), check=True)
    pack = ("mksquashfs", str(bundle / "rootfs"), str(target), "-all-root", *QUIET, *enroot.ZSTD, *_processors())
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    return target


def _processors() -> tuple[str, str]:
    return "-processors", str(len(os.sched_getaffinity(0)))


def _tar2sqfs(setting: Setting) -> Path:
    target = setting.output("tar2sqfs")
    read = (sys.executable, "-m", "bench.importing.tars", *map(str, layout.layers_of(setting.image)))
    pack = (
        "tar2sqfs",
        "--compressor",
        "zstd",
        "--comp-extra",
        "level=1",
        "-j",
        _processors()[1],
        "-q",
        "-f",
        str(target),
    )
    with subprocess.Popen(read, stdout=subprocess.PIPE, cwd=ROOT) as merged:
        subprocess.run(pack, stdin=merged.stdout, check=True)
    if merged.returncode != 0:
        raise SystemExit(f"the merge ended with {merged.returncode}")
    return target


def ours(image: Path, target: Path, *words: str) -> Path:
    """`runner import` of an OCI layout into a file of its own."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(target.parent / "cache"), "RUNNER_SITE": "local"}
    argv = (sys.executable, "-m", "runner", "import", f"oci:{image}", "-o", str(target), *words)
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return target


def _ours(setting: Setting) -> Path:
    return ours(setting.image, setting.output("ours"))


def _ours_digest(setting: Setting) -> Path:
    return ours(setting.image, setting.output("ours-digest"), "--verify", "digest")


def _ours_zstd(setting: Setting) -> Path:
    return ours(setting.image, setting.output("ours-zstd"), "--verify", "digest", "--compression", "zstd:1")


def _previous(setting: Setting) -> None:
    """Our file of the image and the files beside it, where the import of the twin will look for them."""
    if not setting.previous.exists():
        setting.previous.parent.mkdir(parents=True, exist_ok=True)
        ours(setting.image, setting.previous)
    for path in setting.previous.parent.iterdir():
        if path.is_file():
            subprocess.run(("cp", "--reflink=never", "-p", str(path), str(setting.scratch)), check=True)
    # as in the image folder, the older file stays: freeing 2 GB is not part of an import, nor of the copy beside it
    os.link(setting.scratch / setting.previous.name, setting.scratch / "older.sqsh")


def _ours_twin(setting: Setting) -> Path:
    return ours(setting.twin, setting.scratch / setting.previous.name)


def _copy(setting: Setting) -> Path:
    target = setting.output("copy")
    subprocess.run(("cp", "--reflink=never", str(setting.previous), str(target)), check=True)
    return target


WAYS = {
    "enroot": Way("enroot's algorithm, its default options (`-comp lzo -noD`)", _enroot),
    "enroot-cached": Way("the same, layers already in its cache", _enroot_cached, fill_cache),
    "enroot-twin": Way("the same, only the last layer not in its cache", _enroot_twin, fill_cache),
    "enroot-zstd": Way("enroot's algorithm with `-comp zstd -Xcompression-level 1`", _enroot_zstd),
    "umoci": Way("umoci unpack, then mksquashfs zstd 1", _umoci),
    "tar2sqfs": Way("layers merged to one tar, piped into tar2sqfs zstd 1", _tar2sqfs),
    "ours": Way("**`runner import`**", _ours),
    "ours-digest": Way("**`runner import --verify digest`**, which checks what enroot checks", _ours_digest),
    "ours-zstd": Way("the same with `--compression zstd:1`", _ours_zstd),
    "ours-twin": Way("**`runner import`, only the last layer changed**", _ours_twin, _previous),
    # prepared as the import: memory that was just freed is found sooner than other
    "copy": Way("`cp --reflink=never` of our file, and fsync", _copy, _previous),
}
