"""A report of runs, as a page that loads nothing or as Markdown. What is missing or damaged becomes a note."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from runner import __version__
from runner.errors import RunnerError
from runner.machine import process
from runner.runs import diff, payload
from runner.runs.account import NAMES, Account, account
from runner.runs.advice import advice
from runner.runs.attempt import NodeUsage
from runner.runs.history import look
from runner.runs.metrics import Curve, Metrics, newest_records, read_curves, records
from runner.runs.plot import short_number
from runner.runs.progress import metrics_of
from runner.runs.run import Run
from runner.runs.status import RunStatus
from runner.runs.why.explain import Answer, explain_run

MARK = "<!-- a report of runner -->"
METRICS = (
    "loss",
    "eval_loss",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "grad_norm",
    "memory_bytes",
)
USE: dict[str, Callable[[NodeUsage], float | None]] = {
    "gpu_percent": lambda use: _known(fmean, (gpu.percent for gpu in use.gpus)),
    "gpu_memory_mib": lambda use: _known(max, (gpu.memory_used_mib for gpu in use.gpus)),
    "gpu_watts": lambda use: _known(sum, (gpu.power_watts for gpu in use.gpus)),
    "cpu_percent": lambda use: use.cpu_percent,
    "node_memory_mib": lambda use: use.memory_used_mib,
}
MOST_NODES = 8
MOST_BYTES = 700_000
# (buckets of each curve, runs with details, runs in the table): the report has the first that is small enough, or the
# last
_SIZES = (
    (2000, 20, 1000),
    (1000, 20, 800),
    (400, 20, 500),
    (150, 20, 500),
    (100, 4, 100),
)
_DAMAGE = (
    RunnerError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
T = TypeVar("T")


@dataclass(frozen=True)
class RunReport:
    """What a report shows of one run. Empty: not known, or not there."""

    status: RunStatus
    program: str
    side: diff.Side | None
    curves: Mapping[str, Curve]
    """metric -> curve; for the use of the nodes: `METRIC NODE`, or `METRIC mean`, `METRIC lowest`, `METRIC highest`"""
    account: Account | None
    answer: Answer | None
    checkpoints: tuple[list[str], ...]
    """(state, step, path), newest first"""
    samples: Sequence[Mapping[str, Any]]
    usage: tuple[NodeUsage, ...]
    notes: tuple[str, ...] = ()
    """what is missing or damaged"""

    def record(self) -> dict[str, object]:
        """What --json prints."""
        return {
            **self.status.record(),
            "program": self.program,
            "lock": self.side and self.side.tables,
            "account": self.account and self.account.record(),
            "why": self.answer and self.answer.record(),
            "checkpoints": self.checkpoints,
            "usage": [each.record() for each in self.usage],
            "notes": self.notes,
        }


def read_report(status: RunStatus, *, alone: bool = False) -> RunReport:
    """The report of a run. `alone`: the page is about no other run, so it shows the use of each node."""
    run, notes, empty = status.run, list[str](), dict[str, Curve]()

    def read(what: str, function: Callable[[Run], T], default: T) -> T:
        try:
            return function(run)
        except _DAMAGE as error:
            reason = (
                f"{error.what}: {error.why}"
                if isinstance(error, RunnerError)
                else f"{error!r:.300}"
            )
            notes.append(f"{what}: {reason}")
            return default

    found = RunReport(
        status,
        read("program", lambda run: look(run).program, ""),
        read("lock.toml", diff.run_side, None),
        {
            **read("metrics.jsonl", lambda run: _curves(run, notes), empty),
            **read("usage-log", lambda run: _use(run, alone=alone), empty),
        },
        read("account", lambda run: account(run, time.time()), None),
        None if status.state in ("PREPARING", "COMPLETED") else read("why", explain_run, None),
        read("checkpoints", _checkpoints, ()),
        read(
            "samples.jsonl",
            lambda run: newest_records(Metrics.of_file(run.folder / "samples.jsonl"), 1 << 20)[
                -20:
            ],
            (),
        ),
        read("usage", lambda run: run.newest.usage if run.newest else (), ()),
    )
    return replace(
        found, notes=tuple(dict.fromkeys([*notes, *(found.account.notes if found.account else ())]))
    )


def _curves(run: Run, notes: list[str]) -> dict[str, Curve]:
    bad: list[bytes] = []
    metrics = metrics_of(run)
    found = read_curves(run.name, metrics, METRICS, damaged=bad)
    left_out = [(f"values of {each.metric} that are not finite", each.left_out) for each in found]
    left_out.append(("lines that cannot be read", len(bad)))
    notes += [f"{metrics.name}: {what} are left out ({count})" for what, count in left_out if count]
    if not found:
        notes.append(f"{metrics.name}: there is no training step, so there are no curves")
    return {curve.metric: curve for curve in found if curve.points}


def _use(run: Run, *, alone: bool) -> dict[str, Curve]:
    """The use of the nodes by step: a sample belongs to the newest step of its minute."""
    entries = records(metrics_of(run))
    known = [
        (each["time"], each["step"])
        for each in entries
        if type(each.get("step")) is int and each.get("time")
    ]
    samples = [sample for attempt in run.attempts for sample in attempt.usage_log]
    each_node = alone and len({use.node for _, use in samples}) <= MOST_NODES
    values: dict[tuple[str, str], dict[int, list[float]]] = {}
    for at, use in samples:
        index = bisect(known, (at // 60 * 60 + 60,)) - 1
        for metric, value_of in USE.items() if index >= 0 else ():
            if (value := value_of(use)) is not None:
                steps = values.setdefault((metric, use.node if each_node else ""), {})
                steps.setdefault(known[index][1], []).append(value)
    ways: dict[str, Callable[[list[float]], float]] = {"lowest": min, "mean": fmean, "highest": max}
    return {
        (name := f"{metric} {node or way}"): Curve(
            run.name, name, tuple((at, of(steps[at])) for at in sorted(steps))
        )
        for (metric, node), steps in values.items()
        for way, of in ways.items()
        if way == "mean" or (alone and not each_node)
    }


def _known(function: Callable[[list[int]], float], values: Iterable[int | None]) -> float | None:
    """The function of the values that are known; None if none is."""
    found = [value for value in values if value is not None]
    return function(found) if found else None


def _checkpoints(run: Run) -> tuple[list[str], ...]:
    script = payload.files()[f"{payload.FOLDER}/checkpoints.sh"] + "list_checkpoints 50"
    done = process.run(("bash", "-c", script), cwd=run.folder, timeout_seconds=60, check=False)
    return tuple(
        words for line in done.stdout.splitlines() if len(words := line.split(" ", 2)) == 3
    )


def thinned(points: Sequence[tuple[float, float]], buckets: int) -> list[tuple[float, float]]:
    """The lowest and the highest point of each bucket, and the first and the last point; all if they are few."""
    if len(points) <= 2 * buckets:
        return list(points)
    first, width = points[0][0], (points[-1][0] - points[0][0]) / buckets
    kept = {points[0], points[-1]}
    for _, same in groupby(points, lambda point: min(int((point[0] - first) / width), buckets - 1)):
        some = sorted(same, key=lambda point: point[1])
        kept |= {some[0], some[-1]}
    return sorted(kept)


def chart_data(reports: Sequence[RunReport], buckets: int) -> dict[str, object]:
    """What the page's script draws. `x`: the first step, then distances; `y`: six digits of each value."""
    charts: dict[str, list[dict[str, object]]] = {metric: [] for metric in (*METRICS, *USE)}
    runs = []
    for number, report in enumerate(reports):
        causes = {attempt.number + 1: attempt.cause for attempt in report.status.run.attempts}
        starts = {n: place for curve in report.curves.values() for n, place in curve.attempts}
        marks = [
            {"number": n, "x": place, "cause": causes.get(n, "")}
            for n, place in sorted(starts.items())
        ]
        runs.append({"name": report.status.run.name, "marks": marks})
        for name, curve in report.curves.items():
            metric, _, node = name.partition(" ")
            points = thinned(curve.points, buckets)
            low, high = (pick(points, key=lambda point: point[1]) for pick in (min, max))
            steps = [
                x - before for (x, _), (before, _) in zip(points, [(0, 0), *points], strict=False)
            ]
            x, y = " ".join(map(str, steps)), " ".join(f"{y:.6g}" for _, y in points)
            charts[metric].append(
                {
                    "run": number,
                    "node": node,
                    "x": x,
                    "y": y,
                    "count": len(curve.points),
                    "first": points[0],
                    "last": points[-1],
                    "low": low,
                    "high": high,
                }
            )
    return {
        "charts": [{"metric": metric, "series": each} for metric, each in charts.items() if each],
        "runs": runs,
    }


