"""What an engine adds to a step so that its command runs inside an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attachment:
    """The step is `srun *flags *prefix COMMAND`, with `exports` exported before it and `files` in the run folder.

    In flags, prefix and exports, the shell of the batch script expands `${NAME}` when it runs.
    `$${NAME}` is the literal text `${NAME}`; every other character is literal. There are no defaults (`${NAME:-x}`).
    """

    files: Mapping[str, str] = field(default_factory=dict)
    """path relative to the run folder -> text"""
    flags: tuple[str, ...] = ()
    """flags of srun"""
    prefix: tuple[str, ...] = ()
    """words in front of the command"""
    exports: Mapping[str, str] = field(default_factory=dict)
    """exported on the host, before the step"""
    notes: tuple[str, ...] = ()
    """warnings for stderr, one line each"""
