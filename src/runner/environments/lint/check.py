"""The linter: checks each file of an environment, then the merged environment on a site. Also checks batch scripts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.environments.edf import Mount, find_edf
from runner.environments.engines import attach
from runner.environments.engines.shared import Inexpressible
from runner.environments.environment import MAXIMUM_LEVELS, Environment, load_environment
from runner.environments.lint import hooks, image, mounts, sarus, script, steps, variables
from runner.environments.lint.codes import SEVERITIES
from runner.environments.lint.file import check_file, read_all
from runner.environments.lint.finding import Finding, Rule, Setting, Subject, finding
from runner.environments.lint.mounts import check_mounts
from runner.environments.lint.script import Line, Script, is_script, parse_script
from runner.errors import RunnerError
from runner.expansion import expand
from runner.located_toml import Document, Place
from runner.project import Project

_MOST_FAULTS = 50
_HARMLESS = Mount("/dev/null", "/dev/null")
_EMPTY: dict[str, Any] = {"annotations": {}, "devices": (), "entrypoint": False, "workdir": None}


def engine_refuses(subject: Subject) -> Iterator[Finding]:
    """The fields that the engine refuses. It reports one field at a time, so ask again without that field."""
    setting, environment = subject.setting, subject.environment
    for _ in range(_MOST_FAULTS):
        try:
            attach(environment, setting.site, setting.engine, setting.environ)
        except Inexpressible as error:
            yield subject.say(
                "engine-refuses", error.field, f"{error.message}: {error.why}", error.fix
            )
            without = _without(environment, error.field)
            if without is None or without == environment:
                return
            environment = without
        except RunnerError as error:
            yield subject.say(
                "engine-refuses", "environment", f"{error.what}: {error.why}", error.fix
            )
            return
        else:
            return


def _without(environment: Environment, field: str) -> Environment | None:
    """The environment without a field; None if the field cannot be removed."""
    key, _, name = field.partition(".")
    if key == "mounts" and name.isdigit():
        mounts = tuple(
            _HARMLESS if index == int(name) else mount
            for index, mount in enumerate(environment.mounts)
        )
        return replace(environment, mounts=mounts)
    if key == "env":
        return replace(
            environment,
            env={other: value for other, value in environment.env.items() if other != name},
        )
    return replace(environment, **{key: _EMPTY[key]}) if key in _EMPTY else None


RULES: tuple[Rule, ...] = (*variables.RULES, *image.RULES, *mounts.RULES, engine_refuses)
_OF_ENGINES = {"ce": hooks.RULES, "sarus": sarus.RULES}
# What an engine accepts that reads EDFs leniently. Source: sarus-suite/raster@20f75bd: its schema has
# additionalProperties, and annotations become text.
_ACCEPTED_LENIENTLY = {"unknown-key": "warning", "annotation-not-text": "warning"}


@dataclass(frozen=True)
class Checked:
    """The findings in one environment or script."""

    name: str
    path: Path
    findings: tuple[Finding, ...]


@dataclass
class Linter:
    """Checks several environments; a base environment that they share is read once."""

    project: Project
    setting: Setting
    files: dict[Path, tuple[Document | None, tuple[Finding, ...]]] = field(default_factory=dict)

    def check(self, name: str) -> tuple[Checked, ...]:
        """The findings in an environment, or in a script and the environments that it names.

        Raises RunnerError for an unknown name.
        """
        path = Path(name).expanduser()
        path = path if path.is_absolute() else self.project.start / path
        if path.is_file() and is_script(path):
            text = path.read_text(encoding="utf-8", errors="replace")
            return tuple(self._script(parse_script(text, path)))
        return (self.environment(find_edf(name, self.project, self.setting.environ))[0],)

    def environment(self, path: Path) -> tuple[Checked, Environment | None]:
        """The findings in an EDF and its base environments; the environment, or None if it cannot be read."""
        found = list(self._files(path, ()))
        environment: Environment | None = None
        try:
            environment = load_environment(str(path), self.project, self.setting.environ)
        except RunnerError as error:
            accepted = self.setting.engine_facts.reads_edf_leniently and any(
                one.code in (*_ACCEPTED_LENIENTLY, "mount-syntax") for one in found
            )
            known = any(one.severity == "error" or one.code == "base-missing" for one in found)
            if not accepted and not known:
                found.append(
                    finding(
                        "cannot-load", "file", Place(path), f"{error.what}: {error.why}", error.fix
                    )
                )
        else:
            subject = Subject(environment, self.setting)
            rules = (*_OF_ENGINES.get(self.setting.engine, ()), *RULES)
            found += [one for rule in rules for one in rule(subject)]
        return Checked(path.stem, path, in_order(found)), environment

    def _file(self, path: Path) -> tuple[Document | None, tuple[Finding, ...]]:
        if path not in self.files:
            document, found = read_all(path)
            if document is not None:
                found = [
                    *found,
                    *check_file(document),
                    *check_mounts(document, self.setting.engine),
                ]
            if self.setting.engine_facts.reads_edf_leniently:
                found = [
                    replace(one, severity=_ACCEPTED_LENIENTLY.get(one.code, one.severity))
                    for one in found
                ]
            self.files[path] = document, tuple(found)
        return self.files[path]

    def _files(self, path: Path, above: tuple[Path, ...]) -> Iterator[Finding]:
        """The findings in a file and in its base environments."""
        document, found = self._file(path)
        yield from found
        if document is None:
            return
        bases = document.data.get("base_environment")
        if isinstance(bases, str):
            bases = [bases]
        for index, base in enumerate(bases if isinstance(bases, list) else []):
            if not isinstance(base, str) or not base:
                continue
            place = document.place("base_environment", str(index))
            try:
                name = expand(base, self.setting.environ, "base_environment")
                found_base = find_edf(name, self.project, self.setting.environ)
            except RunnerError as error:
                yield self._missing("base-missing", "base_environment", place, error)
                continue
            chain = (*above, path.resolve())
            if found_base.resolve() in chain:
                circle = " -> ".join(step.stem for step in (*chain, found_base))
                yield finding(
                    "base-circle",
                    "base_environment",
                    place,
                    f"base_environment is circular: {circle}",
                )
            elif len(chain) > MAXIMUM_LEVELS:
                reason = f"base_environment is nested deeper than {MAXIMUM_LEVELS} levels"
                yield finding("base-too-deep", "base_environment", place, reason)
            else:
                yield from self._files(found_base, chain)

    def _missing(self, code: str, field: str, place: Place, error: RunnerError) -> Finding:
        """The finding for an environment that is not found; on a machine of another site, it may be there."""
        if self.setting.here:
            return finding(code, field, place, f"{error.what}; {error.why}", error.fix)
        reason = f"{error.what} on this machine, so it is not checked"
        return finding(
            code, field, place, reason, f"check it on {self.setting.site.name}", severity="note"
        )

    def _script(self, text: Script) -> Iterator[Checked]:
        """The findings in a script and in those that it submits, then in each environment that they name."""
        checked: dict[Path, tuple[Checked, Environment | None]] = {}
        found = [one for each in (text, *text.nested) for one in self._in_script(each, checked)]
        yield Checked(text.path.name, text.path, in_order(found))
        yield from (one for one, _ in checked.values())

    def _in_script(
        self, text: Script, checked: dict[Path, tuple[Checked, Environment | None]]
    ) -> Iterator[Finding]:
        """The findings in one script. The environments that it names go to `checked`."""
        named: list[tuple[Line, Environment]] = []
        for line, given in text.given("--environment", "--edf"):
            name = self._expanded(given)
            if not name or "$" in name or "…" in name:
                continue  # no environment, or one whose name only the job knows
            try:
                path = find_edf(name, self.project, self.setting.environ)
            except RunnerError as error:
                yield self._missing(
                    "environment-missing", "--environment", Place(text.path, line.number), error
                )
                continue
            if path not in checked:
                checked[path] = self.environment(path)
            environment = checked[path][1]
            if environment is not None:
                named.append((line, environment))
        batch = script.Batch(text, self.setting, tuple(named))
        yield from (one for rule in (*script.RULES, *steps.RULES) for one in rule(batch))

    def _expanded(self, text: str) -> str:
        """The text with this machine's variables replaced, as if the script were submitted from this folder."""
        here = str(self.project.start)
        known = {"PWD": here, "SLURM_SUBMIT_DIR": here, **self.setting.environ}
        return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda match: known.get(match[1], match[0]), text)


def in_order(found: list[Finding]) -> tuple[Finding, ...]:
    """The findings, errors first, then in the order of the files. engine-refuses is dropped where another rule explains
    the same field."""
    known = {one.field for one in found if one.severity == "error" and one.code != "engine-refuses"}
    kept = [one for one in found if one.code != "engine-refuses" or one.field not in known]
    return tuple(sorted(dict.fromkeys(kept), key=_order))


def _order(one: Finding) -> tuple[int, str, int]:
    place = one.place
    return (
        SEVERITIES.index(one.severity),
        str(place.path) if place else "~",
        (place.line or 0) if place else 0,
    )
