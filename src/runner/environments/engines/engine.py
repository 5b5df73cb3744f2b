"""An engine: its facts, and the function that turns an environment into what a step needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from runner.environments.engines.shared import MountSyntax
from runner.environments.environment import Attachment, Environment, emit_edf
from runner.site import Site


class WriteEdf(Protocol):
    """Writes an environment as an EDF in an engine's dialect; `sources` as for `emit_edf`."""

    def __call__(
        self, environment: Environment, comment: str, *, sources: str | None = None
    ) -> str: ...


@dataclass(frozen=True)
class DockerOptions:
    """What differs between the engines that are started as `NAME run`, with docker's options."""

    gpus: tuple[str, ...]
    """the option that passes all GPUs on"""
    read_only_tmp: bool
    """whether --read-only makes /tmp read-only too"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What runner knows about an engine. Other code asks for a fact, and never compares names.

    Each module of this folder that `ENGINES` lists makes one, called ENGINE.
    """

    name: str
    attach: Callable[[Environment, Site], Attachment]
    """what the engine adds to a step; raises Inexpressible for a field that it cannot express"""
    comment: str
    """the first line of the EDF in the run folder"""
    mounts: MountSyntax
    resolved_fields: tuple[str, ...] = ()
    """the fields in which runner expands `${VAR:-default}`, because the engine does not. A prefix
    is enough, so "" means all fields"""

    uses_container: bool = True
    """if not, the command runs on the node, and the image has no effect"""
    needs_image: bool = True
    """whether an environment without an image is a mistake"""
    starts_login_shell: bool = False
    """whether a login shell of the image starts the command, and may replace PATH"""

    srun_option: str = ""
    """the option of the engine's plug-in for srun, without `--`. Such an engine starts containers
    only in an allocation. Empty: it is a program of its own"""
    reads_edf: bool = False
    """whether the engine reads the EDF itself, with its mounts and annotations"""
    write_edf: WriteEdf = emit_edf
    reads_edf_leniently: bool = False
    """whether it accepts unknown keys, and annotations that are not text"""
    expands_bare_variables: bool = False
    """whether it reads `$NAME`, without braces, as a variable"""
    checks_edf: bool = False
    """whether `sarusctl validate` can check its EDF"""
    run_edf: tuple[str, ...] = ()
    """the command that runs an EDF outside Slurm; the path follows. Empty: there is none"""

    image_in_store: (
        Callable[[Environment, Site, Mapping[str, str]], tuple[Environment, tuple[str, ...]]] | None
    ) = None
    """(the environment with the image's name in the engine's own store, notes). None: the engine
    has no store, so `runner import` writes a squashfs file"""
    pulls_with: Literal["", "enroot", "podman"] = ""
    """whose logins the engine uses to pull images. Empty: it does not pull"""
    accepts_hash: bool = True
    """whether `#` may follow the registry in the name of an image, as in enroot"""

    programs: frozenset[str] = frozenset()
    """the programs that it needs on this machine"""
    has_command_line: bool = True
    """whether `env emit` can print an EDF or a script for it"""
    usage: str = "bash THIS_FILE COMMAND…"
    """how to use what `env emit` prints"""
    docker_options: DockerOptions | None = None
    """None: its command line is not docker's"""
    settings_file: str = ""
    """the file in the run folder that its command line names. Empty: it names none"""

    @property
    def has_store(self) -> bool:
        """Whether the engine runs images from its own store, and not from squashfs files."""
        return self.image_in_store is not None
