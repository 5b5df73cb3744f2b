"""The same script, run by plain sbatch and by `runner launch`: does it make the same calls?

Everything happens in sandboxes: own file system, own processes, no network. /usr/local/bin has `standin.sh` under the
names of the programs that scripts call. Each script runs three times from the same folder: twice by plain sbatch, and
once by `runner launch`. What differs between the first two runs varies by itself, and is not compared. Then it runs
three more times, while the stand-ins of programs end with code 3.

A run that does not end is cancelled after SECONDS, and its calls until then are compared.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.scripts import corpus, submitted
from bench.scripts.shape import Shape, configuration, node_list, node_words, options, reserve
from tests.lab.slurm import SlurmLab

REPOSITORY = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).with_name("standin.sh")
PROGRAMS = """
srun mpirun mpiexec mpiexec.hydra mpirun_rsh ibrun aprun jsrun horovodrun torchrun accelerate deepspeed python python2
python3 apptainer singularity enroot docker podman module ml conda mamba micromamba nvidia-smi rocm-smi pip pip3 uv
git wget curl ssh scp rsync aws gsutil azcopy spack julia Rscript R matlab java ray parallel make cmake gcc g++
gfortran nvcc mpicc mpif90 nsys ncu sbatch scancel squeue sinfo sacct scontrol sleep cp tar unzip dask-worker dask
dask-scheduler vllm litgpt axolotl llamafactory-cli jupyter ollama numactl gmx stata sas perl xvfb-run lmp namd2
charmrun tensorboard wandb hf huggingface-cli
"""
NODES = 32
"""virtual nodes of a lab; a script that requests more runs on FEWER, by the same option for sbatch and for runner"""
FEWER = ("--nodes", "2")
SECONDS = 12
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
BASH_ENV = ': "${BASH_LEVELS:=0}"; export BASH_LEVELS=$((BASH_LEVELS + 1))\n'
"""a file such as Lmod names in BASH_ENV: every bash reads it"""
TRIES = 3
"""processes that run side by side make their calls in another order each time; so does a clock at the full minute"""
ARGUMENTS = ("first", "two words")
ARRAY = "1-2"
"""the tasks of a job array that are run"""


def sandbox(work: Path, read: Sequence[Path], words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command in a sandbox in which only `work` is written for good."""
    argv = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent", "--tmpfs", "/"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            argv += ["--symlink", str(entry.readlink()), str(entry)]
        elif entry.is_dir() and entry.name not in ("proc", "dev", "tmp", "home", "root", "run", "sys", "lost+found"):
            argv += ["--ro-bind", str(entry), str(entry)]
    argv += ["--proc", "/proc", "--dev-bind", "/dev", "/dev", "--ro-bind", "/sys", "/sys"]
    for folder in (
        "/tmp",
        "/home",
        "/root",
        "/run",
        "/records",
        "/usr/local/bin",
        "/opt",
        "/mnt",
        "/var/tmp",
        "/usr/local/sbin",
    ):
        argv += ["--tmpfs", folder]
    base = Path(sys.base_prefix)
    packages = [Path(name) for name in sys.path if Path(name).is_dir()]  # those of the environment may be elsewhere
    for path in dict.fromkeys((base, REPOSITORY, Path(sys.prefix), *packages, *read)):
        argv += ["--ro-bind", str(path), str(path)]
    argv += ["--bind", str(work), str(work), "--chdir", str(REPOSITORY)]
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
    environ["PYTHONPATH"] = str(REPOSITORY / "src")
    environ |= {"XDG_CACHE_HOME": str(work / "cache"), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}
    log = (work / "log.txt").open("wb")
    return subprocess.Popen([*argv, *words], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def play(scripts: Sequence[corpus.Script], chosen: Any, work: Path) -> dict[str, dict[str, str]]:
    """SHA-256 -> the verdict; the scripts are divided among `chosen.jobs` sandboxes."""
    shares = [scripts[number :: chosen.jobs] for number in range(chosen.jobs)]
    started = []
    mirrors, source = chosen.mirrors.resolve(), chosen.source.resolve()
    for number, share in enumerate(shares):
        folder = work / f"sandbox{number}"
        folder.mkdir(parents=True, exist_ok=True)
        corpus.write_list(share, folder / "list.tsv")
        words = ("-m", "bench.scripts.recorded", str(folder), str(mirrors), chosen.against, str(source))
        started.append((folder, sandbox(folder, (mirrors, source), (sys.executable, *words))))
    verdicts: dict[str, dict[str, str]] = {}
    for folder, process in started:
        if process.wait():
            print((folder / "log.txt").read_text(errors="replace")[-3000:])
        result = folder / "result.json"
        verdicts |= json.loads(result.read_text()) if result.exists() else {}
    return verdicts


class Stage:
    """A lab inside of a sandbox. Every run starts with the same files."""

    def __init__(self, slurm: SlurmLab, source: Path) -> None:
        self.slurm = slurm
        self.lasting = {*Path("/").iterdir()}
        self.temporary = {*Path("/tmp").iterdir()}
        self.environ = {name: value for name, value in slurm.environ.items() if not name.startswith("XDG_")}
        self.environ |= {"BASH_ENV": "/home/bash_env", "PYTHONPATH": str(source), "TERM": "dumb"}

    def reset(self, code: int) -> None:
        """Remove everything that the last run has left."""
        fresh = [*(set(Path("/").iterdir()) - self.lasting), *(set(Path("/tmp").iterdir()) - self.temporary)]
        packages = {parent for name in sys.path for parent in Path(name).parents}
        homes = [path for path in Path("/root").iterdir() if path.name != ".pyenv" and path not in packages]
        for path in (
            *fresh,
            *homes,
            *Path("/home").iterdir(),
            *Path("/var/tmp").iterdir(),
            *Path("/records").iterdir(),
        ):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        Path("/home/bash_env").write_text(BASH_ENV)
        Path("/records/.code").write_text(f"{code}\n")
        submitted.site(Path("/root"), 'run_folder = "/home/runs"\n')  # not among the files of the script

    def run(self, script: corpus.Script, tree: Path, runner: bool, code: int) -> dict[str, Any]:
        """Run the script once; returns what was recorded."""
        self.reset(code)
        place = Path("/home/user/project")
        shutil.copytree(tree, place)
        path = place / script.path
        text = path.read_text(errors="replace")
        environ = {**self.environ, "PWD": str(path.parent), "SHLVL": "1"}
        if is_array(text):
            environ["SBATCH_ARRAY_INX"] = ARRAY
        environ |= supply(path.parent, text, environ)
        before = {str(each.relative_to(place)) for each in place.rglob("*")}
        fewer = FEWER if node_count(text) > NODES else ()
        plain = ("/usr/bin/sbatch", "--parsable", *fewer, f"./{path.name}", *ARGUMENTS)
        launch = (sys.executable, "-m", "runner", "launch", "--site", "lab", "--parsable", *fewer, f"./{path.name}")
        done = subprocess.run(
            (*launch, "--", *ARGUMENTS) if runner else plain,
            cwd=path.parent,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
        )
        if done.returncode:
            return {"refused": done.stderr.strip()[-1500:]}
        job = done.stdout.strip().splitlines()[-1].partition(";")[0]
        tasks = self.wait(job)
        found: dict[str, Any] = {"job": job, "tasks": tasks, "calls": calls(tasks)}
        found["output"] = {
            name: Path(tasks[0][name]).read_text(errors="replace")
            for name in ("StdOut", "StdErr")
            if tasks and Path(tasks[0].get(name, "/nonexistent")).is_file()
        }
        now = {str(each.relative_to(place)) for each in place.rglob("*")} if place.exists() else set()
        found["files"] = sorted(name for name in now - before if "runs" not in name.split("/"))
        return found

    def wait(self, job: str) -> list[dict[str, str]]:
        """The fields of each task of the job once all have ended; after SECONDS they are cancelled."""
        deadline, cancelled = time.monotonic() + SECONDS, False
        while True:
            shown = self.slurm.run(("/usr/bin/scontrol", "show", "--oneliner", "job", job), check=False).stdout
            tasks = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines() if "JobId=" in line]
            if tasks and all(task.get("JobState") in ENDED for task in tasks):
                return [{**task, "cancelled": str(cancelled)} for task in tasks]
            if time.monotonic() > deadline:
                if cancelled and time.monotonic() > deadline + 40:
                    raise SystemExit(f"job {job} does not end: {shown}")
                if not cancelled:
                    self.slurm.run(("/usr/bin/scancel", job), check=False)
                    cancelled = True
                time.sleep(0.3)
            time.sleep(0.05)


