"""`runner why`: explain a run, or the logs of any job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.errors import RunnerError
from runner.runs import status
from runner.runs.attempt import begins
from runner.runs.metrics import Pace, pace
from runner.runs.progress import metrics_of, unread
from runner.runs.run import Run
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.schedulers.slurm_commands import SUBMIT
from runner.runs.why import evidence
from runner.runs.why.cause import (
    CAUSE,
    EXCEPTION,
    EXIT,
    PENDING,
    SLOW,
    SUMMARY,
    SYMPTOM,
    Cause,
    by_state,
    by_word,
)
from runner.runs.why.evidence import NCCL_WARNING, Evidence, Reading, Source, read_log

# states that explain more than an exception in the log, which may be a consequence
_STRONG_STATES = {"NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
_PYTHON = "python"  # the subject of missing modules, files and attributes
_NCCL = "nccl"
_NO_REASONS = {_PYTHON, "launch", _NCCL, "slurm"}  # of an exception that followed one of those
_WAITING = {"PENDING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


def explain_logs(paths: Sequence[Path]) -> Answer:
    """Why the job that wrote these logs failed. Raises RunnerError for a file that cannot be read."""
    readings = [read_log(Source(path)) for path in paths]
    for reading in readings:
        if reading.scan.trouble:
            raise RunnerError(
                f"cannot read the log {str(reading.source.path)!r}",
                reading.scan.trouble,
                "give log files that you can read",
            )
    verdict = judge(readings)
    answer = _noted(Answer(", ".join(map(str, paths)), slow=verdict.slow), readings, None)
    answer = _with_lines(_from_logs(answer, verdict.first, verdict, readings), verdict, readings)
    if answer.cause is None and not answer.telling:
        return replace(answer, fine=True, last=())
    return _filled(answer)


def explain_run(run: Run) -> Answer:
    """Why a run failed, waits or is slow."""
    now = status.ask([run])[0]
    answer = Answer(run.name, _state_text(now))
    if now.state in _WAITING:
        return _filled(_waiting(answer, now), run)
    readings = [read_log(source) for source in sources(run)]
    verdict = judge(readings)
    metrics = metrics_of(run)
    speed = pace(metrics, running=now.state == "RUNNING")
    answer = _noted(replace(answer, slow=verdict.slow), readings, speed)
    if now.progress is None and (trainer := unread(run)):
        note = (
            f"runner has found no step of the trainer {trainer} in the log; "
            "at the next launch, leave out the trainer, so that runner recognizes it"
        )
        answer = replace(answer, notes=(*answer.notes, note))
    restarts = tuple(f"attempt {rung.attempt}: {rung.reason}" for rung in now.rungs[-3:])
    answer = replace(answer, notes=(*answer.notes, *restarts))
    if now.state == "COMPLETED":
        return replace(answer, fine=True)
    stuck = speed is not None and speed.stuck
    if now.active and not stuck:
        broke = verdict.first is not None and verdict.first.cause.kind != SYMPTOM
        answer = (
            _from_logs(answer, verdict.first, verdict, readings)
            if broke
            else replace(answer, fine=True)
        )
        return _filled(answer, run)
    if now.state == "CANCELLED":
        return _filled(_cancelled(answer, verdict, readings, now), run)
    answer = _first_failure(_weigh(answer, verdict, readings, now), run)
    if answer.cause is None and speed is not None and speed.stuck:
        answer = replace(
            answer, cause=by_word(EXIT, "stuck"), evidence=metrics.name, line=speed.note
        )
    answer = _with_lines(_by_exit_code(answer, now, run), verdict, readings)
    if answer.cause is None:
        answer = replace(answer, hint=f"`runner logs {run.name}` prints the whole output")
    return _filled(answer, run)


def _with_lines(answer: Answer, verdict: Verdict, readings: Sequence[Reading]) -> Answer:
    """The answer, with the most relevant log lines if the cause says little, or else with a summary such as srun's."""
    if answer.cause is not None and answer.cause.kind not in (EXIT, SYMPTOM):
        return answer
    sources = [reading.source for reading in readings]
    answer = replace(answer, telling=evidence.telling_lines(sources))
    if answer.cause is not None or answer.telling:
        return answer if answer.cause else replace(answer, followed=verdict.followed)
    if verdict.summary is not None:
        return _from_logs(answer, verdict.summary, verdict, readings)
    return replace(answer, last=evidence.last_lines(sources))


