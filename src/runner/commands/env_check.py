"""env check."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.cluster_facts import output
from runner.commands.console import Console
from runner.detection import cluster_name, find_site
from runner.environments.engines import choose, engine_of
from runner.environments.environment import default_environment
from runner.environments.lint.check import Checked, Linter
from runner.environments.lint.codes import CODES
from runner.environments.lint.finding import Finding, Setting, as_data, by_file, fixed
from runner.errors import RunnerError
from runner.images import sarus_store
from runner.machine import files, process
from runner.project import find_project
from runner.site import Site
from runner.site_files import signs

_ROUNDS = 8  # of --fix: several findings for the same key are fixed one per round


def check_environments(args: argparse.Namespace, console: Console) -> int:
    """`runner env check`: the findings; exit code 1 when one of them is an error."""
    if args.list is not None:
        for name in ("json", "fix", "engine", "enroot"):
            if getattr(args, name):
                raise RunnerError(
                    f"--{name} has no effect with --list",
                    "--list prints codes, and checks nothing",
                    f"leave out --{name}",
                    exit_code=2,
                )
        return _list(args.list, console)
    if args.engine == "both":
        return _check_for_both(args, console)
    setting, checked, findings = examine(args, console)
    answers = _answers(checked) if setting.engine_facts.checks_edf else []
    _print(args, console, _Result(setting, checked, findings, answers))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


BOTH = ("ce", "sarus")
"""today's engine of CSCS, and the next one"""


def _check_for_both(args: argparse.Namespace, console: Console) -> int:
    """Check for both engines of CSCS, and say of each environment with which of them it works."""
    if args.fix:
        raise RunnerError(
            "--fix cannot be used with `both`",
            "a change for one engine may be wrong for the other",
            "name one engine: --as ce or --as sarus",
            exit_code=2,
        )
    seen: dict[Finding, list[str]] = {}
    errors: dict[Path, dict[str, list[Finding]]] = {}
    for engine in BOTH:
        one = argparse.Namespace(**{**vars(args), "engine": engine})
        setting, checked, findings = examine(one, console)
        for finding in findings:
            seen.setdefault(finding, []).append(engine)
        for each in checked:
            wrong = [finding for finding in each.findings if finding.severity == "error"]
            errors.setdefault(each.path, {})[engine] = wrong
    names = {each.path: each.name for each in checked}
    works = [
        {
            "name": names[path],
            **{engine: not found for engine, found in by.items()},
            "verdict": _verdict(names[path], by),
        }
        for path, by in errors.items()
    ]
    both = replace(setting, engine="both")
    _print(args, console, _Result(both, checked, tuple(seen), _answers(checked), works, seen))
    return 1 if any(finding.severity == "error" for finding in seen) else 0


def _verdict(name: str, errors: Mapping[str, Sequence[Finding]]) -> str:
    """With which engines an environment works, and why not with the others."""
    good = [engine for engine, found in errors.items() if not found]
    why = {
        engine: "; ".join(dict.fromkeys(f"{finding.reason} [{finding.code}]" for finding in found))
        for engine, found in errors.items()
        if found
    }
    if not why:
        return f"{name} works with {' and with '.join(good)}"
    bad = ", and not with ".join(f"{engine}, because {text}" for engine, text in why.items())
    return (
        f"{name} works with {good[0]}, not with {bad}"
        if good
        else f"{name} does not work with {bad}"
    )


def _answers(checked: Sequence[Checked]) -> list[dict[str, object]]:
    """What `sarusctl validate` says about each EDF file; empty where sarusctl is not on PATH."""
    if process.which("sarusctl") is None:
        return []
    paths = [one.path.resolve() for one in checked if one.path.suffix == ".toml"]
    answers = [(path, *sarus_store.validate(path)) for path in paths]
    return [{"path": str(path), "valid": valid, "answer": text} for path, valid, text in answers]


def examine(
    args: argparse.Namespace, console: Console
) -> tuple[Setting, list[Checked], tuple[Finding, ...]]:
    """Check the environments; with --fix, change the files first."""
    project = find_project()
    site, why = find_site(args.site, os.environ)
    name, reason = default_environment(project, site)
    names = args.environments
    if not names:
        console.say(f"environment {name} ({reason})")
        names = [name]
    console.say(f"site {site.name} ({why})")
    setting = _setting(args, site, os.environ, console)
    linter = Linter(project, setting)
    checked = [one for name in names for one in linter.check(name)]
    if args.fix:
        checked = _fix(linter, names, checked, console)
    return (
        setting,
        checked,
        tuple(dict.fromkeys(finding for one in checked for finding in one.findings)),
    )


