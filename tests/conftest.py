"""Fixtures on real parts: a private Slurm, squashfs images made without the product."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import make_busybox_squashfs
from tests.lab.slurm import PLUGINS, SlurmLab


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A private Slurm cluster of three nodes with `--environment` and `--container-*`."""
    with SlurmLab(plugins=PLUGINS) as lab:
        yield lab


@pytest.fixture(scope="session")
def busybox_sqsh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny image as squashfs with enroot's metadata: GREETING in its environment, /work as workdir."""
    return make_busybox_squashfs(tmp_path_factory.mktemp("images") / "busybox.sqsh")
