"""A template's byte code, kept between calls: to compile it takes a third as long as all the rest of a dry run.

A kept file is named by the hash of all that it was made of, so it is never out of date; one that is gone or damaged
is made again. As with Python's own byte code, nothing is kept where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from runner import __version__
from runner.errors import RunnerError
from runner.machine import files
from runner.machine.folders import cache_folder

if TYPE_CHECKING:
    import jinja2


def template(path: Path, environment: jinja2.Environment, environ: Mapping[str, str] = os.environ) -> jinja2.Template:
    """The template of a file. `environment` is always the same one for the same file and version of runner."""
    import jinja2  # slow to import

    text = path.read_text(encoding="utf-8")
    made_of = repr((text, str(path), __version__, jinja2.__version__, sys.version))
    kept = cache_folder(environ) / "templates" / f"{path.name}.{hashlib.sha256(made_of.encode()).hexdigest()[:24]}"
    code = None if sys.dont_write_bytecode else _read(kept)
    if code is None:
        code = environment.compile(text, path.name, str(path))
        if not sys.dont_write_bytecode:
            with suppress(RunnerError):  # no home folder, or a full one: it is compiled each time then
                files.write(kept, marshal.dumps(code))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _read(path: Path) -> CodeType | None:
    try:
        found = marshal.loads(path.read_bytes())
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return found if isinstance(found, CodeType) else None
