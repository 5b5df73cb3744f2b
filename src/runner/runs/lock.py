"""RUN/lock.toml: everything that determined a launch, so that it can be repeated. It contains no secrets."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner import __version__
from runner.environments.environment import quoted, toml_key
from runner.errors import RunnerError
from runner.runs import hub
from runner.runs.image import LaunchImage
from runner.runs.plan import EDF, RunPlan
from runner.runs.run import Run
from runner.runs.secrets import hide_values, hide_words

Value = str | int | bool | Sequence[str] | None
"""None means that the key is not written"""

HEADER = """\
# What this run was made of, as launched. Written once. A job reads only [image], to see whether the image was replaced.
# Values that look like secrets are left out. What the container held (packages, driver): attempts/N/inside.toml.
"""


def tables(plan: RunPlan, run: Run) -> dict[str, dict[str, Value]]:
    """The tables of the lock of a run."""
    site, job = plan.site, plan.job
    variables = {**site.env, **plan.environment.env, **job.env}
    set_values = {
        key: value for key, value in asdict(site).items() if key not in ("origins", "env") and value
    }
    return {
        "run": {
            "name": run.name,
            "created": run.created,
            "command_line": run.command_line,
            "runner": __version__,
            "project": run.project,
            "site": run.site,
            "after": run.after,
            "script_sha256": _sha256(plan.script),
        },
        "image": _image(plan.image),
        "recipe": recipe(plan.image),
        "environment": {
            "name": plan.environment.name,
            "path": str(plan.environment.path or ""),
            "edf_sha256": _sha256(plan.files[EDF]),
            "engine": plan.engine,
        },
        "environment.env": {**hide_values(plan.environment.env)},
        "code": _code(plan),
        "job": _job(plan),
        "job.resources": asdict(job.resources),
        "job.restart": asdict(job.restart) if job.restart else {},
        "job.env": {**hide_values(job.env)},
        "job.sources": {key: str(origin) for key, origin in job.origins.items()},
        "site.values": {key: _plain(value) for key, value in set_values.items()},
        "site.env": {**hide_values(site.env)},
        "site.sources": {key: str(origin) for key, origin in site.origins.items()},
        "slurm": dict(run.slurm),
        "sweep": {**run.parameters},
        "revisions": {**hub.revisions((*job.command, *job.arguments), run.folder, variables)},
        "files": {name: _sha256(text) for name, text in plan.files.items()},
    }


def _job(plan: RunPlan) -> dict[str, Value]:
    job = plan.job
    return {
        "name": job.name,
        "script": job.script,
        "batch": plan.own_script,
        "command": hide_words(job.command),
        "arguments": hide_words(job.arguments),
        "seed": hub.argument_values((*job.command, *job.arguments)).get("seed"),
        "launcher": job.launcher,
        "save_seconds": job.save_seconds,
        "save_signal": list(job.save_signal) or None,
        "hang_seconds": job.hang_seconds,
        "chain": job.chain or None,
    }


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a lock file. Raises RunnerError if it cannot be read."""
    try:
        return read(path.read_text())
    except (OSError, ValueError) as error:  # not TOML, or not UTF-8
        fix = "restore the file, or name another run"
        raise RunnerError(f"cannot read the lock file {path}", str(error), fix) from error


def read(text: str) -> dict[str, dict[str, Any]]:
    """The tables of a lock: dotted name -> values. Raises tomllib.TOMLDecodeError."""
    found: dict[str, dict[str, Any]] = {}

    def visit(name: str, table: Mapping[str, Any]) -> None:
        found[name] = {key: value for key, value in table.items() if not isinstance(value, dict)}
        for key, value in table.items():
            if isinstance(value, dict):
                visit(f"{name}.{key}", value)

    for name, table in tomllib.loads(text).items():
        visit(name, table if isinstance(table, dict) else {"": table})
    return found


def _image(image: LaunchImage) -> dict[str, Value]:
    squashfs, stored = image.squashfs, image.stored
    if stored is not None:
        return {
            "reference": image.reference,
            "source": stored.source,
            "digest": stored.image_digest or None,
            "manifest": stored.digest or None,
            "store_id": stored.id,
            "architecture": stored.architecture,
        }
    if squashfs is None:
        return {"reference": image.reference, **_file(image.reference)}
    return {
        "reference": image.reference,
        "link": str(image.stable),
        "source": squashfs.source,
        "content": squashfs.content,
        "digest": squashfs.image_digest,
        "manifest": squashfs.digest or None,
        "sha256": squashfs.sha256,
        "size_bytes": squashfs.size_bytes,
        "architecture": squashfs.architecture,
    }


def _file(reference: str) -> dict[str, Value]:
    """Size, time and inode of an image file that runner did not make. The batch script compares them."""
    with suppress(OSError):
        if reference.startswith("/"):
            found = Path(reference).stat()
            return {
                "size_bytes": found.st_size,
                "modified": int(found.st_mtime),
                "inode": found.st_ino,
            }
    return {}


_LABELS = {
    "name": "runner.recipe",
    "content": "runner.content",
    "files_sha256": "runner.recipe.files",
    "base": "org.opencontainers.image.base.name",
    "base_digest": "org.opencontainers.image.base.digest",
    "revision": "org.opencontainers.image.revision",
    "runner": "runner.version",
}


def recipe(image: LaunchImage) -> dict[str, Value]:
    """How the image was built, from its labels; empty if `runner build` did not build it."""
    known = image.squashfs or image.stored
    labels = known.labels if known else {}
    return (
        {key: labels.get(label) for key, label in _LABELS.items()}
        if "runner.recipe" in labels
        else {}
    )


def _code(plan: RunPlan) -> dict[str, Value]:
    taken = plan.snapshot
    known: dict[str, Value] = {
        "root": str(plan.program.main or ""),
        "content": taken.content,
        "files": len(taken.files),
        "size_bytes": taken.size_bytes,
        "left_out": [name for name, _ in taken.left_out],
    }
    if git := taken.git:
        known |= {
            "commit": git.commit,
            "dirty": git.dirty,
            "modified": git.modified,
            "untracked": git.untracked,
        }
    return known


def _plain(value: object) -> Value:
    return value if isinstance(value, str | int | tuple) else str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def lock_text(tables: Mapping[str, Mapping[str, Value]]) -> str:
    """The lock as TOML. The name of a table may be dotted (`site.values`). Empty tables are left out."""
    lines = [HEADER]
    for name, values in tables.items():
        written = [
            f"{toml_key(key)} = {_value(value)}"
            for key, value in values.items()
            if value is not None
        ]
        if written:
            lines += [f"[{name}]", *written, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    words = [_string(word) for word in value or ()]
    if sum(map(len, words)) < 90:
        return f"[{', '.join(words)}]"
    return "[\n" + "".join(f"    {word},\n" for word in words) + "]"


def _string(text: str) -> str:
    return quoted(text.encode("utf-8", "replace").decode())  # TOML cannot represent lone surrogates