def _list(word: str, console: Console) -> int:
    """Print the codes that contain the word, with their meaning and fix."""
    found = {code: known for code, known in CODES.items() if word in f"{code} {known.title}"}
    if not found:
        raise RunnerError(
            f"no lint code contains {word!r}",
            "runner searched all codes and their meanings",
            "runner env check --list",
        )
    for code, known in ({word: found[word]} if word in found else found).items():
        console.line(f"{code} ({', '.join(known.severities)}): {known.title}\n  try: {known.fix}")
    return 0


def _fix(
    linter: Linter, names: Sequence[str], checked: list[Checked], console: Console
) -> list[Checked]:
    """The findings after fixing what can be fixed. Some findings appear only after others are fixed."""
    for _ in range(_ROUNDS):
        changed = False
        for path, findings in by_file(
            [finding for one in checked for finding in one.findings]
        ).items():
            text = path.read_bytes().decode()
            new, done = fixed(text, path, findings)
            if new != text:
                files.write(path.resolve(), new, keep_mode=True)
                console.say(
                    f"{path}: fixed {', '.join(dict.fromkeys(finding.code for finding in done))}"
                )
                changed = True
        if not changed:
            break
        linter.files.clear()
        checked = [one for name in names for one in linter.check(name)]
    return checked


def _setting(
    args: argparse.Namespace, site: Site, environ: Mapping[str, str], console: Console
) -> Setting:
    """The site, the engine, the version of enroot, and whether this machine belongs to the site."""
    engine, chosen = (args.engine, "as requested") if args.engine else choose(site)
    console.detail(f"engine {engine} ({chosen})")
    pulls_with = engine_of(engine).pulls_with
    here = _is_here(site, environ)
    if not here:
        console.say(
            f"this machine does not look like one of site {site.name}, so files, variables and logins are not checked"
        )
    text = args.enroot or site.versions.get("enroot", "")
    if not text and here and pulls_with == "enroot":
        text = output(("enroot", "version"))
    match = re.search(r"\d+(?:\.\d+)*", text)
    if args.enroot and not match:
        raise RunnerError(
            f"{args.enroot!r} is not a version",
            "a version must consist of numbers and dots",
            "--enroot 4.1.2",
        )
    return Setting(
        site, engine, environ, here, tuple(map(int, match[0].split("."))) if match else None
    )


def _is_here(site: Site, environ: Mapping[str, str]) -> bool:
    """Whether this machine looks like part of the site, so that its files can be checked."""
    detected, _ = find_site(
        None, {name: value for name, value in environ.items() if name != "RUNNER_SITE"}
    )
    if detected.scheduler != site.scheduler:
        return False
    clusters = {word for kind, word in signs(site.name, environ) if kind == "clusters"}
    if clusters and not site.is_local and detected.name != site.name:
        return cluster_name(environ) in clusters
    return detected.name == site.name or detected.name.startswith("generic") or site.is_local


@dataclass(frozen=True)
class _Result:
    """What a call found."""

    setting: Setting
    checked: Sequence[Checked]
    findings: Sequence[Finding]
    answers: Sequence[Mapping[str, object]] = ()
    """of `sarusctl validate`"""
    works: Sequence[Mapping[str, object]] = ()
    """with `both`: the engines with which each environment works"""
    engines: Mapping[Finding, Sequence[str]] = field(default_factory=dict)
    """with `both`: the engines of each finding"""


def _print(args: argparse.Namespace, console: Console, result: _Result) -> None:
    setting, checked, findings = result.setting, result.checked, result.findings
    counts = {
        kind: sum(finding.severity == kind for finding in findings)
        for kind in ("error", "warning", "note")
    }
    if args.json:
        console.answer_json(
            {
                "site": setting.site.name,
                "engine": setting.engine,
                **{f"{kind}s": count for kind, count in counts.items()},
                "environments": [
                    {"name": one.name, "path": str(one.path), "findings": len(one.findings)}
                    for one in checked
                ],
                "findings": [as_data(finding) for finding in findings],
                **({"sarusctl": result.answers} if result.answers else {}),
                **({"works": result.works} if result.works else {}),
            }
        )
        return
    for row in result.works:
        console.line(str(row["verdict"]))
    for finding in findings:
        console.line(str(finding))
        if len(engines := result.engines.get(finding, ())) == 1:
            console.line(f"  only with {engines[0]}")
    for answer in result.answers:
        console.line(f"sarusctl validate: {answer['answer']}")
    what = checked[0].name if len(checked) == 1 else f"{len(checked)} environments and scripts"
    said = ", ".join(
        f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items() if count
    )
    console.say(f"{what} on {setting.site.name} with {setting.engine}: {said or 'no findings'}")
