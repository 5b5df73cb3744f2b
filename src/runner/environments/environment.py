"""What a container sees, as one frozen noun. An EDF file is its only source format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.expansion import expand
from runner.site import Origin

__all__ = ["Environment", "Mount", "expand"]


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host (or, with the flag `sqsh`, what is in a squashfs file) at a path inside."""

    source: str
    target: str
    flags: tuple[str, ...] = ()

    def text(self, separator: str = "+") -> str:
        """`SOURCE:TARGET[:FLAGS]`; flags join with `+` for the Container Engine, `,` for Sarus Suite and podman."""
        return ":".join((self.source, self.target, *((separator.join(self.flags),) if self.flags else ())))


@dataclass(frozen=True)
class Environment:
    """A merged EDF. `${VAR}` stays literal in every field: only an engine, or `expand`, puts values in."""

    name: str
    path: Path | None
    """the EDF file; None for an environment made in code"""
    image: str
    """a squashfs path, `[USER@][REGISTRY#]IMAGE[:TAG]`, or empty: no container is entered"""
    workdir: str | None = None
    """None: the image's own"""
    entrypoint: bool = False
    """whether the image's entrypoint runs in front of the command"""
    writable: bool = True
    """whether the root file system takes writes, which are lost at the end"""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """wins over the image's variables, which win over the host's; an empty value unsets"""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """parameters of the engine's hooks, by dotted name"""
    devices: tuple[str, ...] = ()
    """Sarus Suite's: values of podman's --device"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """where each value came from: "image", "mounts.0", "env.NAME", "annotations.com.hooks.x" """
