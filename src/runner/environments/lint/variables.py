"""Rules over variables: defined, in braces, expanded where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.environments.lint.finding import Finding
from runner.environments.lint.subject import Subject, texts
from runner.environments.rewriting import Set
from runner.expansion import Variable, names, parts

# what users of a cluster have; another name is worth a note where the check does not run on that cluster
_USUAL = {"HOME", "USER", "LOGNAME", "PWD", "TMPDIR", "SCRATCH", "STORE", "PROJECT", "WORK", "RUNNER_IMAGES"}
_BARE = re.compile(r"(?<!\$)\$([A-Za-z_][A-Za-z0-9_]*)")
_LIKELY_IN_IMAGE = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LIBRARY_PATH", "CPATH", "CUDA_HOME"}


def undefined_variable(subject: Subject) -> Iterator[Finding]:
    """A variable that is not defined ends the job; in [env] the image may define it."""
    variables = subject.setting.variables
    for field, text in texts(subject.environment):
        if "${" not in text:
            continue
        bare = {part.name for part in parts(text, field) if isinstance(part, Variable) and part.default is None}
        for name in names(text, field):
            if name not in bare or name in variables or name.startswith("SLURM_"):
                continue
            in_env = field.startswith("env.")
            if in_env and name in _LIKELY_IN_IMAGE:
                continue
            fix = f"export {name}=…, or give it a default: ${{{name}:-…}}"
            if subject.setting.here:
                reason = f"{field} needs {name}, which is not defined here"
                reason += "; the image must define it" if in_env else ""
                yield subject.say("undefined-variable", field, reason, fix, "warning" if in_env else "error")
            elif name not in _USUAL:
                reason = f"{field} needs {name}, which must be defined on {subject.setting.site.name}"
                yield subject.say("undefined-variable", field, reason, fix, "note")


def without_braces(subject: Subject) -> Iterator[Finding]:
    """`$VAR` is plain text to every engine."""
    for field, text in texts(subject.own):
        if "$" not in text:
            continue
        plain = "".join(part for part in parts(text, field) if isinstance(part, str))
        for match in _BARE.finditer(plain):
            severity = "warning" if field.startswith(("env.", "annotations.")) else "error"
            reason = f"{field} has {match[0]} without braces: it stays the text {match[0]}"
            if subject.setting.engine == "sarus":
                reason = f"{field} has {match[0]} without braces: a variable to Sarus Suite, text to all others"
            # in [env] the text itself may be meant, so only the user can mend it there
            value = getattr(subject.own, field, "") if severity == "error" and "." not in field else ""
            changes = (Set((field,), _BARE.sub(r"${\1}", value)),) if value else ()
            yield subject.say("variable-without-braces", field, reason, f"write ${{{match[1]}}}", severity, changes)


def in_image_of_sarus(subject: Subject) -> Iterator[Finding]:
    """raster expands every field but this one. Source: sarus-suite/raster@20f75bd, src/lib.rs."""
    if subject.setting.engine == "sarus" and "${" in subject.own.image:
        yield subject.say("variable-in-image", "image", f"{subject.own.image!r} is taken as it stands")


def env_refers_to_env(subject: Subject) -> Iterator[Finding]:
    """An entry of [env] sees the variables of host and image, never its neighbours.

    Source: CSCS documentation, container-engine/edf.md, "Environment variables" (2026-08-20).
    """
    env = subject.own.env
    for name, value in env.items():
        if "${" not in value:
            continue
        for other in names(value, f"env.{name}"):
            if other != name and env.get(other):
                reason = f"env.{name} refers to {other}, and sees the host's or image's {other}, not env.{other}"
                yield subject.say("env-refers-to-env", f"env.{name}", reason, f"write {env[other]!r} there")


RULES = (undefined_variable, without_braces, in_image_of_sarus, env_refers_to_env)
