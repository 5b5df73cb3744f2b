"""The same script, submitted by plain sbatch and by `runner launch`: is it the same job?

Both jobs are submitted with `--hold` from the script's folder. Every field of `scontrol show job` is compared, except
those of OWN, and the script that Slurm has stored.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.scripts.corpus import Script, extract
from bench.scripts.shape import Shape, configuration, node_list, reserve
from tests.end_to_end.conftest import clean_environ, write
from tests.lab.slurm import SlurmLab

CLOUD = "bulk[0001-1200]"
OWN = {
    "JobId": "each submission has its own",
    "ArrayJobId": "each submission has its own",
    "HetJobId": "each submission has its own",
    "HetJobIdSet": "contains the job ids",
    "SubmitTime": "a time",
    "EligibleTime": "a time",
    "AccrueTime": "a time",
    "LastSchedEval": "a time",
    "StartTime": "a time; Slurm estimates it for a pending job",
    "EndTime": "a time; Slurm estimates it for a pending job",
    "Deadline": "a time",
    "Scheduler": "whether Slurm's main or backfill scheduler looked at the job last",
    "AllocNode:Sid": "the session of the process that submits; runner starts sbatch in a session of its own",
    "Priority": "a later job has a lower priority",
}


@dataclass(frozen=True)
class Lab:
    """The lab, and what the commands in it need."""

    slurm: SlurmLab
    home: Path
    source: Path
    """the folder with the package runner"""

    @property
    def environ(self) -> dict[str, str]:
        return {**clean_environ(self.home, self.slurm.environ), "PYTHONPATH": str(self.source)}

    def run(self, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
        )

    def plain(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return self.run(("sbatch", *words), folder)

    def runner(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return self.run((sys.executable, "-m", "runner", "launch", "--site", "lab", *words), folder)


def site(home: Path, values: str = "") -> None:
    """A site without defaults of its own; `values`: lines of its table."""
    write(home, {".config/runner/sites/lab.toml": f'base = "generic-slurm"\n[values]\nengine = "host"\n{values}'})


def plugin(folder: Path) -> Path:
    """The compiled options.c."""
    made = folder / "options.so"
    source = Path(__file__).with_name("options.c")
    subprocess.run(("gcc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(made), str(source)), check=True)
    return made


def start(scripts: Sequence[tuple[Script, Path]], work: Path) -> SlurmLab:
    """The lab on which all scripts can be submitted."""
    shape = Shape()
    for _, path in scripts:
        shape.read(path.read_text(errors="replace"))
    lab = SlurmLab(
        1, ("pyxis", str(plugin(work))), extra_config=configuration(shape, [CLOUD, *node_list(shape)])
    ).start()
    reserve(lab, shape, "bulk[1001-1200]")
    return lab


def fields(shown: str, job: str) -> dict[str, str]:
    """The fields of `scontrol show job`, of each component a set; the job's own id is written as JOB."""
    found: dict[str, str] = {}
    for number, component in enumerate(shown.strip().split("\n\n")):
        prefix = f"{number}:" if number else ""
        own = re.match(r"JobId=(\d+)", component)
        job = own[1] if own else job
        for line in component.splitlines():
            for name, value in re.findall(r"(?:^|\s)([A-Z][\w:/.]*?)=(.*?)(?=\s[A-Z][\w:/.]*=|$)", line):
                found[prefix + name] = re.sub(rf"(?<!\d){job}(?!\d)", "JOB", value)
    return {name: value for name, value in found.items() if re.sub(r"^\d+:", "", name) not in OWN}


def submitted(lab: Lab, job: str, folder: Path) -> dict[str, str]:
    """The fields of a held job and the digest of its stored script; the job is cancelled."""
    found = fields(lab.run(("scontrol", "show", "job", job), folder).stdout, job)
    stored = lab.run(("scontrol", "write", "batch_script", job, "-"), folder).stdout
    lab.run(("scancel", job), folder)
    return {**found, "batch_script": hashlib.sha256(stored.rstrip("\n").encode("utf-8", "replace")).hexdigest()[:12]}


def differences(plain: Mapping[str, str], other: Mapping[str, str]) -> str:
    """`FIELD: PLAIN -> OTHER; …`; empty if the jobs are the same."""
    names = sorted({*plain, *other})
    return "; ".join(
        f"{name}: {plain.get(name, '(unset)')} -> {other.get(name, '(unset)')}"
        for name in names
        if plain.get(name) != other.get(name)
    )


def last_line(text: str) -> str:
    """What sbatch complains about: its first error, on one line."""
    lines = [line for line in text.splitlines() if "error" in line or "fatal" in line or "unrecognized" in line]
    lines = [line for line in lines if "sbatch: error: Batch job submission failed" not in line] or lines
    return (lines or text.strip().splitlines() or [""])[0].strip()[:160]


def check(script: Script, lab: Lab, mirrors: Path, work: Path, against: str) -> dict[str, str]:
    """The verdict about one script."""
    place = work / "submit" / script.sha256[:16]
    shutil.rmtree(place, ignore_errors=True)
    path = extract(script, mirrors, place)
    folder, name = path.parent, f"./{path.name}"
    tested = lab.plain("--test-only", name, folder=folder)
    verdict = {"test_only": "accepted" if tested.returncode == 0 else f"refused: {last_line(tested.stderr)}"}
    plain = lab.plain("--hold", "--parsable", name, folder=folder)
    if against == "plain":
        other = lab.plain("--hold", "--parsable", name, folder=folder)
    else:
        other = lab.runner("--parsable", "--sbatch=--hold", name, folder=folder)
    other_id = other.stdout.strip().splitlines()[-1].partition(";")[0] if other.stdout.strip() else ""
    if plain.returncode or other.returncode:
        for done, job in ((plain, plain.stdout.strip()), (other, other_id)):
            if done.returncode == 0:
                lab.run(("scancel", job), folder)
        if plain.returncode and other.returncode:
            return {**verdict, "submitted": "refused by both"}
        refused = "runner refuses" if other.returncode else "plain sbatch refuses"
        words = (other.stderr if other.returncode else plain.stderr).strip().replace("\n", " | ")
        return {**verdict, "submitted": f"{refused}: {words[:600]}"}
    first = submitted(lab, plain.stdout.strip().partition(";")[0], folder)
    second = submitted(lab, other_id, folder)
    if "/wrapper/" in second.get("Command", ""):  # docs/own-script.md: an interpreter that does not read BASH_ENV
        for name in ("Command", "batch_script"):
            first[name] = second[name] = ""
        return {**verdict, "submitted": differences(first, second) or "wrapper"}
    return {**verdict, "submitted": differences(first, second) or "same"}
