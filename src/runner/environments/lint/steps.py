"""Rules for the steps of a batch script: how many tasks they have, which variables and signals those get."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from runner.environments.lint.finding import Finding
from runner.environments.lint.script import TORCHRUN, Batch, Line, Step, option


def _number(text: str | None) -> int | None:
    """The number in an option, of a range the larger one; None if there is none, or only the job knows it."""
    found = re.fullmatch(r"(?:\d+-)?(\d+)", text or "")
    return int(found[1]) if found else None


def nodes_of(batch: Batch, step: Step) -> int | None:
    """The number of nodes of a step; None if it is not known."""
    own = step.option("-N", "--nodes")
    if own is None and not step.is_known:
        return None
    return _number(batch.script.option("-N", "--nodes") if own is None or "SLURM" in own else own)


def tasks_per_node(batch: Batch, step: Step | None) -> int | None:
    """The number of tasks on each node; None if it is not known."""
    script = batch.script

    def given(*names: str) -> str | None:
        own = step.option(*names) if step else None
        return own if own is not None else script.option(*names)

    nodes = nodes_of(batch, step) if step else _number(script.option("-N", "--nodes"))
    own_tasks = step.option("-n", "--ntasks") if step else None
    own_per_node = step.option("--ntasks-per-node") if step else None
    if step and not step.is_known and own_tasks is None and own_per_node is None:
        return None
    per_node = given("--ntasks-per-node")
    if own_tasks is None and per_node is not None:
        return _number(per_node)
    total = given("-n", "--ntasks")
    if total is not None:
        if re.search("NNODES|NUM_NODES", total):
            return 1
        tasks = _number(total)
        return -(-tasks // nodes) if tasks and nodes else tasks
    gpus, per_task = _number(given("-G", "--gpus")), _number(given("--gpus-per-task"))
    if gpus and per_task:
        return -(-gpus // per_task // (nodes or 1))
    return 1


def _shares_gpus(batch: Batch, step: Step | None) -> bool:
    """Whether a task sees the GPUs of the node's other tasks in spite of --gpus-per-task. A step inherits the options
    of the job, and may override them."""
    for name, wanted in (("--gpu-bind", "none"), ("--gres-flags", "allow-task-sharing")):
        own = step.option(name) if step else None
        given = own if own is not None else batch.script.option(name)
        if wanted in (given or "").split(","):
            return True
    return False


def gpus_per_task(batch: Batch) -> Iterator[Finding]:
    """GPUs that are bound to tasks. Source: Slurm 25.11, srun(1)."""
    every = batch.script.steps
    several = [each for each in every if tasks_per_node(batch, each) != 1]
    shared = bool(several) and all(_shares_gpus(batch, each) for each in several)
    name = "--gpus-per-task"
    places: list[tuple[Line, str | None, Step | None]]
    places = [(line, option(line.text, name), None) for line in batch.script.directives]
    places += [(step.line, step.option(name), step) for step in every]
    for line, given, step in places:
        tasks = tasks_per_node(batch, step)
        if given is None or tasks == 1:
            continue
        if _shares_gpus(batch, step) or (step is None and shared):
            continue
        reason = "a task cannot see the GPUs of the node's other tasks, but NCCL must see them"
        if tasks is None:
            reason = "if a node has several tasks, none of them sees the other tasks' GPUs, but NCCL must see them"
        yield batch.say("gpus-per-task", line, name, reason)


def cpus_not_inherited(batch: Batch) -> Iterator[Finding]:
    """CPUs of the steps. Source: Slurm 25.11, srun(1); in 22.05 and 23.02 srun does not inherit -c."""
    cores = batch.script.option("-c", "--cpus-per-task")
    if cores in (None, "1") or "SRUN_CPUS_PER_TASK" in batch.text():
        return
    for step in batch.script.steps:
        if step.option("-c", "--cpus-per-task") is None and not _needs_one_core(step.program):
            reason = f"srun might give each task 1 core instead of {cores}"
            yield batch.say(
                "cpus-not-inherited", step.line, "srun", reason, f"srun --cpus-per-task={cores} …"
            )


_SMALL = re.compile(
    "hostname|echo|printf|mkdir|rm|cp|mv|ln|ls|cat|chmod|touch|date|sleep|nvidia-smi|rocm-smi"
)


def _needs_one_core(words: Sequence[str]) -> bool:
    """Whether a step only says something or handles a few files, also by one command of `bash -c`."""
    if len(words) > 2 and PurePath(words[0]).name in ("bash", "sh") and words[1] in ("-c", "-lc"):
        words = () if re.search(r"[;&|\n(`]", words[2]) else words[2].split()
    return bool(words) and _SMALL.fullmatch(PurePath(words[0]).name) is not None


def number_of_nodes(batch: Batch) -> Iterator[Finding]:
    """A launcher that is not told that there are several nodes: each one trains alone.

    Source: torchrun of PyTorch 2.7, --nnodes (default: 1:1), --standalone; accelerate 1.7, launch.py, --num_machines.
    """
    text = batch.text()
    for step in batch.script.steps:
        if (nodes_of(batch, step) or 1) < 2 or "--standalone" in step.text:
            continue
        if re.search(r"\baccelerate\s+launch\b", step.text):
            if not re.search(r"num_machines|config_file|ACCELERATE_", text):
                reason = "accelerate does not know of the other nodes, so each node trains alone"
                yield batch.say(
                    "nnodes-missing",
                    step.line,
                    "srun",
                    reason,
                    "add --num_machines, --machine_rank, --main_process_ip and --main_process_port",
                )
        elif TORCHRUN.search(step.text) and not re.search(r"--nnodes|PET_NNODES", text):
            reason = "torchrun without --nnodes expects one node, so each node trains alone"
            yield batch.say("nnodes-missing", step.line, "srun", reason)


def launchers_per_node(batch: Batch) -> Iterator[Finding]:
    """Several torchruns on one node, each of which starts the processes of the whole node."""
    for step in batch.script.steps:
        match = re.search(r"--nproc[-_]per[-_]node[=\s]+[\"']?([^\s\"']+)", step.text)
        tasks = tasks_per_node(batch, step)
        if TORCHRUN.search(step.text) and match and match[1] != "1" and tasks and tasks > 1:
            reason = (
                f"srun starts {tasks} torchruns on each node, and each starts {match[1]} processes"
            )
            yield batch.say("torchrun-per-task", step.line, "srun", reason)


def exported(batch: Batch) -> Iterator[Finding]:
    """Variables that the script sets, and its steps do not get. Source: Slurm 25.11, sbatch(1) and srun(1), --export:
    srun takes over the job's --export, in SLURM_EXPORT_ENV."""
    script, text = batch.script, batch.text()
    own = script.option("--export")
    sets = re.search(
        r"^\s*(export|module|ml|source|\.|conda|micromamba|spack|declare\s+-x)\s",
        text,
        re.MULTILINE,
    )
    inherited = (
        own is not None and not _exports_all(own) and sets and "SLURM_EXPORT_ENV" not in text
    )
    for step in batch.script.steps:
        given = step.option("--export")
        if given is None and inherited:
            reason = f"the step inherits --export={own} from #SBATCH, and does not get what the script exports"
            yield batch.say("export-without-all", step.line, "srun", reason)
            return  # one line is enough
        if given and not _exports_all(given) and given.upper() not in {"NONE", "NIL"}:
            reason = f"the step gets only the variables in --export={given}, and not those that the script exports"
            fix = f"srun --export=ALL,{given} …"
            yield batch.say("export-without-all", step.line, "--export", reason, fix)


