"""The verbs of the command line as functions: the same code, typed results, errors as RunnerError, nothing printed.

A run is a Run, a name, a job id, `last` or the path of its folder; `*runs` takes sweeps too. See docs/api.md.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli import parse
from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.project import find_project, page
from runner.runs import account as accounts
from runner.runs import cancel as cancelling
from runner.runs import history as launches
from runner.runs.logs import check_ranks, last_lines, merged
from runner.runs.metrics import Curve, read_curves
from runner.runs.progress import metrics_of
from runner.runs.run import Run, find_run, find_runs, list_runs, reloaded
from runner.runs.status import RunStatus, ask, watch
from runner.runs.why.explain import Answer, explain_run

if TYPE_CHECKING:
    from runner.environments.lint.finding import Finding
    from runner.runs.diff import Comparison

Named = Run | str | Path


def launch(
    job: str | None = None, *, args: Sequence[object] = (), **options: object
) -> tuple[Run, ...]:
    """Start a run, or those of a sweep or array. `options` are those of `runner launch`: `nodes=2, time=240`."""
    if wrong := {"dry_run", "help", "json", "parsable", "wait"} & {*options}:
        raise RunnerError(
            f"launch has no option {wrong.pop()!r}",
            "it exists only on the command line: launch() starts the run, prints nothing, and returns at once",
            f"see {page('api')}",
        )
    words = ["launch", *filter(None, [job])]
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and each is not False:
                words.append(f"--{name.replace('_', '-')}" + ("" if each is True else f"={each}"))
    return _start([*words, *(["--", *map(str, args)] if args else [])])


def rerun(run: Named, *, tags: Sequence[str] = (), site: str | None = None) -> Run:
    """Repeat a launch exactly; `run` may also be the path of a lock.toml."""
    word = str(run.folder if isinstance(run, Run) else run)
    return _start(
        ["rerun", word, *(f"--tag={tag}" for tag in tags), *([f"--site={site}"] if site else [])]
    )[0]


def status(*runs: Named, site: str | None = None) -> tuple[RunStatus, ...]:
    """The status of each run; without a run, of the newest 20."""
    return ask(_runs(runs, site) if runs else list_runs(runs_folder(site))[-20:])


def wait(
    *runs: Named, timeout_seconds: float = float("inf"), site: str | None = None
) -> tuple[RunStatus, ...]:
    """The status of each run when all have ended. Raises RunnerError after the timeout, and the runs continue."""
    found, end = _runs(runs, site), time.monotonic() + timeout_seconds

    def pause(seconds: float) -> None:
        if (left := end - time.monotonic()) <= 0:
            raise RunnerError(
                "not all runs have ended",
                f"waited for {timeout_seconds} s",
                "wait longer, or cancel",
            )
        time.sleep(min(seconds, left))

    return watch(lambda: [reloaded(run) for run in found], sleep=pause)


def cancel(*runs: Named, site: str | None = None) -> tuple[tuple[Run, bool], ...]:
    """End runs. Returns each run, and whether this call ended it."""
    return cancelling.cancel(_runs(runs, site), Quiet())


def logs(
    run: Named,
    *,
    ranks: Sequence[int] = (),
    attempt: int | None = None,
    last: int = 0,
    site: str | None = None,
) -> str:
    """The output so far: of all ranks and attempts or of some, or only the `last` lines."""
    found = _run(run, site)
    check_ranks(found, ranks) if ranks else None
    pieces = merged(found, ranks, attempt, last or None)
    return (b"".join(pieces) if last <= 0 else last_lines(pieces, last)).decode(errors="replace")


def why(run: Named = "last", *, site: str | None = None) -> Answer:
    """Why a run failed, waits or is slow."""
    return explain_run(_run(run, site))


def history(
    filters: launches.Filters | None = None, *, site: str | None = None
) -> tuple[launches.Launch, ...]:
    """Past launches that match the filters, oldest first."""
    return tuple(launches.find(list_runs(runs_folder(site)), filters or launches.Filters()))


def account(*runs: Named, site: str | None = None) -> tuple[accounts.Account, ...]:
    """Where the time of each run went, in GPU seconds; in CPU seconds without GPUs."""
    return tuple(accounts.account(run, time.time()) for run in _runs(runs, site))


def metrics(
    run: Named, *names: str, axis: str = "step", site: str | None = None
) -> tuple[Curve, ...]:
    """One curve per metric (default: loss). The axis is `step`, `tokens`, or `hours` since the first step."""
    found = _run(run, site)
    return read_curves(found.name, metrics_of(found), names or ("loss",), axis)


def diff(left: Named, right: Named | None = None, *, site: str | None = None) -> Comparison:
    """The differences between two runs; without `right`, between a run and what its launch would be now."""
    from runner.commands.launch import launch_request
    from runner.runs.diff import compare, run_side, side_now

    run = _run(left, site)
    if right is not None:
        return compare(run_side(run), run_side(_run(right, site)))
    return compare(
        run_side(run), side_now(run, lambda words: launch_request(_quiet(words)[0]), find_project())
    )


def env_check(
    *environments: str, engine: str | None = None, site: str | None = None
) -> tuple[Finding, ...]:
    """What is wrong with environments or batch scripts; without any, with the default environment."""
    from runner.commands.env_check import examine

    args, console, _ = _quiet(["env", "check", *environments])
    args.engine, args.site = engine, site
    return examine(args, console)[2]


def report(*runs: Named, output: str | Path, site: str | None = None) -> Path:
    """Write a page about runs: HTML, or Markdown if the name of the file ends in `.md`. Returns its absolute path."""
    names = [str(each.folder if isinstance(each, Run) else each) for each in runs]
    form = ["--md"] if Path(output).suffix == ".md" else []
    args, console, answers = _quiet(["report", *names, f"--output={output}", *form])
    args.site = site
    args.run(args, console)
    return Path(answers[0])


def _start(words: Sequence[str]) -> tuple[Run, ...]:
    """Carry out `runner launch` or `runner rerun`."""
    args, console, answers = _quiet(words)
    args.run(args, console)
    return find_runs(answers[0], runs_folder(args.site))


def _quiet(words: Sequence[str]) -> tuple[argparse.Namespace, Console, list[str]]:
    """A parsed command, a console whose messages go to the logger `runner`, and the list that takes its answers."""
    args, console, answers = parse(words), Console(), list[str]()
    assert args is not None  # only --help and --version give None
    vars(console).update(
        terminal=False, answer=answers.append, _write=logging.getLogger("runner").info
    )
    return args, console, answers


def _run(run: Named, site: str | None) -> Run:
    return reloaded(run) if isinstance(run, Run) else find_run(str(run), runs_folder(site))


def _runs(runs: Sequence[Named], site: str | None) -> list[Run]:
    found = (
        [_run(run, site)] if isinstance(run, Run) else find_runs(str(run), runs_folder(site))
        for run in runs
    )
    return [run for some in found for run in some]
