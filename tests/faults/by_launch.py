"""Faults while `runner launch` submits: another launch at the same moment, a controller that is away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.faults.case import CAUSES, SAVE_EVERY, STEP_SECONDS, TRAINER, Case, Outcome


def runner(case: Case) -> Runner:
    """`runner` in a project whose job is the training, on a site without containers."""
    project, home = case.folder / "project", case.folder / "home"
    words = ["python3", "trainer.py", *map(str, (case.steps, SAVE_EVERY, STEP_SECONDS))]
    restart = "\n".join(f"{cause} = 9" for cause in CAUSES)
    job = f'command = {words!r}\nlauncher = "srun"\n[resources]\nnodes = 2\n[restart]\n{restart}\n'
    site = 'base = "generic-slurm"\n[values]\nengine = "host"\n'
    files = {"runner.toml": 'environment = "plain"\n', "edf/plain.toml": environment(None), "jobs/x.toml": job}
    write(project, {**files, "trainer.py": TRAINER.read_text()})
    write(home, {".config/runner/sites/bare.toml": site})
    return Runner(project, {**clean_environ(home, case.lab.environ), **case.told}, "bare")


def slurmctld_while_submitting(case: Case) -> Outcome:
    """Killed before or while a launch speaks to it, and back after 3 s."""
    command = runner(case)
    with ThreadPoolExecutor(1) as pool:
        before = case.chance.uniform(0, 0.6)
        launched = pool.submit(command, "launch", "x", "--no-preflight", code=None, timeout=400)
        case.pause(before)
        case.lab.stop_controller()
        case.pause(3)
        case.lab.start_controller()
        done = launched.result()
    if done.returncode != 0:
        case.by_hand = True  # told at once, and nothing stays behind
        assert not command.made() and not case.active(), f"{done.stderr}\n{command.made()}\n{case.active()}"
        done = command("launch", "x", "--no-preflight", timeout=400)
    case.run = command.runs / done.stdout.strip()
    outcome = case.outcome()
    assert len(command.made()) == 1, f"one launch has left {command.made()}"
    return outcome


def launched_twice(case: Case) -> Outcome:
    """Two launches of a job at the same moment are two runs, which do not know of each other."""
    command = runner(case)
    accounts = [case.folder / name for name in ("account", "second")]
    environs = [{"FAULTS_ACCOUNT": str(account)} for account in accounts]
    with ThreadPoolExecutor(2) as pool:
        launch = lambda environ: command.launch("x", "--no-preflight", extra_environ=environ, timeout=400)  # noqa: E731
        runs = list(pool.map(launch, environs))
    assert len(set(runs)) == 2, runs
    outcomes = []
    for run, account in zip(runs, accounts, strict=True):
        case.run, case.account = run, account
        outcomes.append(case.outcome())
    first, second = outcomes
    return replace(
        second,
        completed=first.completed and second.completed,
        checkpoints_lost=first.checkpoints_lost + second.checkpoints_lost,
        steps_repeated=max(first.steps_repeated, second.steps_repeated),
        trouble=first.trouble + second.trouble,
    )
