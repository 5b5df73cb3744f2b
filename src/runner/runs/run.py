"""A run: one launch, with one folder and one record, however many jobs of the scheduler its attempts need.

The folder is `<runs>/<job>-NNNN`. The record `run.json` contains the state of the launch itself (`preparing`,
`submitted`, `cancelled`). status.py has the current state of the job, and attempt.py the attempts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from runner.errors import RunnerError, unknown
from runner.machine import files
from runner.runs.attempt import Attempt, Rung
from runner.runs.secrets import write_record
from runner.site import LOCAL

RECORD = "run.json"
LATER_JOBS = "job_ids"
STOP, STOPPED = "stop", "stopped"
WAITS = "waits"
"""key of `slurm` for a local run that starts when other runs have ended: their names"""
PREPARING, SUBMITTED, CANCELLED = "preparing", "submitted", "cancelled"


@dataclass(frozen=True)
class Run:
    """The record of a launch, as in RUN/run.json."""

    name: str
    """`sft-0007`"""
    folder: Path
    """where it was found; not part of the record, because a run folder may be moved"""
    job: str
    site: str
    scheduler: str
    """`slurm` or `local`"""
    created: str
    """ISO 8601 with time zone"""
    state: str = PREPARING
    """`preparing` until the scheduler has accepted the job. A run stays in this state if its launch was interrupted"""
    job_ids: tuple[str, ...] = ()
    """the scheduler's job ids, newest last, including those that the batch script has submitted (RUN/job_ids);
    `local-PID` without a scheduler"""
    environment: str = ""
    engine: str = ""
    image: str = ""
    command_line: tuple[str, ...] = ()
    """the words after `runner`, without secrets"""
    project: str = ""
    host: str = ""
    """the machine of a local run"""
    process: str = ""
    """the identity of a local run's process (machine/sessions.py)"""
    nodes: int = 1
    processes_per_node: int = 1
    restarts: bool = False
    """whether the batch script may restart the job"""
    gpu_hours: int = 0
    """the limit for all attempts together; 0: no limit"""
    most_gpu_hours: float = 0.0
    """what all attempts together may use, as estimated at the launch; 0: not known, or no GPUs"""
    tags: tuple[str, ...] = ()
    """the user's labels"""
    sweep: str = ""
    """the name of its sweep, which is a folder beside the run folder; empty: none"""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """its values of the sweep's parameters"""
    after: tuple[str, ...] = ()
    """the runs that had to end before it"""
    slurm: Mapping[str, str] = field(default_factory=dict)
    """the cluster and its version of Slurm"""

    @property
    def job_id(self) -> str:
        """The newest job id; empty before submission."""
        return self.job_ids[-1] if self.job_ids else ""

    @property
    def launched(self) -> float | None:
        """When it was launched, in Unix seconds; None if the record has no valid time."""
        return unix_time(self.created)

    @property
    def is_local(self) -> bool:
        """Whether it runs on one machine (`host`), without a scheduler."""
        return self.scheduler == LOCAL

    def with_jobs(self, *job_ids: str) -> Run:
        """The run, submitted as these additional jobs."""
        return replace(self, job_ids=job_ids, state=SUBMITTED)

    @property
    def log(self) -> Path:
        """The output file, to which all attempts append."""
        return self.folder / "job.log"

    @property
    def code(self) -> Path:
        """The folder of the code snapshot."""
        return self.folder / "code"

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts, oldest first."""
        folder = self.folder / "attempts"
        try:
            numbers = [name for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208 (history: 10,000 runs)
        except OSError:
            return ()
        return tuple(Attempt(folder / name) for name in sorted(numbers, key=int))

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt; None if there is none yet."""
        return next(reversed(self.attempts), None)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """How each further attempt was started, oldest first."""
        return tuple(rung for attempt in self.attempts if (rung := attempt.rung))

    @property
    def stopped(self) -> str:
        """Why no further attempt follows; empty if one may follow, or if the batch script does not restart the job."""
        return self.text(STOPPED)

    @property
    def cancel_reason(self) -> str:
        """Who cancelled the run; empty if it was not cancelled."""
        return self.text(STOP)

    def text(self, name: str) -> str:
        """The content of a file of the folder; empty if it does not exist."""
        return files.text_of(f"{self.folder}/{name}")


_WRITTEN = frozenset(each.name for each in fields(Run)) - {"folder"}
_LISTS = frozenset(each.name for each in fields(Run) if each.default == ())
_IN_JSON = {"str": str, "tuple[str, ...]": list, "Mapping[str, str]": dict}
_TYPES = {each.name: _IN_JSON.get(str(each.type), (int, float)) for each in fields(Run)}


