"""The last rule: what the engine itself refuses, each field that it cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from runner.environments.engines import attach
from runner.environments.environment import Environment
from runner.environments.lint.finding import Finding
from runner.environments.lint.subject import Subject
from runner.environments.mount import Mount
from runner.errors import RunnerError

_MOST_FAULTS = 50
_HARMLESS = Mount("/dev/null", "/dev/null")


def engine_refuses(subject: Subject) -> Iterator[Finding]:
    """Asked again and again, each time without the field that it named last: it names one at a time."""
    setting, environment = subject.setting, subject.environment
    for _ in range(_MOST_FAULTS):
        try:
            attach(environment, setting.site, setting.engine, setting.environ)
        except RunnerError as error:
            field = _field(error)
            yield subject.say("engine-refuses", field, f"{_sentence(error)}: {error.why}", error.fix)
            without = _without(environment, field)
            if without is None or without == environment:
                return
            environment = without
        else:
            return


def _field(error: RunnerError) -> str:
    match = re.search(r"cannot express (\S+)", error.what) or re.search(r"(mounts\.\d+|env\.\S+)", error.what)
    return match[1].rstrip(":,") if match else "environment"


def _sentence(error: RunnerError) -> str:
    """What happened, without the place in front of it."""
    return re.sub(r"^\S+:\d+: ", "", error.what)


def _without(environment: Environment, field: str) -> Environment | None:
    """The environment without a field that was refused; None where it takes no leaving out."""
    key, _, name = field.partition(".")
    if key == "mounts" and name.isdigit():
        mounts = tuple(_HARMLESS if index == int(name) else mount for index, mount in enumerate(environment.mounts))
        return replace(environment, mounts=mounts)
    if key == "env":
        return replace(environment, env={other: value for other, value in environment.env.items() if other != name})
    if key == "annotations":
        return replace(environment, annotations={})
    if key == "devices":
        return replace(environment, devices=())
    if field == "entrypoint":
        return replace(environment, entrypoint=False)
    return replace(environment, workdir=None) if field == "workdir" else None


RULES = (engine_refuses,)
