"""`runner why`: from a run, or from logs that others' runs left, to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.errors import RunnerError
from runner.runs.run import Run
from runner.runs.state import status
from runner.runs.why import cause as causes
from runner.runs.why import run_logs, telling
from runner.runs.why.answer import Answer
from runner.runs.why.cause import EXCEPTION, EXIT, PENDING, SYMPTOM, Cause
from runner.runs.why.evidence import Evidence, Reading, Source, read_log
from runner.runs.why.judge import Verdict, judge
from runner.runs.why.progress import Pace, pace

# states after which Slurm's word is worth more than an exception that may be its consequence
_STRONG_STATES = {"NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
_ENDED_WELL = {"COMPLETED"}
_WAITING = {"PENDING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


def explain_logs(paths: Sequence[Path]) -> Answer:
    """Why the job that wrote these logs failed. Raises RunnerError for a file that cannot be read."""
    readings = [read_log(Source(path)) for path in paths]
    for reading in readings:
        if reading.scan.trouble:
            raise RunnerError(
                f"cannot read the log {str(reading.source.path)!r}",
                reading.scan.trouble,
                "name files that you may read",
            )
    verdict = judge(readings)
    answer = _noted(Answer(", ".join(map(str, paths)), slow=verdict.slow), readings, None)
    answer = _from_logs(answer, verdict, readings)
    if answer.cause is None:
        found = telling.lines([reading.source for reading in readings])
        answer = replace(answer, telling=found, fine=not found)
    return answer


def explain_run(run: Run) -> Answer:
    """Why a run failed, waits or is slow."""
    now = status.ask([run])[0]
    answer = Answer(run.name, _state_text(now))
    if now.state in _WAITING:
        return _waiting(answer, now)
    readings = [read_log(source) for source in run_logs.sources(run)]
    verdict = judge(readings)
    running = now.active
    speed = pace(run.folder / "metrics.jsonl", running=now.state == "RUNNING")
    answer = _noted(replace(answer, slow=verdict.slow), readings, speed)
    if now.state in _ENDED_WELL:
        return replace(answer, fine=True)
    if running and (speed is None or not speed.stuck):
        return _running(answer, verdict, readings)
    answer = _weigh(answer, verdict, readings, now)
    answer = _first_failure(answer, run)
    if answer.cause is None and speed is not None and speed.stuck:
        answer = replace(answer, cause=causes.by_word(EXIT, "stuck"), evidence="metrics.jsonl", line=speed.note)
    if answer.cause is None:
        answer = _by_exit_code(answer, now, run)
    if answer.cause is None or answer.cause.kind == EXIT:
        answer = replace(answer, telling=telling.lines([reading.source for reading in readings]))
    return answer


def _state_text(now: status.RunStatus) -> str:
    code = "" if now.exit_code is None else f", exit code {now.exit_code}"
    attempt = len(now.run.attempts)
    return f"{now.state}{code}{f', attempt {attempt}' if attempt > 1 else ''}{f' ({now.reason})' if now.reason else ''}"


def _waiting(answer: Answer, now: status.RunStatus) -> Answer:
    """Why a job waits: the reason that squeue gives, which may carry more in brackets or behind a comma."""
    word = now.reason.split(",")[0].split("(")[0].strip()
    cause = causes.by_word(PENDING, word) or (causes.by_word(PENDING, "*") if word else causes.by_word(PENDING, ""))
    return replace(answer, cause=cause, evidence="squeue", line=f"Reason={now.reason or 'None'}")


def _running(answer: Answer, verdict: Verdict, readings: Sequence[Reading]) -> Answer:
    """A run that goes on: what has gone wrong in it, if anything did, else what costs time."""
    if verdict.first is not None and verdict.first.cause.kind != SYMPTOM:
        return _from_logs(answer, verdict, readings)
    return replace(answer, fine=True)


def _weigh(answer: Answer, verdict: Verdict, readings: Sequence[Reading], now: status.RunStatus) -> Answer:
    """The logs' cause, or Slurm's, where that one explains more."""
    told = causes.by_state(now.state)
    first = verdict.first
    stronger = first is not None and (
        (now.state in _STRONG_STATES and first.cause.kind == EXCEPTION)
        or (told is not None and told.code in first.cause.yields)
    )
    if told is not None and (first is None or first.cause.kind == SYMPTOM or stronger):
        found = next((each for reading in readings for each in reading.evidence if each.cause == told), None)
        if found is None:
            shown = f"JobState={now.state}{f' Reason={now.reason}' if now.reason else ''}"
            followed = _all(verdict)
            return replace(answer, cause=told, evidence="Slurm", line=shown, node=now.nodes, followed=followed)
    return _from_logs(answer, verdict, readings)


def _all(verdict: Verdict) -> tuple[tuple[Evidence, int], ...]:
    return ((verdict.first, 1), *verdict.followed) if verdict.first else verdict.followed


def _from_logs(answer: Answer, verdict: Verdict, readings: Sequence[Reading]) -> Answer:
    first = verdict.first
    if first is None:
        return answer
    rank, node = first.rank, first.node
    for reading in readings:
        if reading.first_rank is not None and (rank is None or first.cause.kind == SYMPTOM):
            rank, node = reading.first_rank, node or reading.first_node
    return replace(
        answer, cause=first.cause, evidence=first.place, line=first.text, first=first, rank=rank, node=node,
        followed=verdict.followed, slow=verdict.slow,
    )  # fmt: skip


def _first_failure(answer: Answer, run: Run) -> Answer:
    """The rank that the run folder noted as the first, where the evidence names none."""
    noted = run_logs.first_failure(run)
    if noted is None or answer.cause is None or answer.rank is not None:
        return answer
    _, rank, node = noted
    return replace(answer, rank=rank, node=answer.node or f"node {node}")


def _by_exit_code(answer: Answer, now: status.RunStatus, run: Run) -> Answer:
    code = now.exit_code
    cause: Cause | None = causes.by_word(EXIT, str(code)) if code else None
    if cause is None:
        return answer
    noted = run_logs.first_failure(run)
    place = str(run.attempts[-1] / "exit_code") if run.attempts else "Slurm"
    return replace(answer, cause=cause, evidence=place, line=f"exit code {code}", rank=noted[1] if noted else None)


def _noted(answer: Answer, readings: Sequence[Reading], speed: Pace | None) -> Answer:
    notes = [speed.note] if speed and speed.note else []
    for reading in readings:
        if reading.scan.trouble:
            notes.append(f"cannot read {reading.source.path}: {reading.scan.trouble}")
        if reading.scan.skipped_bytes:
            notes.append(f"{reading.source.path}: {reading.scan.skipped_bytes >> 20} MiB in its middle were not read")
    return replace(answer, notes=tuple(notes))
