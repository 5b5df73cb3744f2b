"""The runs that a folder of runs holds, and which of them a user's word means."""

from __future__ import annotations

from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.runs.run import RECORD, Run, load, with_newest_job


def list_runs(runs_folder: Path) -> tuple[Run, ...]:
    """The runs in a folder of runs, oldest first; folders without a whole record are left out."""
    try:
        folders = tuple(runs_folder.iterdir())
    except OSError:
        return ()
    found = []
    for folder in folders:
        try:
            found.append(load(folder))
        except RunnerError:
            continue
    return tuple(sorted(found, key=lambda run: (run.created, run.name)))


def find_runs(word: str, runs_folder: Path) -> tuple[Run, ...]:
    """The runs that a user's word means: those of a sweep, or the one. Raises RunnerError where there is none."""
    links = members(runs_folder / word)
    runs = tuple(load(link.resolve()) for link in links)
    return runs or _of_array(word, list_runs(runs_folder)) or (find_run(word, runs_folder),)


def _of_array(word: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs of a sweep, by the job id of its whole array."""
    found = [run for run in runs if any(job_id.startswith(f"{word}_") for job_id in run.job_ids)]
    return tuple(found) if word.isdigit() else ()


def members(sweep: Path) -> tuple[Path, ...]:
    """The links to its runs in the folder of a sweep, in order; those of runs that are gone are left out."""
    if not (sweep / "array.sbatch").is_file():
        return ()
    links = [path for path in sweep.iterdir() if path.name.isdigit() and (path / RECORD).is_file()]
    return tuple(sorted(links, key=lambda path: int(path.name)))


def find_run(word: str, runs_folder: Path) -> Run:
    """The run that a user's word means: a name, a job id, `last`, or a path to a run folder.

    Raises RunnerError that names the known runs (the nearest first) otherwise.
    """
    if found := members(runs_folder / word):
        raise RunnerError(
            f"{word} is a sweep of {len(found)} runs",
            "this verb is about one run",
            f"one of {found[0].resolve().name} to {found[-1].resolve().name}; `runner status {word}` shows all",
        )
    if "/" in word:
        return load(Path(word).expanduser().resolve())
    if (runs_folder / word / RECORD).is_file():
        return load(runs_folder / word)
    runs = list_runs(runs_folder)
    if word == "last" and runs:
        return runs[-1]
    for run in reversed(runs):
        # a step of a job (`123.0`) belongs to the job's run; `123_4` is a task of a sweep's array, or of the user's own
        if run.job_ids and {word.split(".")[0], word.replace("_", ".").split(".")[0]} & {*run.job_ids}:
            return run
    if of_array := _of_array(word, runs):
        return find_run(of_array[0].sweep, runs_folder)  # which tells that it is a sweep
    if word.isdigit():  # submitted by hand: only its attempt names the job
        for run in reversed(runs):
            if word in with_newest_job(run).job_ids:
                return run
    raise _unknown_run(word, runs, runs_folder)


def _unknown_run(word: str, runs: tuple[Run, ...], runs_folder: Path) -> RunnerError:
    if not runs:
        return RunnerError(
            f"there is no run {word!r}",
            f"{runs_folder} holds no runs",
            "start one with `runner launch`, or name the site (--site) or folder (RUNNER_RUNS) where it was started",
        )
    names = [run.name for run in runs]
    if word.isdigit() or word.startswith("local-"):
        newest = ", ".join(f"{run.job_id} ({run.name})" for run in reversed(runs[-5:]) if run.job_id)
        return RunnerError(
            f"no run has the job id {word!r}",
            f"newest job ids in {runs_folder}: {newest or 'none'}",
            "its run folder may have been deleted, or lie in the folder of another site (--site, RUNNER_RUNS)",
        )
    error = unknown("run", word, names[-12:], "`runner status` lists the runs; a path to a run folder works too")
    if (runs_folder / word).is_dir():
        error.why = f"the folder {runs_folder / word} has no {RECORD}: its launch did not get that far"
    return error