def _exports_all(value: str) -> bool:
    return "ALL" in value.upper().split(",") or "$" in value


def signals(batch: Batch) -> Iterator[Finding]:
    """`--signal=USR1@90` goes to the tasks of the steps. torchrun has no handler for it, so it ends, and its workers.

    Source: PyTorch 2.7, torch/distributed/elastic/multiprocessing/api.py: SIGTERM, SIGINT, SIGHUP, SIGQUIT; later
    versions take others from --signals-to-handle.
    """
    if re.search(r"signals[-_]to[-_]handle", batch.text(), re.IGNORECASE):
        return
    launched = any(TORCHRUN.search(step.text) for step in batch.script.steps)
    for line in batch.script.directives:
        found = re.fullmatch(
            r"(?:R:)?(?:SIG)?(USR[12]|10|12)(?:@\d+)?", option(line.text, "--signal") or ""
        )
        if launched and found:
            reason = (
                f"the signal {found[1]} ends torchrun, which has no handler for it, and its workers"
            )
            yield batch.say("signal-ends-torchrun", line, "#SBATCH", reason)


RULES: tuple[Callable[[Batch], Iterator[Finding]], ...] = (
    gpus_per_task,
    cpus_not_inherited,
    number_of_nodes,
    launchers_per_node,
    exported,
    signals,
)
