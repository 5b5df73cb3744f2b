"""Rules over the text of each mount: what plain srun, or the engine, makes of the file without runner."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.environments.lint.finding import Finding, finding
from runner.environments.mount import parse_mount, split_fields
from runner.environments.rewriting import Set
from runner.errors import RunnerError
from runner.located_toml import Document

_FLAGS = frozenset(
    {"ro", "rw", "bind", "rbind", "private", "rprivate", "slave", "rslave", "shared", "rshared"}
    | {"nosuid", "suid", "nodev", "dev", "noexec", "exec", "sync"}
)
# Source: CSCS documentation, container-engine/edf.md (2026-08-20); sarus-suite/raster@20f75bd; podman-run(1), --volume
_OWN_FLAGS = {
    "ce": frozenset({"sqsh"}),
    "sandbox": frozenset({"sqsh"}),
    "sarus": frozenset({"z", "Z", "U", "O"}),
    "podman": frozenset({"z", "Z", "U", "O"}),
}
# signs that part the fields of the engine's mounts, and cannot be escaped there.
# Source: pyxis 0.24.0 args.c (blanks: since 0.24, and with an enroot newer than 4.1.2 only); enroot 4.1.2 runtime.sh
_FORBIDDEN = {
    "pyxis": ", \t\n",
    "enroot": ", \t\n",
    "apptainer": ",\n",
    "ce": "\n",
    "sarus": "\n",
    "podman": ",",
    "docker": ",",
}
_SIGNS = {",": "a comma", " ": "a blank", "\t": "a tab", "\n": "a newline", ":": "a colon"}


def check_mounts(document: Document, engine: str) -> Iterator[Finding]:
    """The faults of each mount of a file, for an engine."""
    mounts = document.data.get("mounts")
    if not isinstance(mounts, list):
        return
    for index, text in enumerate(mounts):
        if not isinstance(text, str) or "\0" in text:
            continue  # said by the rules on types
        field, place = f"mounts.{index}", document.place("mounts", str(index))
        try:
            parse_mount(text)
        except RunnerError as error:
            if "cannot read the variable" not in error.what:  # said by the rule on references
                reason = f"{text!r}: {error.why}"
                yield finding("mount-syntax", field, place, reason, f"write {error.fix}")
            continue
        for code, reason, fix, severity in _faults(text, split_fields(text), engine):
            new = re.fullmatch(r".*write '(.*)'", fix, re.DOTALL)
            changes = (Set(("mounts", str(index)), new[1]),) if new else ()
            yield finding(code, field, place, reason, fix, severity, changes)


def _faults(text: str, fields: tuple[str, ...], engine: str) -> Iterator[tuple[str, str, str, str]]:
    """(code, reason, fix, severity) for each fault of one mount that can be read."""
    if len(fields) == 1:
        fix = f"'{text}:{text}'"
        if engine == "sarus":
            yield (
                "mount-without-target",
                f"{text!r} names no target, and Sarus Suite wants one",
                f"write {fix}",
                "error",
            )
        else:
            reason = f"{text!r} names no target; runner and {engine} use the source's path, Sarus Suite refuses it"
            yield "mount-without-target", reason, f"to be clear, write {fix}", ""
    if len(fields) == 3:
        yield from _flags(fields, engine)
    for path in fields[:2]:
        bad = next((sign for sign in path if sign in _FORBIDDEN.get(engine, "")), None)
        if bad is None and ":" in path and engine != "sandbox":
            bad = ":"  # inside of ${VAR:-default}
            if engine != "sarus" and ":" not in re.sub(r"(\$\{\w+):-", r"\1", path):
                bad = None  # others put the default in before they cut
        if bad is not None:
            reason = f"{path!r} has {_SIGNS[bad]}, which the mounts of {engine} cannot hold"
            yield "mount-separator", reason, "rename the folder, or link it from another path: ln -s", ""
            return


def _flags(fields: tuple[str, ...], engine: str) -> Iterator[tuple[str, str, str, str]]:
    source, target, text = fields
    right = "," if engine == "sarus" else "+"
    wrong = "+" if right == "," else ","
    flags = [flag for flag in re.split(r"[+,]", text) if flag]
    if wrong in text:
        reason = f"the flags {text!r} are joined by {wrong!r}, and {engine} wants {right!r}"
        yield "mount-flag-separator", reason, f"write '{source}:{target}:{right.join(flags)}'", ""
    known = _FLAGS | _OWN_FLAGS.get(engine, frozenset())
    for flag in flags:
        if flag not in known and not flag.startswith(("x-", "size=", "uid=", "gid=", "mode=", "idmap")):
            yield "mount-flag-unknown", f"the mounts of {engine} have no flag {flag!r}", _near_flag(flag, known), ""


def _near_flag(flag: str, known: frozenset[str]) -> str:
    import difflib  # slow to import, and only errors need it

    words = {"readonly": "ro", "read-only": "ro", "readwrite": "rw", "squashfs": "sqsh", "r": "ro", "w": "rw"}
    close = difflib.get_close_matches(flag, sorted(known), n=1, cutoff=0.6)
    near = words.get(flag.lower()) or (flag.lower() if flag.lower() in known else next(iter(close), None))
    return f"did you mean {near!r}?" if near else f"one of: {', '.join(sorted(known))}"