def unix_time(text: str) -> float | None:
    """The seconds of a time in ISO 8601; None for other text."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


class Dependencies(NamedTuple):
    """The runs that a launch waits for."""

    succeeded: tuple[Run, ...] = ()
    """runs that must end with exit code 0"""
    ended: tuple[Run, ...] = ()
    """runs that must end, with any exit code"""

    @property
    def runs(self) -> tuple[Run, ...]:
        return (*self.succeeded, *self.ended)


def save(run: Run) -> None:
    """Write RUN/run.json."""
    record = {key: value for key, value in asdict(run).items() if key in _WRITTEN}
    # ASCII, because a command line may contain bytes that are not valid UTF-8, which only JSON's escapes can represent
    path, text = run.folder / RECORD, json.dumps(record, indent=2) + "\n"
    # the user's words (command line, tags) are checked once; later writes only change what Slurm reported
    (files.write if path.exists() else write_record)(path, text)


def load(folder: Path) -> Run:
    """The run in a folder. Raises RunnerError if the record is missing or damaged."""
    path = f"{folder}/{RECORD}"
    try:
        data: dict[str, Any] = json.loads(files.content(path).decode())
        values = {key: data[key] for key in data.keys() & _WRITTEN}
        _check_types(values)
        for key in values.keys() & _LISTS:
            values[key] = tuple(values[key])
        if later := files.text_of(f"{folder}/{LATER_JOBS}").split():
            values["job_ids"] = tuple(dict.fromkeys((*values.get("job_ids", ()), *later)))
        run = Run(folder=folder, **values)
        return _as_started(run) if run.state == PREPARING else run
    except FileNotFoundError:
        raise RunnerError(
            f"{folder} is not a run folder",
            f"it has no {RECORD}",
            "use a run that `runner status` lists",
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunnerError(
            f"cannot read {path}",
            str(error),
            "ask its owner for access, or name another run"
            if isinstance(error, PermissionError)
            else "restore the file, or remove the run folder if you no longer need it",
        ) from error


def _check_types(values: Mapping[str, Any]) -> None:
    """Raise TypeError for a value of another type: one record must not end the list of all runs."""
    words: list[str] = []
    for key, value in values.items():
        if not isinstance(value, _TYPES[key]):
            raise TypeError(f"{key} cannot be {value!r}")
        if isinstance(value, list | dict):
            words += value if isinstance(value, list) else (*value, *value.values())
    "".join(words)


def _as_started(run: Run) -> Run:
    """The run, submitted as the jobs that its folder names: its launch was interrupted after the scheduler had accepted
    the job, or a user has submitted it without runner. Without such jobs, the run itself."""
    jobs = (*run.job_ids, *(attempt.job_id for attempt in run.attempts))
    found = tuple(dict.fromkeys(filter(None, jobs)))
    return run.with_jobs(*found) if found else run


def reloaded(run: Run) -> Run:
    """Read the run again, because its batch script may have submitted another job."""
    with suppress(RunnerError):
        return load(run.folder)
    return run


def with_newest_job(run: Run) -> Run:
    """The run with the job of its newest attempt, which a user may have submitted without runner in the run folder."""
    attempts = run.attempts
    job = attempts[-1].job_id if attempts and run.job_ids else ""
    # runner calls a task of an array 123_4, but its attempts record the task's own job id
    known = {each.partition("_")[0] for each in run.job_ids}
    if not job or job in known or ((run.sweep or "_" in run.job_id) and job == attempts[0].job_id):
        return run
    return replace(run, job_ids=(*run.job_ids, job))


def is_cancelled(run: Run) -> bool:
    """Whether the run was cancelled, with `runner cancel` or scancel.

    If it was submitted again afterwards, and that attempt ended by itself, the run does not count as cancelled.
    """
    newest = run.newest
    if run.state != CANCELLED:
        return newest is not None and newest.cause == "cancelled"
    stopped = files.modified(run.folder / STOP)
    if newest is None or stopped is None:
        return True
    if newest.exit_code == 0 and (newest.ended or stopped) < stopped:
        return False  # this cancelled only a job that was submitted manually after the end, and had not started
    later = (newest.started or 0.0) > stopped
    return not later or newest.exit_code is None or newest.cause == "cancelled"


def is_over(run: Run) -> bool:
    """Whether the newest attempt has ended and no other one follows, according to the run folder."""
    newest = run.newest
    code = newest.exit_code if newest else None
    if newest is None or code is None or newest.cause in ("requeued", "preemption"):
        return code == 0
    return code == 0 or not run.restarts or (run.folder / STOPPED).exists()


def list_runs(runs_folder: Path) -> tuple[Run, ...]:
    """The runs in a folder of runs, oldest first. Folders without a valid record are left out, and hidden ones."""
    try:
        folders = [path for path in runs_folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return ()
    found = []
    for folder in folders:
        with suppress(RunnerError):
            found.append(load(folder))
    return tuple(sorted(found, key=lambda run: (run.launched or 0.0, run.name)))


def find_runs(word: str, runs_folder: Path) -> tuple[Run, ...]:
    """The runs that the user named: those of a sweep, or a single run. Raises RunnerError if there are none."""
    links = members(runs_folder / word)
    runs = tuple(load(link.resolve()) for link in links)
    return runs or _of_array(word, list_runs(runs_folder)) or (find_run(word, runs_folder),)


def _of_array(word: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs of a sweep, found by the job id of its array."""
    found = [run for run in runs if any(job_id.startswith(f"{word}_") for job_id in run.job_ids)]
    return tuple(found) if word.isdigit() else ()


