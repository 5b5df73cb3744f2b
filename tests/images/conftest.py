"""Fixtures of the tests of build and import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.images.bench import Bench, clean_environ
from tests.lab.podman import Podman


@pytest.fixture
def bench(tmp_path: Path, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A project of its own on the lab's podman; this process's environment is the bench's."""
    made = Bench(tmp_path, clean_environ(podman.environ))
    for name in os.environ.keys() - made.environ.keys():
        monkeypatch.delenv(name)
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    made.environ = os.environ  # type: ignore[assignment]
    return made
