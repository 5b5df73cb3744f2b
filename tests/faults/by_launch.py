"""Faults while `runner launch` submits: another launch at the same moment, a controller that is away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.faults.case import CAUSES, SAVE_EVERY, STEP_SECONDS, TRAINER, Case, Outcome
from tests.lab.container.hold import NO_SQUASHFUSE
from tests.lab.images import python_squashfs
from tests.lab.ports import free_ports

RESTART = "[restart]\n" + "".join(f"{cause} = 9\n" for cause in CAUSES)
BARE = 'base = "generic-slurm"\n[values]\nengine = "host"\n'
PYXIS = 'base = "generic-pyxis"\n'
# a user's own batch script: what it starts knows its ranks from Slurm alone
OWN_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
srun --kill-on-bad-exit=1 sh -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec python3 trainer.py {words}'
"""


def runner(case: Case, job: str = "", *, site: str = BARE, files: Mapping[str, str] | None = None) -> Runner:
    """`runner` in a project whose job x is the training, on a site without containers unless `site` has them."""
    project, home = case.folder / "project", case.folder / "home"
    job = job or f'command = {words(case)!r}\nlauncher = "srun"\n[resources]\nnodes = 2\n{RESTART}'
    base = {"runner.toml": 'environment = "plain"\n', "edf/plain.toml": environment(None), "jobs/x.toml": job}
    write(project, {**base, "trainer.py": TRAINER.read_text(), **(files or {})})
    write(home, {".config/runner/sites/site.toml": site})
    return Runner(project, {**clean_environ(home, case.lab.environ), **case.told}, "site")


def words(case: Case) -> list[str]:
    """The command of the training."""
    return ["python3", "trainer.py", *map(str, (case.steps, SAVE_EVERY, STEP_SECONDS))]


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
    lost = []
    if done.returncode != 0:
        case.by_hand = True  # told at once, and nothing stays behind
        assert not command.made() and not case.active(), f"{done.stderr}\n{command.made()}\n{case.active()}"
    elif state_of(command, done.stdout.strip()) == "LOST":
        # slurmctld writes new jobs to its disk every 5 s: it accepted the job, and has forgotten it
        case.by_hand, lost = True, [done.stdout.strip()]
    if case.by_hand:
        done = command("launch", "x", "--no-preflight", timeout=400)
    case.run = command.runs / done.stdout.strip()
    outcome = case.outcome()
    assert len(command.made()) == 1 + len(lost), f"one launch has left {command.made()}"
    return outcome


def state_of(command: Runner, run: str) -> str:
    """The state of a run, as `runner status` has it."""
    state: str = json.loads(command("status", run, "--json").stdout)[0]["state"]
    return state


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


def own_script(case: Case) -> Outcome:
    """A rank of a user's own batch script is killed: the whole script runs again in the same allocation."""
    case.keeps = True
    port, *_ = free_ports(1)
    script = OWN_SCRIPT.format(port=port, words=" ".join(words(case)[2:]))
    job = f'batch = "own.sbatch"\n{RESTART}in_place = true\n'
    command = runner(case, job, files={"own.sbatch": script})
    case.run = command.launch("x", timeout=400)
    case.reach_any()
    os.kill(case.pid_of(1), signal.SIGKILL)
    return case.outcome()


def container_left(case: Case) -> Outcome:
    """All processes of a step on one node are killed, so that nothing removes its container; other ranks hang.

    The next step may not unpack the image: it mounts the file, or, in every other run, uses a named container again.
    """
    case.keeps = True
    resources = "hang_seconds = 15\n[resources]\nnodes = 2\n"
    job = f'environment = "box"\ncommand = {words(case)!r}\nlauncher = "srun"\n{resources}{RESTART}'
    if case.number % 2:
        (case.lab.folder / NO_SQUASHFUSE).touch()
    box = environment(python_squashfs(), [f"{case.folder}:{case.folder}"])
    command = runner(case, job, site=PYXIS, files={"edf/box.toml": box})
    named = ["--srun=--container-name=box"] if case.number % 2 else []
    case.run = command.launch("x", "--no-preflight", *named, timeout=400)
    case.reach_any()
    case.kill_step(case.node(1))
    outcome = case.outcome()
    assert "File already exists" not in (case.run / "job.log").read_text(), outcome.trouble
    wanted = ["reused" if case.number % 2 else "squashfuse"] * 2
    assert case.lab.containers()[2:] == wanted, f"{case.lab.containers()}\n{outcome.trouble}"
    return outcome