def differences(
    reports: Sequence[RunReport],
) -> tuple[dict[tuple[str, str], list[list[str]]], list[str]]:
    """(kind, name) -> values of each run, for what is not equal in all runs; and what could not be compared."""
    sides = [(number, report.side) for number, report in enumerate(reports) if report.side]
    rows: dict[tuple[str, str], list[list[str]]] = {}
    left_out = [
        f"{each.status.run.name}: its lock.toml cannot be read" for each in reports if not each.side
    ]
    for number, side in sides[1:]:
        found = diff.compare(sides[0][1], side)
        left_out += found.left_out
        for each in found.differences:
            cells = rows.setdefault((each.kind, each.name), [[] for _ in reports])
            cells[sides[0][0]] = list(dict.fromkeys([*cells[sides[0][0]], diff.shown(each.left)]))
            cells[number].append(diff.shown(each.right))
    return rows, list(dict.fromkeys(left_out))


def render(
    kind: str,
    statuses: Sequence[RunStatus],
    reports: Sequence[RunReport],
    filters: Mapping[str, Callable[..., Any]],
) -> str:
    """The report as `html` or `md`. `reports` are those of the last runs in `statuses`."""
    import jinja2  # slow to import

    visible = filters["visible"]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    when = {
        "when": lambda at: str(datetime.fromtimestamp(at))[:19] if at else "",
        "words": shlex.join,
        **filters,
    }
    environment.filters |= {"number": short_number, "shown": diff.shown, "plain": _plain, **when}
    folder = Path(__file__).resolve().parent
    texts = {
        path.name.replace(".", "_"): path.read_text("utf-8")
        for path in folder.iterdir()
        if path.is_file()
    }
    template = environment.from_string(texts[f"page_{kind}_j2"])
    code = f"/*\n{texts['uPlot_LICENSE']}*/\n{texts['uPlot_min_js']}\n{texts['page_js']}"
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    for buckets, detailed, listed in _SIZES:
        some = reports[-detailed:]
        text = template.render(
            mark=MARK,
            version=__version__,
            now=time.time(),
            classes=NAMES,
            advice=advice,
            digest=digest,
            code=code,
            css=texts["uPlot_min_css"] + texts["page_css"],
            count=len(statuses),
            statuses=statuses[-listed:],
            reports=some,
            data=chart_data(some, buckets),
            differences=differences(some) if 1 < len(reports) <= 8 else ({}, []),
            buckets=buckets,
        )
        if len(text.encode(errors="backslashreplace")) <= MOST_BYTES:
            break
    return text


def _plain(text: str) -> str:
    """Text for one line of Markdown that is shown as it is, and mentions no user."""
    special = re.compile(r"[^\w \-./,=+%]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
    return special.sub(lambda found: f"&#{ord(found[0])};", " ".join(text.split())).replace(
        "&#64;", "&#64;&#8203;"
    )