def supply(folder: Path, text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Make what a script expects of its cluster, empty: folders of output files, folders that it changes to, and files
    that it sources. Returns a value for each variable that it reads and never sets."""
    assigned = set(re.findall(r"(?:^|[\s;(])(\w+)\+?=", text)) | set(
        re.findall(r"\b(?:for|read)\s+(?:-\w+\s+)*(\w+)", text)
    )
    used = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]{2,})", text)) - assigned
    own = (
        "SLURM",
        "SBATCH",
        "BASH",
        "RANDOM",
        "SECONDS",
        "LINENO",
        "CUDA_VISIBLE",
        "OPTARG",
        "OPTIND",
        "PIPESTATUS",
        "HOSTNAME",
    )
    values = {name: f"/scratch/{name}" for name in sorted(used) if name not in environ and not name.startswith(own)}
    known = {**environ, **values}
    outputs = [
        str(Path(value).parent)
        for name, value in options(text)
        if name in ("output", "error") and "%" not in str(Path(value).parent)
    ]
    folders = [*outputs, *re.findall(r"(?m)^\s*(?:cd|pushd)\s+([^\s;&|]+)", text), *values.values()]
    files = re.findall(r"(?m)(?:^|&&|;)\s*(?:source|\.)\s+([^\s;&|]+)", text)
    for word, is_file in (*((word, False) for word in folders), *((word, True) for word in files)):
        word = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], "$"), word.strip("\"'")).replace("~", "/root")
        path = folder / word
        if re.search(r"[$`%(){}]", word) or path.exists():
            continue
        with suppress(OSError):
            (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
            if is_file and "/" in word:
                path.touch()
    return values


def is_array(text: str) -> bool:
    return any(name == "array" for name, _ in options(text))


def node_count(text: str) -> int:
    """The largest number of nodes that the script requests."""
    found = [value for name, value in options(text) if name == "nodes"]
    return max([int(number) for value in found for number in re.findall(r"\d+", value)], default=1)


def calls(tasks: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The recorded calls in their order."""
    found = []
    for folder in sorted(path for path in Path("/records").iterdir() if (path / "done").exists()):
        raw = {name: (folder / name).read_bytes().decode("utf-8", "surrogateescape") for name in PARTS_OF_CALL}
        environ = dict(each.partition("=")[::2] for each in raw["environ"].split("\0") if each)
        found.append(
            {
                "words": raw["words"].split("\0")[:-1],
                "folder": raw["folder"].strip(),
                "environ": {name: value for name, value in environ.items() if not name.startswith("RUNNER_")},
                "parent": raw["parent"].split("\0")[:-1],
                "process": raw["process"].splitlines(),
                "task": environ.get("SLURM_ARRAY_TASK_ID", ""),
            }
        )
    return found


PARTS_OF_CALL = ("words", "folder", "environ", "parent", "process")


def flat(found: Mapping[str, Any], wrapped: bool) -> dict[str, str]:
    """What was recorded as one mapping: place -> text, with the job's own ids as JOB."""
    tasks = found["tasks"]
    ids = sorted({task["JobId"] for task in tasks} | {found["job"]}, key=int, reverse=True)
    texts: dict[str, str] = {}
    for number, task in enumerate(sorted(tasks, key=lambda task: task.get("ArrayTaskId", ""))):
        for name in ("JobState", "ExitCode", "Reason", "WorkDir", "Command"):
            texts[f"task {number} {name}"] = task.get(name, "")
    numbers: dict[str, int] = {}
    for call in sorted(found["calls"], key=lambda call: (call["task"], re.sub(r"\d+", "", "\0".join(call["words"])))):
        number = numbers[call["task"]] = numbers.get(call["task"], 0) + 1
        where = f"call {call['task'] + ' ' if call['task'] else ''}{number}"
        texts[f"{where} words"] = "\0".join(call["words"])
        texts[f"{where} folder"] = call["folder"]
        texts[f"{where} parent"] = "\0".join(call["parent"])
        texts[f"{where} process"] = "\n".join(call["process"])
        for name, value in call["environ"].items():
            texts[f"{where} ${name}"] = value
    for task in numbers:
        texts[f"order {task}"] = "\0".join(call["words"][0] for call in found["calls"] if call["task"] == task)
    for name, text in found["output"].items():
        texts[name] = text
    texts["files"] = "\n".join(found["files"])
    own = re.compile(rf"(?<!\d)({'|'.join(ids)})(?!\d)")
    rules = ((own, "JOB"), (r"job\d{5,}", "jobJOB"), (r"\b\d\d:\d\d:\d\d\b", "TIME"), (r"pipe:\[\d+\]", "pipe"))
    rules += ((r"\btmp\.\w{6,}", "tmp.NAME"), (r"(?m)^(declare -x |export )?RUNNER_\w+=.*\n", ""))
    rules += ((r"\d+m\d+\.\d+s", "TIME"), (r"(?m)^.*(elapsed|pagefaults).*$", "TIME"))
    if wrapped:  # docs/own-script.md says what differs then
        rules += ((r"\S*/(job\w+/slurm_script|runs/[^/\s]+/script/[^/\s\0:]+)", "SCRIPT"),)
    for pattern, word in rules:
        texts = {re.sub(pattern, word, name): re.sub(pattern, word, text) for name, text in texts.items()}
    return {name: text for name, text in texts.items() if not (wrapped and name.endswith((" Command", " parent")))}


MAY_VARY = re.compile(r" \$(SLURM_TASK_PID|SLURMD_TRES_FREQ|SLURM_JOB_START_TIME|SLURM_JOB_END_TIME)$")


def differences(first: Mapping[str, str], second: Mapping[str, str], other: Mapping[str, str]) -> dict[str, list[str]]:
    """What `other` has different from `first`, apart from words and numbers in which `first` and `second` differ."""
    found: dict[str, list[str]] = {}
    for name in sorted({*first, *other}):
        if MAY_VARY.search(name):
            continue
        one, two, three = first.get(name), second.get(name), other.get(name)
        if (
            one == three
            or (name in ("StdOut", "StdErr") and _lines(one) == _lines(three))
            or (one != two and masked(one or "", two or "", three or ""))
        ):
            continue
        found[name] = ["(none)" if text is None else text for text in (one, three)]
    return found


def _lines(text: str | None) -> list[str]:
    """The lines of a log, to which several processes write side by side."""
    return sorted((text or "").splitlines())


def masked(one: str, two: str, three: str) -> bool:
    """Whether `three` equals `one` in each word in which `two` does."""
    parts = [re.split(r"(\d+|\W)", text) for text in (one, two, three)]
    if len(parts[0]) != len(parts[1]):
        return True  # it varies as a whole
    return len(parts[2]) == len(parts[0]) and all(a != b or a == c for a, b, c in zip(*parts, strict=True))


def verdict(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """(the verdict, the details of what differs) of the six runs."""
    first, second, other, *failing = runs
    if "refused" in other:
        return {"calls": "runner refuses"}, {"refused": other["refused"]}
    wrapped = any("/wrapper/" in task.get("Command", "") for task in other["tasks"])
    details = differences(*(flat(run, wrapped) for run in (first, second, other)))
    repeated = differences(*(flat(run, wrapped) for run in failing))
    details |= {f"code 3, {name}": pair for name, pair in repeated.items()}
    if details:
        return {"calls": f"differs: {next(iter(details))}"}, details
    count = len(first["calls"])
    codes = sorted({task["ExitCode"] for run in (first, failing[0]) for task in run["tasks"]})
    return {"calls": "same", "reason": f"{count} calls; exit codes {' '.join(codes)}{'; wrapper' * wrapped}"}, {}


def compare(stage: Stage, script: corpus.Script, tree: Path, by_runner: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """(the verdict, the details of what differs) of one script."""
    interpreter = (tree / script.path).read_text(errors="replace").partition("\n")[0].removeprefix("#!").split()
    if interpreter and not Path(interpreter[0]).exists():
        return {"calls": "not run", "reason": f"this machine has no {interpreter[0]}"}, {}
    first = stage.run(script, tree, False, 0)
    if "refused" in first or first["tasks"][0].get("StartTime") in (None, "Unknown", "None"):
        what = first.get("refused") or f"it does not start in the lab: {first['tasks'][0].get('Reason')}"
        return {"calls": "not run", "reason": submitted.last_line(what)}, {}
    rounds = ((False, 0), (by_runner, 0), (False, 3), (False, 3), (by_runner, 3))
    return verdict([first, *(stage.run(script, tree, kind, code) for kind, code in rounds)])


def inside(work: Path, mirrors: Path, against: str, source: Path) -> None:
    """Run all scripts of the list in `work`; this is what runs in the sandbox."""
    subprocess.run(("ip", "address", "add", "10.9.8.7/32", "dev", "lo"), check=True)  # else Slurm resolves no name
    Path("/usr/local/bin/activate").touch()  # source activate ENVIRONMENT
    for name in PROGRAMS.split():
        shutil.copy(STANDIN, f"/usr/local/bin/{name}")
    scripts = corpus.read_list(work / "list.tsv")
    trees = {script.sha256: work / "trees" / script.sha256[:16] for script in scripts}
    shape, results, details = Shape(), {}, {}
    for script in scripts:
        path = corpus.extract(script, mirrors, trees[script.sha256], beside=True)
        shape.read(path.read_text(errors="replace"))
    plugins = (str(submitted.plugin(work)),)
    lab = SlurmLab(NODES, plugins, extra_config=configuration(shape, ()), node=node_words(shape))
    lab.nodes = (*lab.nodes, *node_list(shape))
    with lab:
        reserve(lab, shape, f"nid[{NODES - 9:03}-{NODES:03}]")
        stage = Stage(lab, source)
        for number, script in enumerate(scripts, 1):
            began = time.monotonic()
            tree, by_runner = trees[script.sha256], against == "runner"
            for _ in range(TRIES):
                results[script.sha256], found = compare(stage, script, tree, by_runner)
                if not found:
                    break
            if found:
                details[script.name] = found
            seconds = time.monotonic() - began
            print(f"{number}/{len(scripts)} {seconds:.1f} s {script.name}: {results[script.sha256]}", flush=True)
            (work / "result.json").write_text(json.dumps(results, indent=1))
            (work / "details.json").write_text(json.dumps(details, indent=1, ensure_ascii=True))


if __name__ == "__main__":
    inside(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
