"""RUN/lock.toml: everything that determined a launch, so that it can be repeated. It contains no secrets."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner import __version__
from runner.runs import hub
from runner.runs.image import LaunchImage
from runner.runs.launch import EDF, RunPlan
from runner.runs.run import Run
from runner.runs.secrets import hide_values, hide_words

Value = str | int | bool | Sequence[str] | None
"""None means that the key is not written"""

HEADER = """\
# What this run was made of, as launched. Written once; nothing reads it while the job runs.
# Values that look like secrets are left out. What the container held (packages, driver): attempts/N/inside.toml.
"""


def tables(plan: RunPlan, run: Run) -> dict[str, dict[str, Value]]:
    """The tables of the lock of a run."""
    site, job = plan.site, plan.job
    variables = {**site.env, **plan.environment.env, **job.env}
    set_values = {key: value for key, value in asdict(site).items() if key not in ("origins", "env") and value}
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
        "job": {
            "name": job.name,
            "script": job.script,
            "batch": str(plan.batch.folder / plan.batch.word) if plan.batch else None,
            "command": hide_words(job.command),
            "arguments": hide_words(job.arguments),
            "seed": _seed((*job.command, *job.arguments)),
            "launcher": job.launcher,
            "save_seconds": job.save_seconds,
            "hang_seconds": job.hang_seconds,
            "chain": job.chain or None,
        },
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


def _seed(words: Sequence[str]) -> str | None:
    """The seed in the arguments; None if the arguments do not set one."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--seed":
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


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
    squashfs = image.squashfs
    if squashfs is None:
        return {"reference": image.reference, **_file(image.reference)}
    return {
        "reference": image.reference,
        "link": str(image.stable),
        "source": squashfs.source,
        "content": squashfs.content,
        "digest": squashfs.image_digest,
        "sha256": squashfs.sha256,
        "size_bytes": squashfs.size_bytes,
        "architecture": squashfs.architecture,
    }


def _file(reference: str) -> dict[str, Value]:
    """Size, time and inode of an image file that runner did not make. The batch script compares them."""
    try:
        found = Path(reference).stat() if reference.startswith("/") else None
    except OSError:
        return {}
    if found is None:
        return {}
    return {"size_bytes": found.st_size, "modified": int(found.st_mtime), "inode": found.st_ino}


def recipe(image: LaunchImage) -> dict[str, Value]:
    """How the image was built, from the image itself; empty if `runner build` did not build it."""
    labels = image.squashfs.labels if image.squashfs else {}
    if "runner.recipe" not in labels:
        return {}
    return {
        "name": labels["runner.recipe"],
        "content": labels.get("runner.content"),
        "files_sha256": labels.get("runner.recipe.files"),
        "base": labels.get("org.opencontainers.image.base.name"),
        "base_digest": labels.get("org.opencontainers.image.base.digest"),
        "revision": labels.get("org.opencontainers.image.revision"),
        "runner": labels.get("runner.version"),
    }


def _code(plan: RunPlan) -> dict[str, Value]:
    taken = plan.snapshot
    known: dict[str, Value] = {
        "root": str(plan.program.main or ""),
        "content": taken.content,
        "files": len(taken.files),
        "size_bytes": taken.size_bytes,
        "left_out": [name for name, _ in taken.left_out],
    }
    if taken.git is not None:
        known |= {
            "commit": taken.git.commit,
            "dirty": taken.git.dirty,
            "modified": taken.git.modified,
            "untracked": taken.git.untracked,
        }
    return known


def _plain(value: object) -> Value:
    if isinstance(value, str | int):
        return value
    return tuple(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def lock_text(tables: Mapping[str, Mapping[str, Value]]) -> str:
    """The lock as TOML. The name of a table may be dotted (`site.values`). Empty tables are left out."""
    lines = [HEADER]
    for name, values in tables.items():
        written = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]
        if written:
            lines += [f"[{name}]", *written, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _string(key)


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
    # TOML's basic strings accept JSON's escapes; DEL must be escaped too, and TOML cannot represent lone surrogates
    safe = text.encode("utf-8", "replace").decode()
    return json.dumps(safe, ensure_ascii=False).replace("\x7f", "\\u007F")