def _filled(answer: Answer, run: Run | None = None) -> Answer:
    """The answer with the placeholders of the fix replaced by known values."""
    if answer.cause is None:
        return answer
    values = answer.first.cause.placeholders(answer.first.text) if answer.first else {}
    if answer.rank is not None:
        values["N"] = str(answer.rank)
    if answer.node and re.fullmatch(r"[\w.-]+", answer.node):
        values["NODE"] = answer.node
    cause = answer.cause
    if run is not None:
        by_hand = f"cd RUN_FOLDER && {scheduler_of(run.scheduler).BY_HAND}"
        if (run.folder / SUBMIT).is_file():
            cause, by_hand = cause.for_own_script(), f"bash RUN_FOLDER/{SUBMIT}"
        cause = cause.for_scheduler(by_hand, is_local=run.is_local)
        known = {
            "RUN": run.name,
            "RUN_FOLDER": str(run.folder),
            "ENV": run.environment,
            "ID": run.job_id,
        }
        values |= {name: value for name, value in known.items() if value}
    return replace(answer, cause=cause.filled(values))


def _state_text(now: status.RunStatus) -> str:
    code, attempt = now.exit_code, len(now.run.attempts)
    reason = now.told_reason
    if now.active and code is not None:  # the code is that of the attempt before the next one
        return f"{now.state}{reason}, after attempt {attempt} ended with exit code {code}"
    ended = "" if code is None else f", exit code {code}"
    return f"{now.state}{ended}{f', attempt {attempt}' if attempt > 1 else ''}{reason}"


def _waiting(answer: Answer, now: status.RunStatus) -> Answer:
    """Why a job waits: squeue's reason, which may be followed by details in brackets or after a comma."""
    word = now.reason.split(",")[0].split("(")[0].strip()
    cause = (
        by_word(PENDING, word)
        or by_word(PENDING, word.replace(" ", "_"))  # scontrol writes underscores for blanks
        or by_word(PENDING, "*")
    )
    return replace(answer, cause=cause, evidence="squeue", line=f"Reason={now.reason or 'None'}")


def _cancelled(
    answer: Answer, verdict: Verdict, readings: Sequence[Reading], now: status.RunStatus
) -> Answer:
    """Explain a cancelled run: the cancellation is the cause. An earlier error in the logs becomes a note."""
    if now.reason.startswith("not started"):
        never = by_word(PENDING, "DependencyNeverSatisfied")
        return replace(answer, cause=never, evidence="run folder", line=now.reason)
    told = by_state(now.state)
    lines = [each for reading in readings for each in reading.evidence if each.cause == told]
    first = verdict.first if verdict.first and verdict.first.cause != told else None
    if (
        first is not None
        and first.cause.kind == CAUSE
        and not (lines and lines[0].order < first.order)
    ):
        note = f"before that, {first.place} shows {first.cause.code}: {first.cause.says}"
        answer = replace(answer, notes=(*answer.notes, note))
    followed = tuple(each for each in _all(verdict) if each[0].cause != told)
    answer = replace(answer, cause=told, followed=followed)
    if lines:
        return replace(
            answer, evidence=lines[0].place, line=lines[0].text, first=lines[0], node=lines[0].node
        )
    return replace(
        answer, evidence=scheduler_of(now.run.scheduler).STATE_SOURCE, line=_state_line(now)
    )


def _state_line(now: status.RunStatus) -> str:
    return f"JobState={now.state}{f' Reason={now.reason}' if now.reason else ''}"


def _weigh(
    answer: Answer, verdict: Verdict, readings: Sequence[Reading], now: status.RunStatus
) -> Answer:
    """The cause from the logs, or from Slurm's state if that explains more."""
    told = by_state(now.state)
    first = verdict.first
    stronger = first is not None and (
        (now.state in _STRONG_STATES and first.cause.kind == EXCEPTION)
        or (told is not None and told.code in first.cause.yields)
    )
    if told is not None and (first is None or first.cause.kind == SYMPTOM or stronger):
        found = next(
            (each for reading in readings for each in reading.evidence if each.cause == told), None
        )
        if found is None:
            return replace(
                answer,
                cause=told,
                evidence="Slurm",
                line=_state_line(now),
                node=now.nodes,
                followed=_all(verdict),
            )
        first = found
    return _from_logs(answer, first, verdict, readings)


def _all(verdict: Verdict) -> tuple[tuple[Evidence, int], ...]:
    return ((verdict.first, 1), *verdict.followed) if verdict.first else verdict.followed


