"""What an image is: its processor, CUDA, base. From its sidecar where there is one, else from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from runner.images.squashfs_file import find_squashfs

_RELEASE = re.compile(r"pytorch[^/\s]*?[:+_-](\d\d)\.(\d\d)(?!\d)")
_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "amd64": "amd64", "x86_64": "amd64", "x86-64": "amd64"}


@dataclass(frozen=True)
class ImageFacts:
    """None and False: not known."""

    architecture: str | None
    """in OCI's words"""
    cuda: int | None
    """major version"""
    rocm: bool
    ngc: tuple[int, int] | None
    """release of NVIDIA's PyTorch image that it is, or stands on: year and month"""
    extended: bool
    """an Alps extended image, which has its own network stack"""
    nvidia: bool
    """made for NVIDIA's GPUs"""


def facts_of(image: str, path: Path | None) -> ImageFacts:
    """What is known of an image by its text in the EDF and, where it is a file of ours, by its sidecar."""
    squashfs = find_squashfs(path) if path is not None else None
    words = [image]
    if squashfs is not None:
        words += [squashfs.source, *squashfs.labels.values()]
    text = "\n".join(words).lower()
    ngc = next(((int(year), int(month)) for year, month in _RELEASE.findall(text) if 0 < int(month) < 13), None)
    return ImageFacts(
        architecture=squashfs.architecture if squashfs is not None else _architecture(image),
        cuda=_cuda(text, ngc),
        rocm="rocm" in text,
        ngc=ngc,
        extended=bool(re.search(r"alps-images/|alps-extended-images|-alps\d+\b", text)),
        nvidia=ngc is not None or bool(re.search(r"nvcr\.io|nvidia|\bngc|cuda", text)),
    )


def _architecture(image: str) -> str | None:
    name = image.rpartition("/")[2]
    found = re.search(r"(?<![a-z0-9])(aarch64|arm64|amd64|x86[_-]64)(?![a-z0-9])", name)
    return _ARCHITECTURES[found[1]] if found else None


def _cuda(text: str, ngc: tuple[int, int] | None) -> int | None:
    """The major version of CUDA that a name tells, or that NVIDIA's release has.

    Source: release notes of NVIDIA's PyTorch container: 25.06 is the last with CUDA 12, 25.08 has 13.0 (2026-11-21).
    """
    named = re.search(r"(?:cuda|\bcu)[-_:/]?(1[1-9])(?:[\d.]*)(?![a-z])", text)
    if named:
        return int(named[1])
    if ngc is None or not (24, 5) <= ngc < (40, 0) or ngc == (25, 7):
        return None
    return 12 if ngc <= (25, 6) else 13
