"""What is asked for: one container, described by an EDF, by pyxis' flags, or by both."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

BIND_FLAGS = ("ro", "rw", "private", "rprivate", "shared", "rshared", "slave", "rslave", "nosuid", "nodev", "noexec")
FLAGS = frozenset((*BIND_FLAGS, "bind", "rbind", "sqsh"))  # sqsh: mount a squashfs file; the Container Engine alone


class Refusal(Exception):
    """The request is refused; the text tells the user why."""


@dataclass(frozen=True)
class Mount:
    """SOURCE:TARGET[:FLAGS]; the source is a path, `tmpfs` or `umount`."""

    source: str
    target: str
    flags: tuple[str, ...] = ()

    @property
    def read_only(self) -> bool:
        return "ro" in self.flags


@dataclass(frozen=True)
class Request:
    """Everything the holder needs to know; None stands for what was not said."""

    image: str = ""
    workdir: str = ""
    writable: bool | None = None
    entrypoint: bool | None = None
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # beats the image's; "" unsets
    keep_env: frozenset[str] = frozenset()  # names whose host value beats the image's
    mount_home: bool | None = None
    remap_root: bool | None = None
    name: str = ""
    name_mode: str = "auto"
    save: str = ""
    host_env: bool = True  # whether the container's first program sees the job's variables
    remap_torch: bool = True  # RANK and LOCAL_RANK from Slurm where the image has PYTORCH_VERSION

    def but(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[arg-type]


def parse_mount(text: str, what: str, source_only: bool = True) -> Mount:
    """The mount that `SRC[:DST[:FLAG+FLAG]]` means."""
    source, *rest = text.split(":")
    if len(rest) > 2:
        raise Refusal(f"{what}: invalid format: {text}")
    target = rest[0] if rest else source if source_only else ""
    flags = tuple(rest[1].split("+")) if len(rest) == 2 else ()
    if not source or not target or "" in flags:
        raise Refusal(f"{what}: invalid format (an empty field): {text}")
    unknown = [flag for flag in flags if flag not in FLAGS]
    if unknown:
        raise Refusal(f"{what}: unknown mount flag {unknown[0]!r} in {text}")
    return Mount(source, target, flags)


def check_image(image: str, what: str) -> str:
    """The image, when it is a path; a path begins with `.` or `/`, all else names an image of a registry."""
    if not image.startswith((".", "/")):
        hint = "; a squashfs file must be given as an absolute path or as ./FILE" if image.endswith(".sqsh") else ""
        raise Refusal(f"{what}: {image} names an image of a registry, and the lab does not pull{hint}")
    return image