def _from_logs(
    answer: Answer, first: Evidence | None, verdict: Verdict, readings: Sequence[Reading]
) -> Answer:
    if first is None:
        return answer
    rank, node = first.rank, first.node
    for reading in readings:
        if reading.first_rank is not None and (
            rank is None or first.cause.kind in (SYMPTOM, SUMMARY)
        ):
            rank, node = reading.first_rank, node or reading.first_node
    return replace(
        answer,
        cause=first.cause,
        evidence=first.place,
        line=first.text,
        first=first,
        rank=rank,
        node=node,
        followed=tuple(each for each in _all(verdict) if each[0].cause.code != first.cause.code),
        slow=verdict.slow,
    )


def _first_failure(answer: Answer, run: Run) -> Answer:
    """If the evidence names no rank, add the rank that the run folder recorded as the first to fail."""
    noted = run.newest.first_failure if run.newest else None
    if noted is None or answer.cause is None or answer.rank is not None:
        return answer
    return replace(answer, rank=noted.rank, node=answer.node or f"node {noted.node}")


def _by_exit_code(answer: Answer, now: status.RunStatus, run: Run) -> Answer:
    """The cause from the exit code, if the logs indicate none, or one that yields to it."""
    code = now.exit_code
    cause: Cause | None = by_word(EXIT, str(code)) if code else None
    if cause is None or (answer.cause is not None and cause.code not in answer.cause.yields):
        return answer
    newest = run.newest
    place = str(newest.folder / "exit_code") if newest else "Slurm"
    rank = newest.first_failure.rank if newest and newest.first_failure else None
    return replace(
        answer, cause=cause, evidence=place, line=f"exit code {code}", first=None, rank=rank
    )


def _noted(answer: Answer, readings: Sequence[Reading], speed: Pace | None) -> Answer:
    notes = [speed.note] if speed and speed.note else []
    for reading in readings:
        if reading.scan.trouble:
            notes.append(f"cannot read {reading.source.path}: {reading.scan.trouble}")
        if reading.scan.skipped_bytes:
            notes.append(
                f"{reading.source.path}: {reading.scan.skipped_bytes >> 20} MiB in the middle were not read"
            )
    return replace(answer, notes=tuple(notes))


def sources(run: Run) -> tuple[Source, ...]:
    """The logs to read, job.log first."""
    newest = run.newest
    if newest and newest.outputs:
        return tuple(Source(path, begin) for path, begin in newest.outputs)
    # of job.log, only the newest attempt
    marks = begins(run.log) if len(run.attempts) > 1 else []
    found = [Source(run.log, marks[-1][1] if marks else 0)] if run.log.is_file() else []
    logs = newest.logs(run.processes_per_node) if newest else ()
    # the preflight's messages are in job.log too
    found += [
        Source(log.path, rank=log.rank)
        for log in logs
        if not log.path.name.startswith("preflight-")
    ]
    return tuple(each for each in found if each.path.stat().st_size)


_BEFORE_LINES, _AFTER_LINES = (
    60,
    12,
)  # libraries often print the reason a few lines before or after the exception
_WAITED = {
    "nccl-timeout",
    "hang",
}  # what a rank says after minutes: the failure that it waited for is older
_ENDED = {"cancelled"}  # what follows is how the programs ended
_LEFT = {"peer-closed", "nccl-remote-error"}  # what a rank says when another one has died
_TOLD = {"told-to-end"}  # what a rank says when others end it
_ALSO_LATER = {
    "gpu",
    "slurm",
    "restart",
}  # subjects of messages that may come minutes after the fault
_DEATHS = {
    "killed-rank",
    "segmentation-fault",
    "illegal-instruction",
    "mpi-daemons",
}  # others report them
_NO_START = {
    "rendezvous-timeout",
    "gloo-connect",
    "nccl-connect",
}  # what the others say if a node did not start
_NO_TOOLS = {
    "module-missing",
    "library-missing",
    "undefined-symbol",
    "glibc",
    "program-missing",
    "compiler-missing",
}
_NO_FILES = {"file-missing", "script-missing", "data-missing", "shell-file-missing", "edf-missing"}
# after these, the shell goes on without some tools or in another folder: what it lacks then is a consequence
_SHELL = {
    **dict.fromkeys(("module-command", "shell-file-missing", "conda"), _NO_TOOLS),
    "shell-folder-missing": _NO_TOOLS | _NO_FILES,
}
# what the messages of other tools explain
_TOOLS = _NO_TOOLS | _NO_FILES | _NO_START | {"build-failed", "compile-failed", "deepspeed-op"}


