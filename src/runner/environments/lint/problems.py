"""Known problems of the Container Engine, from problems.toml."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.environments.lint.finding import Finding, Subject


@dataclass(frozen=True)
class Problem:
    """A documented problem, as problems.toml explains it."""

    when: Sequence[Mapping[str, str]]
    field: str
    reason: str
    fix: str
    source: str
    date: str
    unless: Sequence[Mapping[str, str]] = ()


# code -> problem
PROBLEMS = {
    name: Problem(**row)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def known_problems(subject: Subject) -> Iterator[Finding]:
    """The documented problems that the environment has."""
    if not subject.own.image or subject.image.extended:
        return
    for code, problem in PROBLEMS.items():
        solved = any(_holds(subject, each) for each in problem.unless)
        if not solved and any(_holds(subject, each) for each in problem.when):
            yield subject.say(code, problem.field, problem.reason, problem.fix)


def _holds(subject: Subject, conditions: Mapping[str, str]) -> bool:
    return all(_one_holds(subject, name, wanted) for name, wanted in conditions.items())


def _one_holds(subject: Subject, name: str, wanted: str) -> bool:
    match name:
        case "image":
            return re.search(wanted, subject.image.words) is not None
        case "mount":
            return any(re.fullmatch(wanted, mount.target) for mount in subject.environment.mounts)
        case "netstack":
            return subject.netstack == wanted
    environment = subject.environment
    return (environment.annotations if "." in name else environment.env).get(name) == wanted
