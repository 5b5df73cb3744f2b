"""A Sarus Suite site of the lab: the stand-in of `sarusctl` on PATH, its store and its configuration."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from runner.machine import probe

STANDIN = Path(__file__).with_name("sarusctl.py")
# a superblock of squashfs 4.0 that states its own length, which is all that an image needs to count as whole
WHOLE = b"hsqs" + bytes(24) + b"\4\0\0\0" + bytes(8) + (96).to_bytes(8, "little") + bytes(48)
SITE = """\
name = "sarus-lab"
summary = "a site of the lab with Sarus Suite"
[sources.lab]
title = "the lab"
date = "2026-11-27"
[values]
scheduler = {{ value = "{scheduler}", source = "lab" }}
engine = {{ value = "sarus", source = "lab" }}
architecture = {{ value = "{architecture}", source = "lab" }}
image_folder = {{ value = "{folder}/images", source = "lab" }}
run_folder = {{ value = "{folder}/runs", source = "lab" }}
"""


@dataclass(frozen=True)
class Sarus:
    """The site: `folder` has bin/, store/, images/, runs/ and the log of the calls."""

    folder: Path

    def __post_init__(self) -> None:
        for name in ("bin", "images", "runs", "etc"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "bin/sarusctl").symlink_to(STANDIN)
        # Source: sarus-suite/raster@20f75bd, test/config
        (self.folder / "etc/50-site.conf").write_text('parallax_imagestore = "${LAB_SARUS}/store"\n')

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def environ(self) -> dict[str, str]:
        """Variables that put the stand-in first on PATH and select the site."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {"LAB_SARUS": str(self.folder), "PATH": path, "RUNNER_SITE": "sarus-lab"}

    def write_site(self, home: Path, scheduler: str = "slurm", more: str = "") -> None:
        """Write the site file, with `more` values, into the home folder of a user."""
        sites = home / ".config/runner/sites"
        sites.mkdir(parents=True, exist_ok=True)
        text = SITE.format(folder=self.folder, scheduler=scheduler, architecture=probe.architecture())
        (sites / "sarus-lab.toml").write_text(text + more)

    def add(self, name: str, source_id: str = "1" * 64, data: bytes | None = WHOLE) -> None:
        """Put an image into the store as if it had been migrated; with `data` None only half of it."""
        before = os.environ.get("LAB_SARUS")
        os.environ["LAB_SARUS"] = str(self.folder)
        try:
            spec = importlib.util.spec_from_file_location("lab_sarusctl", STANDIN)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.add(name, source_id, "2 weeks ago", data)
        finally:
            os.environ.pop("LAB_SARUS") if before is None else os.environ.update(LAB_SARUS=before)

    def calls(self) -> list[str]:
        """The calls of sarusctl that changed something, in order."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line != "images"]