@dataclass(frozen=True)
class Verdict:
    """The cause, its consequences, and what only cost time."""

    first: Evidence | None
    """a cause, an exception or a symptom"""
    summary: Evidence | None
    """a line that reports only that something ended; used if nothing else is known"""
    followed: tuple[tuple[Evidence, int], ...]
    """the first evidence for each other code, and the number of its lines"""
    slow: tuple[Evidence, ...]


def judge(readings: Sequence[Reading]) -> Verdict:
    """The verdict over all logs of an attempt."""
    everything = sorted(
        (each for reading in readings for each in reading.evidence), key=lambda each: each.order
    )
    fatal = [each for each in everything if not each.survived]
    broken = [each for each in fatal if each.cause.kind in (CAUSE, EXCEPTION)]
    symptoms = [each for each in fatal if each.cause.kind == SYMPTOM]
    summaries = [each for each in fatal if each.cause.kind == SUMMARY]
    broken = broken or _died_alone(everything, symptoms, summaries, readings)
    all_broken, broken = broken, _without_warnings(broken, symptoms)
    sure = _without_outrun([each for each in broken if not each.doubtful])
    early = [each for each in sure if not _is_consequence(each, symptoms)]
    errors = early or (symptoms if sure else broken or symptoms)
    first = _reason(_of_first_rank(errors, readings), broken or symptoms) if errors else None
    summary = summaries[0] if summaries else None
    others = [*all_broken, *symptoms, *summaries]
    slow = _followed(None, [each for each in everything if each.cause.kind == SLOW])
    return Verdict(first, summary, _followed(first, others), tuple(each for each, _ in slow))


def _died_alone(
    everything: Sequence[Evidence],
    symptoms: Sequence[Evidence],
    summaries: Sequence[Evidence],
    readings: Sequence[Reading],
) -> list[Evidence]:
    """The last exception after which the log went on, if srun or torchrun says that a task failed.

    Other ranks may have printed the rest. If other ranks report a consequence, the exception must be of a task that
    srun or torchrun names.
    """
    ranks = {each.rank for each in summaries} | {reading.first_rank for reading in readings}
    named = ranks - {None}
    died = [
        each
        for each in everything
        if each.cause.kind in (CAUSE, EXCEPTION)
        and each.frame is not None
        and not (each.handled or each.doubtful)
        and (each.rank in named or (not symptoms and (each.rank is None or not named)))
    ]
    return died[-1:] if summaries else []


def _without_outrun(errors: Sequence[Evidence]) -> list[Evidence]:
    """The errors without those that the program outran, if it failed later for a reason of its own."""
    rest = {each.cause.code for each in errors if not each.outrun}
    return [
        each
        for each in errors
        if not (each.outrun or each.cause.code == "shell-folder-missing")
        or rest - {each.cause.code}
        <= _SHELL.get(each.cause.code, _TOOLS if each.from_tool else _NO_START)
    ]


def _without_warnings(errors: list[Evidence], symptoms: Sequence[Evidence]) -> list[Evidence]:
    """The errors without what NCCL only warned of, if NCCL did not fail afterwards, and something else did."""
    if any(each.cause.subject == _NCCL for each in symptoms):
        return errors
    rest = [each for each in errors if each.cause.subject != _NCCL or NCCL_WARNING not in each.text]
    return rest if any(not each.doubtful for each in rest) else errors


def _is_consequence(each: Evidence, symptoms: Sequence[Evidence]) -> bool:
    """Whether an error came after the end: after a collective timed out, or after its rank lost another one."""
    if each.cause.code in _DEATHS or (each.cause.subject in _ALSO_LATER and not each.on_exit):
        return False
    for symptom in symptoms:
        if symptom.doubtful or not _is_after(each, symptom):
            continue
        code, same_rank = symptom.cause.code, each.rank == symptom.rank
        if code in _WAITED | _ENDED and (not each.on_exit or same_rank or each.rank is None):
            return True
        if code in _LEFT and same_rank:
            return True
        if code in _TOLD and same_rank and each.rank is not None:
            return True
    return False


def _is_after(each: Evidence, other: Evidence) -> bool:
    """Whether one line was printed after another: by their times, or else by their places in the log."""
    if each.time and other.time and each.time != other.time:
        return each.time > other.time
    return each.path == other.path and each.offset > other.offset


