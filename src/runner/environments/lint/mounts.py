"""Rules for mounts: their text in a file, sources, targets, the home folder, and writable folders."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from runner.environments.edf import Mount, parse_mount, split_fields
from runner.environments.engines import engine_of
from runner.environments.engines.shared import SEPARATOR_FIXES, MountSyntax
from runner.environments.lint.finding import Finding, Subject, finding
from runner.environments.rewriting import Set
from runner.errors import RunnerError, nearest
from runner.expansion import parts
from runner.located_toml import Document
from runner.machine import files

# folders with the image's own programs, which a mount would hide
_OF_THE_IMAGE = (
    {
        "/",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/usr",
        "/usr/bin",
        "/usr/sbin",
        "/usr/lib",
        "/usr/lib64",
    }
    | {
        "/usr/local",
        "/usr/local/bin",
        "/usr/local/lib",
        "/usr/local/cuda",
        "/opt/conda",
        "/opt/venv",
    }
    | {"/etc", "/proc", "/sys", "/dev"}
)
_HOMES = ("/users", "/home", "/user", "/u/home", "/nfs/home")
# folders that programs write to; the HOME of a toolkit, such as CUDA_HOME, is only read
_CACHE = re.compile(
    r"(^|_)(CACHE|CACHE_DIR|TMPDIR|TMP|TEMP|CACHE_HOME|CACHE_PATH)$"
    r"|^((HF|TORCH|TRITON|KERAS|XDG_[A-Z]+)_)?HOME$"
)


def missing_source(subject: Subject) -> Iterator[Finding]:
    """A source that is missing or cannot be reached, which makes the job fail.

    A compute node may have other folders than this machine. A relative source is not checked: the folder in which the
    job starts is not known.
    """
    if not subject.setting.here:
        return
    local = subject.setting.site.is_local
    for index, mount in enumerate(subject.environment.mounts):
        source = subject.expanded(mount.source, f"mounts.{index}")
        if source is None or not source.startswith("/") or files.exists(source):
            continue
        reason = f"{source} does not exist on this machine" + (
            "" if local else ", but may exist on compute nodes"
        )
        fix = ""
        if denied := files.why_denied(source):
            reason, fix = f"cannot reach {source}: {denied}", "ask the owner for access"
        severity = "error" if local else "warning"
        yield subject.say("mount-source-missing", f"mounts.{index}", reason, fix, severity)


def same_target(subject: Subject) -> Iterator[Finding]:
    """Two mounts with the same target: the engine uses one of them, or fails."""
    first: dict[str, tuple[int, Mount]] = {}
    for index, mount in enumerate(subject.own.mounts):
        target = str(PurePosixPath(mount.target))
        number, other = first.setdefault(target, (index, mount))
        if other is not mount:
            place = subject.place(f"mounts.{number}")
            reason = f"{other.source} is already mounted at {target} ({place})"
            yield subject.say("mount-target-twice", f"mounts.{index}", reason)


def dangerous_place(subject: Subject) -> Iterator[Finding]:
    """A relative source, a target that hides programs of the image, all home folders.

    Source: CSCS documentation, container-engine/edf.md (2026-08-20).
    """
    for index, mount in enumerate(subject.own.mounts):
        field = f"mounts.{index}"
        if mount.source.startswith("."):
            reason = (
                f"{mount.source!r} is relative to the folder in which the job starts "
                "(with runner launch: its run folder), not to the folder of the EDF"
            )
            yield subject.say("mount-relative", field, reason)
        hides = str(PurePosixPath(mount.target)) in _OF_THE_IMAGE
        if hides and subject.setting.engine_facts.uses_container:
            yield subject.say(
                "mount-hides-image", field, f"{mount.source} would hide {mount.target} of the image"
            )
        if str(PurePosixPath(mount.source)) in _HOMES:
            yield subject.say(
                "mount-all-homes", field, f"{mount.source} contains the home folders of all users"
            )


def home_shadows_image(subject: Subject) -> Iterator[Finding]:
    """A mounted home folder: Python searches ~/.local before the image."""
    environment = subject.environment
    if environment.env.get("PYTHONNOUSERSITE") or not subject.setting.engine_facts.uses_container:
        return
    home = subject.setting.environ.get("HOME", "") if subject.setting.here else ""
    for index, mount in enumerate(environment.mounts):
        source = subject.expanded(mount.source, f"mounts.{index}") or mount.source
        target = subject.expanded(mount.target, f"mounts.{index}") or mount.target
        folder = str(PurePosixPath(mount.source))
        of_home = folder in {"${HOME}", "${HOME}/.local", *_HOMES} or re.fullmatch(
            r"/(users|home)/\$\{USER\}", folder
        )
        if of_home or (home and source == target and PurePosixPath(home).is_relative_to(source)):
            reason = f"{mount.source} mounts the home folder: packages in ~/.local shadow the image's packages"
            changes = (Set(("env", "PYTHONNOUSERSITE"), "1"),)
            yield subject.say("home-shadows-image", f"mounts.{index}", reason, changes=changes)
            return


def read_only_folder(subject: Subject) -> Iterator[Finding]:
    """Variables that name a read-only folder: outside writable mounts, if the environment is read-only."""
    own = subject.own
    if own.workdir is not None:
        why = _read_only(subject, own.workdir)
        if why is None and not own.writable and not _mounted(subject, own.workdir):
            why = "writable = false"
        if why:
            reason = f"the working directory {own.workdir} is read-only: {why}"
            yield subject.say("read-only-folder", "workdir", reason)
    for name, value in own.env.items():
        if not _CACHE.search(name) or not value.startswith(("/", "${")):
            continue
        why = _read_only(subject, value)
        if why:
            reason = f"{name} = {value} is read-only: {why}"
            yield subject.say("read-only-folder", f"env.{name}", reason)


def _mounted(subject: Subject, path: str) -> Mount | None:
    """The deepest mount that contains a path."""
    around = [
        mount
        for mount in subject.environment.mounts
        if PurePosixPath(path).is_relative_to(mount.target)
    ]
    return max(around, key=lambda mount: len(mount.target), default=None)


def _read_only(subject: Subject, path: str) -> str | None:
    mount = _mounted(subject, path)
    return f"{mount.target} is mounted read-only" if mount is not None and mount.read_only else None


RULES = (missing_source, same_target, dangerous_place, home_shadows_image, read_only_folder)


def check_mounts(document: Document, engine: str) -> Iterator[Finding]:
    """The problems of each mount of a file, for an engine. Mounts without a target share one note."""
    mounts = document.data.get("mounts")
    if not isinstance(mounts, list):
        return
    syntax = engine_of(engine).mounts
    without_target: list[int] = []
    for index, text in enumerate(mounts):
        if not isinstance(text, str) or "\0" in text:
            continue  # the rules for types report it
        field, place = f"mounts.{index}", document.place("mounts", str(index))
        fields = split_fields(text)
        try:
            parse_mount(text)
        except RunnerError as error:
            if "cannot read the variable" not in error.what:  # reported by the rule for references
                accepted = syntax.accepts_relative_target and _relative_target_only(fields)
                severity = "warning" if accepted else ""
                reason, fix = f"{text!r}: {error.why}", error.fix
                yield finding("mount-syntax", field, place, reason, fix, severity=severity)
            continue
        if len(fields) == 1 and not syntax.needs_target:
            without_target.append(index)
        for code, reason, fix, new in _faults(text, fields, engine, syntax):
            changes = (Set(("mounts", str(index)), new),) if new else ()
            severity = "error" if code == "mount-without-target" else ""
            yield finding(code, field, place, reason, fix, severity=severity, changes=changes)
    if without_target:
        yield _without_target(document, mounts, without_target, engine)


def _relative_target_only(fields: tuple[str, ...]) -> bool:
    """Whether a relative target is the only problem. Source: sarus-suite/raster@20f75bd, tests: `./ccc:./ddd`."""
    if len(fields) < 2 or not fields[1].startswith("."):
        return False
    try:
        parse_mount(":".join((fields[0], "/target", *fields[2:])))
    except RunnerError:
        return False
    return True


def _without_target(
    document: Document, mounts: list[str], indexes: list[int], engine: str
) -> Finding:
    texts = [mounts[index] for index in indexes]
    changes = tuple(
        Set(("mounts", str(index)), f"{mounts[index]}:{mounts[index]}") for index in indexes
    )
    verb = "has" if len(texts) == 1 else "have"
    reason = f"{', '.join(map(repr, texts))} {verb} no target: {engine} uses the source's path, and Sarus Suite fails"
    field, place = f"mounts.{indexes[0]}", document.place("mounts", str(indexes[0]))
    fix = f"write '{texts[0]}:{texts[0]}'"
    code = "mount-without-target"
    return finding(code, field, place, reason, fix, severity="note", changes=changes)


_Fault = tuple[str, str, str, str]


def _faults(
    text: str, fields: tuple[str, ...], engine: str, syntax: MountSyntax
) -> Iterator[_Fault]:
    """(code, reason, fix, the corrected mount) of each problem of a mount that can be parsed. The last is empty if only
    the user can correct the mount."""
    if len(fields) == 1 and syntax.needs_target:
        new = f"{text}:{text}"
        reason = f"{text!r} has no target, which Sarus Suite needs"
        yield "mount-without-target", reason, f"write '{new}'", new
    if len(fields) == 3:
        yield from _flags(fields, engine, syntax)
    for path, fix in zip(fields[:2], SEPARATOR_FIXES, strict=False):
        split = path if syntax.splits_before_expanding else _with_defaults(path)
        bad = syntax.bad_character(split)
        if bad:
            reason = f"{path!r} contains {bad}, which a mount of {engine} cannot contain"
            yield "mount-separator", reason, fix, ""
            return


def _with_defaults(path: str) -> str:
    """The path with its defaults, because runner inserts a default before the engine splits the mount."""
    return "".join(part if isinstance(part, str) else part.default or "" for part in parts(path))


def _flags(fields: tuple[str, ...], engine: str, syntax: MountSyntax) -> Iterator[_Fault]:
    source, target, text = fields
    wrong = "+" if syntax.join == "," else ","
    flags = [flag for flag in re.split(r"[+,]", text) if flag]
    if wrong in text:
        reason = f"the flags {text!r} are joined by {wrong!r}; {engine} needs {syntax.join!r}"
        new = f"{source}:{target}:{syntax.join.join(flags)}"
        yield "mount-flag-separator", reason, f"write '{new}'", new
    for flag in flags:
        if flag not in syntax.flags and not flag.startswith(
            ("x-", "size=", "uid=", "gid=", "mode=", "idmap")
        ):
            reason = f"the mounts of {engine} have no flag {flag!r}"
            yield "mount-flag-unknown", reason, _near_flag(flag, syntax.flags), ""


def _near_flag(flag: str, known: frozenset[str]) -> str:
    words = {
        "readonly": "ro",
        "read-only": "ro",
        "readwrite": "rw",
        "squashfs": "sqsh",
        "r": "ro",
        "w": "rw",
    }
    near = words.get(flag.lower()) or (
        flag.lower() if flag.lower() in known else nearest(flag, sorted(known), 0.6)
    )
    return f"did you mean {near!r}?" if near else f"use one of: {', '.join(sorted(known))}"
