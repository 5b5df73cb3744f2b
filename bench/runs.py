"""`./nox -s bench -- runs`: what `runner` costs around a job, on private Slurm clusters, side by side with plain Slurm.

status    1,000 submitted jobs on CLOUD nodes: questions to the scheduler, seconds of `runner status`
start     from slurmd's start of the batch script to the first line of the user's, with and without runner
launch    from Enter to the job id in a small repository, beside a plain sbatch
history   10,000 runs, copies of a real one: seconds of `runner history --json`
nodes     2 and 2,000 nodes: size of the script, seconds of its rendering, the word of `sbatch --test-only`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path

from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.figures import machine
from tests.lab.images import make_busybox_squashfs
from tests.lab.slurm import SlurmLab

CLOUD = (
    "NodeName=cloud[0001-2000] Sockets=4 CoresPerSocket=72 RealMemory=870000 State=CLOUD",
    "SuspendProgram=/bin/true",
    "ResumeProgram=/bin/true",
    "SuspendTime=600",
    "MaxNodeCount=2100",
    "MaxJobCount=20000",
    "PartitionName=cloud Nodes=cloud[0001-2000] State=UP",
)
STEP = "#!/bin/bash\n#SBATCH --output=job.log\nsrun --environment={edf} sh -c {command}\n"
KEPT = ("run.json", "lock.toml", "environment.toml", "attempts/1/exit_code")
QUESTIONS = ("squeue", "sacct", "scontrol", "sinfo")


def project(folder: Path, lab: SlurmLab, texts: dict[str, str], engine: str = "host") -> Runner:
    """A small repository with one commit, and `runner` in it."""
    home, root = folder / "home", folder / "project"
    site = f'base = "generic-slurm"\n[values]\nengine = "{engine}"\n'
    write(home, {".config/runner/sites/lab.toml": site})
    write(root, {"runner.toml": 'environment = "plain"\n', "edf/plain.toml": environment(None), **texts})
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")):
        subprocess.run(("git", *words), cwd=root, check=True)
    environ = clean_environ(home, lab.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # byte code is kept, as it is after an ordinary install
    return Runner(root, environ, "lab")


def timed(action: Callable[[], object]) -> float:
    """Wall seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def told(name: str, seconds: Sequence[float]) -> str:
    """Median, least and most, in ms."""
    shown = (f"{value * 1e3:,.0f}" for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"| {name} | {' | '.join(shown)} |"


HEAD = ["| | median ms | min | max |", "| --- | --- | --- | --- |"]


def status(folder: Path, times: int, scale: float) -> list[str]:
    """Real jobs of run folders; the programs that ask Slurm are counted."""
    count = max(2, int(1000 * scale))
    with SlurmLab(nodes=1, plugins=(), extra_config=CLOUD) as lab:
        runner = project(folder, lab, {"jobs/x.sh": "sleep 600\n"})
        first = runner.launch("--script", "x", "--no-preflight", "--partition", "cloud")
        record = json.loads((first / "run.json").read_text())
        for number in range(count - 1):
            run = runner.runs / f"y-{number:04}"
            shutil.copytree(first, run, symlinks=True, ignore=shutil.ignore_patterns("attempts", "job.log"))
            job_id = lab.run(("sbatch", "--parsable", "job.sbatch"), cwd=run).stdout.strip()
            write(run, {"run.json": json.dumps({**record, "name": run.name, "job_ids": [job_id]})})
        calls, environ = counted(folder, runner)
        seconds = [timed(lambda: runner("status", "--all")) for _ in range(times)]
        shown = json.loads(runner("status", "--all", "--json", extra_environ=environ).stdout)
        states = sorted({each["state"] for each in shown})
        questions = calls.read_text().split()
    asked = f"questions to the scheduler: {len(questions)} ({', '.join(questions)}); states: {', '.join(states)}"
    return [*HEAD, told(f"`runner status --all`, {len(shown):,} submitted jobs", seconds), "", asked]


def counted(folder: Path, runner: Runner) -> tuple[Path, dict[str, str]]:
    """The file that gets a word for each question to Slurm, and the environment in which it does."""
    calls = folder / "calls"
    calls.touch()
    for name in QUESTIONS:
        real = shutil.which(name)
        write(folder / "bin", {name: f'#!/bin/sh\necho {name} >>{calls}\nexec {real} "$@"\n'})
        (folder / "bin" / name).chmod(0o755)
    return calls, {"PATH": f"{folder / 'bin'}:{runner.environ['PATH']}"}


def start(folder: Path, times: int, scale: float) -> list[str]:
    """In turn, from the line of slurmd's log that says it launches the batch job to the time of the first file made."""
    image = make_busybox_squashfs(folder / "box.sqsh")
    stamp = folder / "stamp"
    command = f": >{stamp}"
    with SlurmLab(nodes=1, plugins=("environment",)) as lab:
        edf = environment(image, [f"{folder}:{folder}"])
        runner = project(folder, lab, {"jobs/x.sh": f"{command}\n", "edf/box.toml": edf}, engine="ce")
        plain = folder / "plain"
        write(plain, {"box.toml": edf, "job.sbatch": STEP.format(edf=plain / "box.toml", command=f"'{command}'")})
        found: dict[str, list[float]] = {"plain Slurm": [], "runner": []}
        for _ in range(times):
            job_id = lab.run(("sbatch", "--parsable", "job.sbatch"), cwd=plain).stdout.strip()
            found["plain Slurm"].append(until_first_line(lab, job_id, stamp))
            run = runner.launch("--env", "box", "--script", "x", "--no-preflight")
            job_id = json.loads((run / "run.json").read_text())["job_ids"][-1]
            found["runner"].append(until_first_line(lab, job_id, stamp))
    more = statistics.median(found["runner"]) - statistics.median(found["plain Slurm"])
    return [*HEAD, *(told(name, seconds) for name, seconds in found.items()), "", f"{more * 1e3:.0f} ms more"]


def until_first_line(lab: SlurmLab, job_id: str, stamp: Path) -> float:
    lab.wait_for(job_id, ("COMPLETED", "FAILED"), 120)
    log = (lab.folder / "slurmd-nid001.log").read_text()
    began = re.search(rf"\[([^\]]+)\] Launching batch job {job_id} ", log)
    if began is None or not stamp.exists():
        raise RuntimeError(f"job {job_id} did not come to its first line")
    made = stamp.stat().st_mtime
    stamp.unlink()
    return made - datetime.fromisoformat(began[1]).timestamp()


def launch(folder: Path, times: int, scale: float) -> list[str]:
    """Jobs of one node in an idle cluster, in turn; the job ends at once."""
    with SlurmLab(nodes=1, plugins=()) as lab:
        runner = project(folder, lab, {"jobs/x.sh": "true\n", "README": "x\n"})
        plain = folder / "plain"
        write(plain, {"job.sbatch": "#!/bin/bash\ntrue\n"})
        found: dict[str, list[float]] = {"`sbatch job.sbatch`": [], "`runner launch --script x`": []}
        runner("launch", "--script", "x", "--no-preflight")  # byte code, page cache
        for _ in range(times):
            found["`sbatch job.sbatch`"].append(timed(lambda: lab.run(("sbatch", "job.sbatch"), cwd=plain)))
            found["`runner launch --script x`"].append(timed(lambda: runner("launch", "--script", "x")))
    return [*HEAD, *(told(name, seconds) for name, seconds in found.items())]


def nodes(folder: Path, times: int, scale: float) -> list[str]:
    """The dry run prints the script's bytes; Slurm itself judges them."""
    with SlurmLab(nodes=1, plugins=(), extra_config=CLOUD) as lab:
        runner = project(folder, lab, {"jobs/x.sh": "true\n"})
        lines = ["| nodes | script bytes | median ms | `sbatch --test-only` |", "| --- | --- | --- | --- |"]
        for count in (2, 2000):
            words = ("launch", "--script", "x", "--nodes", str(count), "--partition", "cloud", "--dry-run")
            text = runner(*words).stdout
            (folder / "job.sbatch").write_text(text)
            said = lab.run(("sbatch", "--test-only", "job.sbatch"), cwd=folder, check=False)
            word = "accepted" if said.returncode == 0 else said.stderr.strip()
            seconds = [timed(lambda words=words: runner(*words)) for _ in range(times)]
            lines.append(f"| {count:,} | {len(text):,} | {statistics.median(seconds) * 1e3:,.0f} | {word} |")
    return lines


def history(folder: Path, times: int, scale: float) -> list[str]:
    """Runs made of one real launch, each third one with another exit code."""
    count, runs = int(10_000 * scale), folder / "runs"
    (folder / "plain.toml").write_text("")
    environ = {**os.environ, "RUNNER_RUNS": str(runs), "RUNNER_SITE": "local"}

    def runner(*words: str) -> str:
        argv = (sys.executable, "-m", "runner", *words)
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=environ, cwd=folder).stdout

    name = runner("launch", "--engine", "host", "--env", "./plain.toml", "--wait", "--", "true").strip()
    stem = name.rpartition("-")[0]
    texts = {file: (runs / name / file).read_text() for file in KEPT}
    for number in range(2, count + 1):
        copy = runs / f"{stem}-{number:04}"
        write(copy, {file: text.replace(name, copy.name) for file, text in texts.items()})
        if number % 3 == 0:
            (copy / "attempts/1/exit_code").write_text("1\n")
    lines = ["| question | runs found | median ms | max |", "| --- | --- | --- | --- |"]
    for words in (("history", "--json"), ("history", "--json", "--state", "failed")):
        found = len(json.loads(runner(*words)))
        seconds = [timed(lambda words=words: runner(*words)) for _ in range(min(times, 5))]
        cells = (f"{found:,}", f"{statistics.median(seconds) * 1e3:,.0f}", f"{max(seconds) * 1e3:,.0f}")
        lines.append(f"| `runner {' '.join(words)}` | {' | '.join(cells)} |")
    return lines


PARTS = {"status": status, "start": start, "launch": launch, "nodes": nodes, "history": history}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="nox -s bench -- runs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0, help="fewer jobs and folders: 0.01, to see that it works")
    options = parser.parse_args(argv)
    words = machine(Path.cwd())
    print(f"{words['processor']}, {words['cores']} cores, {words['memory']}, Linux {words['kernel']}; {date.today()}\n")
    for name in options.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="bench-runs-") as made:
            folder = Path(made)
            folder.chmod(0o755)
            print("\n".join([f"## {name}", "", *PARTS[name](folder, options.times, options.scale), ""]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