def _of_first_rank(errors: Sequence[Evidence], readings: Sequence[Reading]) -> Evidence:
    """The first error. If no time tells the order, of those in the same log, that of the rank that torchrun names."""
    first = errors[0]
    named = next(
        (reading.first_rank for reading in readings if reading.source.path == first.path), None
    )
    if first.time or first.rank is None or named is None or named == first.rank:
        return first
    return next((each for each in errors if (each.path, each.rank) == (first.path, named)), first)


def _reason(first: Evidence, broken: Sequence[Evidence]) -> Evidence:
    """The evidence that explains the first: a cause that it yields to, or, for an exception that is known only by its
    class, or a missing module or file that the program handled, a cause that the same rank printed close to it."""
    passed = {first.cause.code}
    while found := next(
        (e for e in broken if e.cause.code in first.cause.yields and e.cause.code not in passed),
        None,
    ):
        first = found
        passed.add(first.cause.code)
    tried = (
        first.handled and first.cause.subject == _PYTHON
    )  # an import, a file that was only tried
    wraps = "*" in first.cause.yields
    if first.cause.kind != EXCEPTION and not tried and not wraps:
        return first
    nearest = sorted(
        broken, key=lambda each: (each.number < first.number, abs(each.number - first.number))
    )
    for each in nearest if wraps else broken:
        if (
            each.outrun
            or each.cause.code in passed
            or ((each.on_exit or each.cause.phase == "start") and each.order > first.order)
            or (each.from_tool and not tried and not wraps and each.order > first.order)
            or (
                tried
                and (each.handled or each.cause.subject in _NO_REASONS or each.order < first.order)
            )
        ):
            continue
        after = each.number - first.number
        near = each.path == first.path and -_BEFORE_LINES <= after <= (
            _BEFORE_LINES if tried else _AFTER_LINES
        )
        if (
            each.cause.kind == CAUSE
            and near
            and not each.doubtful
            and each.rank in (first.rank, None)
        ):
            return each
    return first


def _followed(
    first: Evidence | None, others: Sequence[Evidence]
) -> tuple[tuple[Evidence, int], ...]:
    counted: dict[str, tuple[Evidence, int]] = {}
    for each in others:
        if first is not None and each.cause.code == first.cause.code:
            continue
        known, count = counted.get(each.cause.code, (each, 0))
        counted[each.cause.code] = (known, count + 1)
    return tuple(counted.values())


@dataclass(frozen=True)
class Answer:
    """Why something failed, waits or is slow."""

    subject: str
    """the run's name, or the logs"""
    state: str = ""
    """the state from the scheduler and the run folder: `FAILED, exit code 1, attempt 2`"""
    cause: Cause | None = None
    evidence: str = ""
    """`job.log:17`, `squeue`, ..."""
    line: str = ""
    """the line itself"""
    first: Evidence | None = None
    """the evidence, if it is a line of a log"""
    rank: int | None = None
    """the first rank that failed"""
    node: str = ""
    followed: tuple[tuple[Evidence, int], ...] = ()
    slow: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = ()
    """additional facts: a change in speed, logs that could not be read completely"""
    telling: tuple[Evidence, ...] = field(default=())
    """the most relevant lines, if no cause is known, or only an unspecific one"""
    last: tuple[Evidence, ...] = ()
    """the last lines, if no cause is known and no line is relevant"""
    hint: str = ""
    """what to do if no cause is known"""
    fine: bool = False
    """nothing is wrong"""

    @property
    def known(self) -> bool:
        """Whether the failure is explained, or there is nothing to explain."""
        return self.cause is not None or self.fine

    def record(self) -> dict[str, object]:
        """What --json prints."""
        cause, first = self.cause, self.first
        return {
            "subject": self.subject,
            "state": self.state,
            "known": self.known,
            "fine": self.fine,
            "cause": cause and {"code": cause.code, "subject": cause.subject, "says": cause.says,
                                "explanation": cause.explanation, "fix": cause.fix},
            "evidence": {"place": self.evidence, "line": self.line,
                         "file": str(first.path) if first else None, "number": first.number if first else None,
                         "time": first.time.isoformat() if first and first.time else None} if cause else None,
            "rank": self.rank,
            "node": self.node or None,
            "frame": vars(first.frame) if first and first.frame else None,
            "followed": [{"code": each.cause.code, "place": each.place, "line": each.text, "lines": count}
                         for each, count in self.followed],
            "slow": [{"code": each.cause.code, "says": each.cause.says, "place": each.place, "line": each.text,
                      "fix": each.cause.fix} for each in self.slow],
            "notes": list(self.notes),
            "telling": [{"place": each.place, "line": each.text} for each in (*self.telling, *self.last)],
        }  # fmt: skip
