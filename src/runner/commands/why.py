"""why: what broke a run, keeps it waiting or makes it slow."""

from __future__ import annotations

import argparse
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.machine import files
from runner.runs.run import find_run
from runner.runs.why import explain
from runner.runs.why.cause import all_causes
from runner.runs.why.explain import Answer

_LINE = 300  # longest part of an evidence line to show, in characters; --json prints it whole
_LISTED = ("code", "kind", "says", "explanation", "fix")


def show_why(args: argparse.Namespace, console: Console) -> int:
    """`runner why`: print the cause, its evidence and the fix. Exit code 1 if no cause is known."""
    if args.list is not None:
        return _list(args.list, console, json=args.json)
    if args.log and args.run_word:
        raise RunnerError(
            "why: both a run and --log are given",
            "runner finds the logs of a run by itself",
            "leave out one of the two",
            exit_code=2,
        )
    if args.log:
        answer = explain.explain_logs([Path(name) for name in args.log])
    else:
        answer = _explain(args.run_word or "last", runs_folder(args.site))
    if args.json:
        console.answer_json(answer.record())
    else:
        for line in answer_lines(answer):
            console.line(line)
    return 0 if answer.known else 1


def _explain(word: str, folder: Path) -> Answer:
    """The answer for a run; a word that names no run, but a file, names a log."""
    try:
        run = find_run(word, folder)
    except RunnerError:
        log = Path(word).expanduser()
        if files.is_file(log):
            return explain.explain_logs([log])
        raise
    return explain.explain_run(run)


def _list(word: str, console: Console, *, json: bool) -> int:
    """Print the causes whose code or description contains the word; a single cause with its reason and fix."""
    found = [
        cause for cause in all_causes() if word.lower() in f"{cause.code} {cause.says}".lower()
    ]
    found = [cause for cause in found if cause.code == word] or found
    if not found:
        raise RunnerError(
            f"no cause contains {word!r}",
            "runner searched all codes and descriptions",
            "runner why --list",
        )
    if json:
        console.answer_json([{name: getattr(cause, name) for name in _LISTED} for cause in found])
        return 0
    for cause in found:
        console.line(f"{cause.code}: {cause.says}")
    if len(found) == 1:
        console.line(f"  because: {found[0].explanation}")
        console.line(f"  try:     {found[0].fix}")
    return 0


def answer_lines(answer: Answer) -> list[str]:
    """The answer as text, for people."""
    shown = [f"{answer.subject}: {answer.state}" if answer.state else answer.subject]
    if answer.cause is not None:
        shown += _cause_lines(answer)
    elif answer.fine:
        shown.append("cause:    none: no line shows a failure")
    else:
        shown.append("cause:    unknown: no line of the logs matches a known cause")
    if answer.telling:
        shown.append("lines:    the most informative lines")
        shown += [f"          {each.place}: {each.text[:_LINE]}" for each in answer.telling]
    elif answer.last:
        shown.append(
            f"lines:    no line reports an error; these are the last lines of {answer.last[0].path}"
        )
        shown += [f"          {each.text[:_LINE]}" for each in answer.last]
    if answer.hint:
        shown.append(f"try:      {answer.hint}")
    if answer.cause is None:
        shown += _followed(answer)
    for each in answer.slow:
        shown += [
            f"slow:     {each.cause.code}: {each.cause.says}",
            f"          {each.place}: {each.text[:_LINE]}",
        ]
        shown += [f"  try:    {each.cause.fix}"]
    return [*shown, *(f"note:     {note}" for note in answer.notes)]


def _cause_lines(answer: Answer) -> list[str]:
    assert answer.cause is not None
    where = [f"rank {answer.rank}"] if answer.rank is not None else []
    where += [answer.node] if answer.node else []
    where += (
        [f"{answer.first.time:%Y-%m-%d %H:%M:%S}"] if answer.first and answer.first.time else []
    )
    shown = [
        f"cause:    {answer.cause.code}: {answer.cause.says}",
        f"evidence: {answer.evidence}: {answer.line[:_LINE]}",
    ]
    if where:
        shown.append(f"first:    {', '.join(where)}")
    if answer.first and (frame := answer.first.frame):
        inside = f" in {frame.function}" if frame.function else ""
        shown.append(
            f"code:     {frame.file}:{frame.line}{inside}{f': {frame.code}' if frame.code else ''}"
        )
    shown += [f"because:  {answer.cause.explanation}", f"try:      {answer.cause.fix}"]
    return [*shown, *_followed(answer)]


def _followed(answer: Answer) -> list[str]:
    return [
        f"then:     {each.cause.code} ({f'{count} lines, ' if count > 1 else ''}{each.place})"
        for each, count in answer.followed
    ]
