"""What docs/environment.md promises about the inside of a container, computed from an Environment alone."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.environments.environment import Environment
from runner.expansion import expand
from tests.environments.look import EXIT_CODE, Image, Seen

KEPT_OUT = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LANGUAGE", "LC_ALL")
"""variables of the host that do not enter; PATH is the image's"""


@dataclass(frozen=True)
class Promise:
    """What must be seen. What is not here is unspecified."""

    variables: Mapping[str, str]
    absent: frozenset[str]
    cwd: str
    argv: tuple[str, ...]
    stdin: str
    mounts: Mapping[str, tuple[bool, str | None]]
    """target -> (read-only?, the text of its `mark`)"""
    writable: bool
    nowhere: tuple[str, ...]
    """folders of the host that must not be there"""
    user: int
    """the user id inside; rootless podman maps the caller to root"""


def promised(
    environment: Environment,
    image: Image,
    host: Mapping[str, str],
    named: tuple[str, ...],
    start: Path,
    argv: tuple[str, ...],
    stdin: str,
    engine: str,
) -> Promise:
    """The promise for a merged environment. `host`: the caller's variables, of which `named` are looked at;
    `start`: the folder of the caller."""
    references = {name: value for name, value in host.items() if name not in (*KEPT_OUT, "PATH")}
    inside = {**references, **image.env}
    variables = {name: host[name] for name in named if name in references} | dict(image.env)
    if environment.entrypoint:
        variables["ENTRYPOINT_RAN"] = "yes"
    own = {name: expand(value, inside, name) for name, value in environment.env.items()}
    gone = {name for name, value in environment.env.items() if not value}
    silent = {
        name for name, value in own.items() if not value
    }  # gone, or empty because its references are: unspecified
    variables = {name: value for name, value in {**variables, **own}.items() if name not in silent}
    mounts = {}
    for mount in environment.mounts:
        source = Path(start, expand(mount.source, host, "mounts"))
        mark = source / "mark" if source.is_dir() else source
        text = mark.read_text() if mark.is_file() and "sqsh" not in mount.flags else None
        mounts[os.path.normpath(expand(mount.target, host, "mounts"))] = (mount.read_only, text)
    return Promise(
        variables=variables,
        absent=frozenset(gone | {name for name in KEPT_OUT if name not in own}),
        cwd=expand(environment.workdir, inside, "workdir") if environment.workdir else image.workdir,
        argv=argv,
        stdin=stdin,
        mounts=mounts,
        writable=environment.writable,
        nowhere=tuple(
            folder
            for folder in (host["HOME"], str(start))
            if not any(Path(folder).is_relative_to(target) for target in mounts)
            and not any(Path(target).is_relative_to(folder) for target in mounts)
        ),
        user=0 if engine == "podman" else os.geteuid(),
    )


def places(promise: Promise) -> tuple[str, ...]:
    """The paths that have to be looked at."""
    return ("/etc", "/tmp", *promise.mounts, *promise.nowhere)


def differences(promise: Promise, seen: Seen, *, container: bool = True) -> list[str]:
    """One line for each thing that is not as promised. Without a `container` only what a command gets is compared."""
    found = []

    def same(what: str, was: object, promised: object) -> None:
        if was != promised:
            found.append(f"{what}: promised {promised!r:.300}, was {was!r:.300}")

    same("exit code", seen.exit_code, EXIT_CODE)
    same("arguments", seen.argv, promise.argv)
    same("stdin", seen.stdin, promise.stdin)
    same("working directory", seen.cwd, promise.cwd)
    same("host name", seen.hostname, socket.gethostname())
    same("GPUs", seen.gpus, tuple(sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))))
    same("user", seen.uid, promise.user)
    for name, value in promise.variables.items():
        same(f"variable {name}", seen.environ.get(name), value)
    for name in promise.absent if container else ():
        same(f"variable {name}", seen.environ.get(name), None)
    if container:
        found += _file_system(promise, seen)
    return found


def _file_system(promise: Promise, seen: Seen) -> list[str]:
    found = []
    for target, (read_only, mark) in promise.mounts.items():
        place = seen.places[target]
        if target not in seen.mounts or place is None:
            found.append(f"mount {target}: is not there")
            continue
        if place["writable"] == read_only:
            found.append(f"mount {target}: promised {'ro' if read_only else 'rw'}, was {seen.mounts[target]} {place}")
        if mark is not None and place["mark"] != mark:
            found.append(f"mount {target}: promised {mark!r} in it, was {place}")
    etc, scratch = seen.places["/etc"], seen.places["/tmp"]
    if etc is None or etc["writable"] != promise.writable:
        found.append(f"writable: promised {promise.writable}, was {etc}")
    if "/tmp" not in promise.mounts and (scratch is None or not scratch["writable"]):
        found.append(f"/tmp: promised to take writes, was {scratch}")
    for folder in promise.nowhere:
        place = seen.places[folder]
        if place is not None and place["mark"] is not None:
            found.append(f"the host's {folder} is there")
    return found
