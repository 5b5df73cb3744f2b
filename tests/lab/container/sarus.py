"""Read an EDF as Sarus Suite does. A stand-in: it follows its user guide and sources, and is not Sarus Suite.

Source: CSCS documentation, container-engine/sarus-suite/user-guide.md (2026-08-20); sarus-suite/raster@20f75bd,
src/lib.rs, src/mount.rs, src/common.rs (shellexpand); sarus-suite/skybox@e8bd547, src/container.rs.
"""

import re
from collections.abc import Mapping
from typing import Any

from tests.lab.container.request import BIND_FLAGS, Mount, Refusal, Request

ANYWHERE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
FLAGS = frozenset((*BIND_FLAGS, "bind", "rbind"))


def request(table: Mapping[str, Any], environ: Mapping[str, str], image: str, lenient: bool) -> Request:
    """The container that an EDF asks for. srun expands its texts with the host's variables only. Raises Refusal.

    `image`: the squashfs file in the store; empty: missing, which is refused, because the lab does not pull.
    """
    reference = str(table.get("image", ""))
    if reference.startswith(("/", ".")) or reference.endswith(".sqsh") or "#" in reference or "$" in reference:
        raise Refusal(f"image: {reference} is not a registry reference")
    if not image:
        raise Refusal(f"image: {reference} is not in the store, and the lab does not pull")
    env = {name: expand(value, environ, f"env.{name}", lenient) for name, value in table.get("env", {}).items()}
    return Request(
        image=image,
        workdir=expand(table.get("workdir", ""), environ, "workdir", lenient),
        writable=table.get("writable", True),
        entrypoint=table.get("entrypoint", True),
        mounts=tuple(mount(text, environ, lenient) for text in table.get("mounts", [])),
        env={name: value for name, value in env.items() if value},  # an empty value does not unset the host's
        remap_torch=False,
        host_env=False,
    )


def mount(text: str, environ: Mapping[str, str], lenient: bool) -> Mount:
    """The mount that `SOURCE:TARGET[:FLAG,FLAG]` means: split at every colon, then expanded."""
    fields = text.split(":")
    if len(fields) not in (2, 3):
        raise Refusal(f"{text} contains {len(fields)} number of fields, expected 2 or 3")
    source, target = (expand(field, environ, "mounts", lenient) for field in fields[:2])
    flags = tuple(fields[2].split(",")) if len(fields) == 3 else ()
    if unknown := [flag for flag in flags if flag not in FLAGS]:
        raise Refusal(f"mounts: unknown mount flag {unknown[0]!r} in {text}")
    return Mount(source, target, flags)


def expand(text: str, variables: Mapping[str, str], where: str, lenient: bool) -> str:
    """The text with `$NAME`, `${NAME}` and `${NAME:-default}` filled in; `$$` is a dollar sign."""
    if any(word in text for word in ("$(", "`", ";", '"')):
        raise Refusal(f"{where}: cannot expand string {text}, invalid string")

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match[1] or match[3]
        if match[2] is not None:
            return variables.get(name) or match[2]
        if name in variables or (lenient and name.startswith("SLURM")):
            return variables.get(name, match[0])
        raise Refusal(f"{where}: cannot expand variable {name}, environment variable not found")

    return ANYWHERE.sub(value, text)