def members(sweep: Path) -> tuple[Path, ...]:
    """The links to runs in the folder of a sweep, in order, without links to deleted runs."""
    if not any((sweep / name).is_file() for name in ("array.sbatch", "submit.sh")):
        return ()
    links = [path for path in sweep.iterdir() if path.name.isdigit() and (path / RECORD).is_file()]
    return tuple(sorted(links, key=lambda path: int(path.name)))


def find_run(word: str, runs_folder: Path) -> Run:
    """The run that the user named: a name, a job id, `last`, or the path of a run folder.

    Otherwise, raises a RunnerError that lists the known runs, the most similar names first.
    """
    if found := members(runs_folder / word):
        raise RunnerError(
            f"{word} is a sweep of {len(found)} runs",
            "this command needs a single run",
            f"choose one of {found[0].resolve().name} to {found[-1].resolve().name}; `runner status {word}` lists them",
        )
    if "/" in word:
        path = Path(word).expanduser().resolve()
        if files.is_file(path):
            raise _no_run_but_a_file(word)
        return load(path)
    if (runs_folder / word / RECORD).is_file():
        return load(runs_folder / word)
    runs = list_runs(runs_folder)
    if word == "last" and runs:
        return runs[-1]
    for run in reversed(runs):
        # `123.0` is a step of a job; `123_4` is a task of the array of a sweep, or of a user's own array
        if run.job_ids and {word.split(".")[0], word.replace("_", ".").split(".")[0]} & {
            *run.job_ids
        }:
            return run
    if of_array := _of_array(word, runs):
        return find_run(of_array[0].sweep, runs_folder)  # raises the error that this is a sweep
    if word.isdigit():  # submitted without runner: only the attempt records the job id
        for run in reversed(runs):
            if word in with_newest_job(run).job_ids:
                return run
    raise _unknown_run(word, runs, runs_folder)


def _no_run_but_a_file(word: str) -> RunnerError:
    """The error for a log or another file where a run is expected."""
    return RunnerError(
        f"{word} is a file, not a run",
        "you can refer to a run by its name, a job id, `last` or the path of its run folder",
        f"`runner status` lists the runs; if this file is the log of a job: runner why {word}",
    )


def _unknown_run(word: str, runs: tuple[Run, ...], runs_folder: Path) -> RunnerError:
    if files.is_file(Path(word).expanduser()):
        return _no_run_but_a_file(word)
    if not runs:
        return RunnerError(
            f"there is no run {word!r}",
            f"{runs_folder} has no runs",
            "start a run with `runner launch`, or give the site (--site) or the runs folder (RUNNER_RUNS)",
        )
    names = [run.name for run in runs]
    if word.isdigit() or word.startswith("local-"):
        newest = ", ".join(
            f"{run.job_id} ({run.name})" for run in reversed(runs[-5:]) if run.job_id
        )
        return RunnerError(
            f"no run has the job id {word!r}",
            f"the newest job ids in {runs_folder}: {newest or 'none'}",
            "give --site or RUNNER_RUNS if the run is on another site; its run folder may also have been deleted\n"
            "for a job that runner did not launch: runner why LOG, with the job's log file",
        )
    error = unknown(
        "run", word, names[-12:], "`runner status` lists the runs; a path to a run folder works too"
    )
    if (runs_folder / word).is_dir():
        error.why = f"the folder {runs_folder / word} has no {RECORD}: its launch was interrupted, or it is not a run"
    return error
