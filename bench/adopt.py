"""`./nox -s bench -- adopt --mirrors FOLDER`: does `runner env adopt` read containers of public scripts as bash does?

Each script of `bench/adopt.tsv` runs once in a sandbox, in which srun and the container engines only write down their
words. If `env adopt` makes an EDF of a script, it must be the EDF of a command line that the script has really called.
`bench/scripts/corpus.py` says where the texts of the scripts come from.

right        a call of the script has this container
wrong        the calls of the script have other containers
#SBATCH      the container is in the `#SBATCH` lines, so no call has it
not called   the script ends before it starts a container
none: …      no EDF, and why
refused: …   `runner launch PATH` refuses the script too, so there is no job file
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.scripts import corpus

from runner.environments.rewriting import rewrite
from runner.errors import RunnerError
from runner.located_toml import Document
from runner.runs.adopt.adopted import Adopted
from runner.runs.adopt.command_line import read_command_line
from runner.runs.adopt.script import job_text, read_container
from runner.runs.job import layer_of
from runner.runs.own_script import read

LIST = Path(__file__).with_suffix(".tsv")
PROGRAMS = ("srun", "docker", "podman", "nvidia-docker", "enroot", "apptainer", "singularity")
OTHERS = ("module", "conda", "scontrol", "nvidia-smi", "git", "pip", "sleep", "squeue", "sudo", "wget", "curl")
WRITES = '#!/bin/bash\n{ printf "%s\\0" "${0##*/}" "$@"; printf "\\n\\0"; } >>/calls/calls\n'
SECONDS = 10


def calls(script: Path, top: Path, work: Path) -> list[list[str]]:
    """The command lines of PROGRAMS that the script calls."""
    tools, written = work / "tools", work / "calls"
    for folder in (tools, written):
        folder.mkdir(parents=True, exist_ok=True)
    for name in (*PROGRAMS, *OTHERS):
        (tools / name).write_text(WRITES if name in PROGRAMS else "#!/bin/sh\n")
        (tools / name).chmod(0o755)
    (written / "calls").unlink(missing_ok=True)
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--tmpfs", "/", "--proc", "/proc"]
    for path in ("/usr", "/etc"):
        argv += ["--ro-bind", path, path]
    for path in ("bin", "lib", "lib64", "sbin"):
        argv += ["--symlink", f"usr/{path}", f"/{path}"]
    argv += ["--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(top), "/scripts", "--bind", str(written), "/calls"]
    argv += ["--ro-bind", str(tools), "/tools", "--chdir", str(Path("/scripts") / script.relative_to(top).parent)]
    environ = {"PATH": "/tools:/usr/bin:/bin", "HOME": "/tmp", "USER": "me", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}
    environ |= {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_SUBMIT_DIR": "/tmp"}
    for name, value in environ.items():
        argv += ["--setenv", name, value]
    with suppress(subprocess.TimeoutExpired):  # its calls until then count
        subprocess.run((*argv, "bash", script.name), capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    if not (written / "calls").exists():
        return []
    lines = (written / "calls").read_bytes().decode(errors="replace").split("\0\n\0")
    return [line.split("\0") for line in lines if line]


def edf(adopted: Adopted) -> dict[str, Any]:
    return tomllib.loads(rewrite("", adopted.changes()))


def verdict(script: Path, top: Path, work: Path) -> str:
    try:
        text = read(str(script), script)
    except RunnerError as error:
        return f"refused: {error.why}"
    job = tomllib.loads(job_text(script.name, script.name, text))
    if layer_of(Document(script, job))["batch"].value != script.name or set(job) != {"batch"}:
        return "wrong: the job file"
    adopted = read_container(text)
    if adopted.no_edf:
        return f"none: {'; '.join(adopted.no_edf)}"
    if adopted.where == "#SBATCH: ":
        return "#SBATCH"
    called = []
    for words in calls(script, top, work):
        try:
            found, _ = read_command_line(words, Path("/"))
        except RunnerError:
            continue
        if found.image or found.base:
            called.append(edf(found))
    if not called:
        return "not called"
    return "right" if edf(adopted) in called else f"wrong: {edf(adopted)} is not in {called}"


def from_mirror(row: dict[str, str], mirrors: Path, work: Path) -> str | None:
    """The verdict about a script of the list; None if there is no mirror of its repository."""
    source = corpus.git_directory(mirrors, row["repository"])
    try:
        data = corpus.git(source, "show", f"{row['commit']}:{row['path']}")
    except (subprocess.CalledProcessError, NotADirectoryError, FileNotFoundError):
        return None
    script = work / "top" / row["path"]
    script.parent.mkdir(parents=True)
    script.write_bytes(data)
    return " ".join(verdict(script, work / "top", work).replace(str(script), script.name).split())


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="nox -s bench -- adopt", description=__doc__)
    parser.add_argument("--mirrors", type=Path, required=True, help="folder with git directories OWNER+NAME")
    parser.add_argument("--corpus", action="store_true", help="read the scripts of bench/scripts/corpus.tsv instead")
    parser.add_argument("--write", action="store_true", help="write the verdicts to the list")
    options = parser.parse_args(argv)
    path = corpus.LIST if options.corpus else LIST
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="adopt-") as temporary:
        for number, row in enumerate(rows):
            row["verdict"] = from_mirror(row, options.mirrors, Path(temporary) / str(number)) or "not read"
            found[row["verdict"].split(":")[0]] += 1
            print(f"{row['repository']}: {row['path']}\n    {row['verdict'][:600]}")
    for what, count in found.most_common():
        print(f"{count:5} {what}")
    if options.write and not options.corpus:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
