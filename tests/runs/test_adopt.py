"""What someone has already becomes an EDF and a job file; what cannot be carried over is noted, nothing is dropped."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.bash import commands
from runner.environments.edf import Mount
from runner.environments.emit import emitted
from runner.environments.environment import Environment
from runner.environments.rewriting import rewrite
from runner.errors import RunnerError
from runner.expansion import expand
from runner.runs.adopt.adopted import Adopted
from runner.runs.adopt.containers import CONTAINER
from runner.runs.adopt.job import Draft
from runner.runs.adopt.options import SBATCH, SRUN
from runner.runs.adopt.script import read_command_line, read_script
from runner.site_files import load_site
from tests.conftest import need


def from_words(*argv, folder=Path("/here")):
    """(EDF, job file, notes) made from a command line."""
    adopted, job = Adopted(), Draft()
    program = read_command_line(argv, adopted, job, folder)
    return data(adopted, job, program)


def from_script(text):
    adopted, job = Adopted(), Draft()
    program = read_script("#!/bin/bash\n" + text, adopted, job, Path("/here"), "job.sbatch")
    return data(adopted, job, program)


def data(adopted, job, program):
    edf = tomllib.loads(rewrite("", adopted.changes()))
    made = tomllib.loads(rewrite("", job.changes(program, "it", "s")))
    return edf, made, [*adopted.notes, *adopted.no_edf, *adopted.no_job]


def refused(text, *, edf=False):
    """Why a script cannot become a job file, or an EDF."""
    adopted = Adopted()
    read_script("#!/bin/bash\n" + text, adopted, Draft(), Path("/here"), "job.sbatch")
    return "\n".join(adopted.no_edf if edf else adopted.no_job)


DOCKER = ("docker", "run")


@pytest.mark.parametrize(
    ("words", "edf"),
    [
        (("-v", "/a:/b"), {"mounts": ["/a:/b"]}),
        (("-v/a:/b:ro,z",), {"mounts": ["/a:/b:ro"]}),
        (("--volume=./a:/b:rw,rslave",), {"mounts": ["/here/a:/b:rslave"]}),
        (("--mount", "type=bind,src=/a,dst=/b,readonly"), {"mounts": ["/a:/b:ro"]}),
        (("--mount=type=bind,source=/a,target=/b,bind-propagation=private",), {"mounts": ["/a:/b:private"]}),
        (("-w", "/w"), {"workdir": "/w"}),
        (("-e", "A=b c", "--env=B=${HOME}"), {"env": {"A": "b c", "B": "$${HOME}"}}),
        (("--read-only",), {"writable": False}),
        (("--entrypoint", ""), {"entrypoint": False}),
        (("--gpus", "all"), {"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
        (("--device", "nvidia.com/gpu=all"), {"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
        (("--device=/dev/gdrdrv",), {"devices": ["/dev/gdrdrv"]}),
        (("--unsetenv", "A"), {"env": {"A": ""}}),
        (
            ("--annotation", "com.hooks.cxi.enabled=true"),
            {"annotations": {"com": {"hooks": {"cxi": {"enabled": "true"}}}}},
        ),
        (("-itd", "--rm"), {}),
    ],
)
def test_options_of_docker_and_podman(words, edf):
    for engine in ("docker", "podman"):
        found, job, _ = from_words(engine, "run", *words, "a/b:1", "sh", "-c", "echo $A")
        assert found == {"image": "a/b:1", "entrypoint": True, "writable": True} | edf
        assert job["command"] == ["sh", "-c", "echo $A"]


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("nvcr.io/nvidia/pytorch:24.06-py3", "nvcr.io#nvidia/pytorch:24.06-py3"),
        ("localhost:5000/a:1", "localhost:5000#a:1"),
        ("docker.io/library/ubuntu:24.04", "library/ubuntu:24.04"),
        ("docker://ghcr.io/a/b", "ghcr.io#a/b"),
        ("ubuntu", "ubuntu"),
        ("user@reg.example#a/b", "user@reg.example#a/b"),
    ],
)
def test_registries_are_written_as_every_version_of_enroot_reads_them(given, image):
    assert from_words("podman", "run", given)[0]["image"] == image


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("-v", "vol:/a", "i"), "-v vol:/a: 'vol' is a volume"),
        (("-v", "/a", "i"), "anonymous volume"),
        (("-v", "/a:/b:O", "i"), "-v /a:/b:O: mounts of an EDF do not have the flags O"),
        (("--mount", "type=bind,src=/a,dst=/b,x=y", "i"), "mounts of an EDF do not have the flags x=y"),
        (("--mount", "type=tmpfs,dst=/a", "i"), "not tmpfs"),
        (("--tmpfs", "/a", "i"), "cannot mount a tmpfs"),
        (("--network=none", "i"), "--network=none: not carried over"),
        (("-v", "/dev/shm:/dev/shm", "i"), "-v /dev/shm:/dev/shm: not needed"),
        (("--network=host", "i"), "--network=host: not needed"),
        (("--privileged", "i"), "--privileged: not carried over"),
        (("--memory", "4g", "i"), "memory in [resources]"),
        (("-e", "A", "i"), "-e A: not needed: the container gets the host's variables"),
        (("-e", "HF_TOKEN=hf_x", "i"), "HF_TOKEN=…: not carried over: it is a secret"),
        (("-e", "A=", "i"), "-e A=: not carried over: in an EDF, an empty value unsets"),
        (("--env-file", "nope", "i"), "--env-file nope: write the variables of the file"),
        (("--entrypoint", "/e", "i"), "--entrypoint /e: becomes the beginning of the command"),
        (("--rootfs", "/a"), "--rootfs: an EDF needs a squashfs file"),
        (("--some-new-option=1", "i"), "--some-new-option=1: not carried over"),
        (("localhost/x",), "localhost/x: the image is only in the engine's storage"),
        ((), "the command line names no image"),
    ],
)
def test_what_is_not_carried_over_is_said(words, note):
    notes = from_words(*DOCKER, *words)[2]
    assert [line for line in notes if note in line], notes
    assert "hf_x" not in "".join(notes)


def test_flags_of_pyxis():
    edf, job, notes = from_words(
        *("--container-image=nvcr.io#nvidia/pytorch:24.06-py3", "--container-mounts=/a:/b:ro+private,/c"),
        *("--container-workdir", "/w", "--container-readonly", "--container-entrypoint", "--container-mount-home"),
        *("--container-env=A", "--container-remap-root", "--container-name=x", "--container-entrypoint-log"),
    )
    assert edf == {
        "image": "nvcr.io#nvidia/pytorch:24.06-py3",
        "workdir": "/w",
        "entrypoint": True,
        "writable": False,
        "mounts": ["/a:/b:ro+private", "/c:/c", "${HOME}:${HOME}"],
        "env": {"PYTHONNOUSERSITE": "1"},
        "annotations": {"com": {"pyxis": {"entrypoint_log": "true"}}},
    }
    assert "command" not in job and "script" not in job
    for word in ("--container-env=A (A)", "--container-remap-root", "--container-name=x"):
        assert [note for note in notes if note.startswith(word)], word


def test_an_environment_that_is_named_becomes_the_base():
    edf, job, _ = from_words("srun", "-N2", "--environment=ngc", "--container-writable", "python", "x.py")
    assert edf == {"base_environment": "ngc", "writable": True}
    assert (job["command"], job["launcher"], job["resources"]) == (["python", "x.py"], "none", {"nodes": 2})


def test_other_programs_are_refused_by_name():
    with pytest.raises(RunnerError, match="cannot adopt a command line that starts with 'apptainer'"):
        from_words("apptainer", "exec", "x.sif", "true")


SCRIPT = r"""#SBATCH --job-name=train --nodes=4 --ntasks-per-node=1
#SBATCH --gpus-per-node=4 --cpus-per-task=288 -t 12:00:00
#SBATCH --no-requeue   # a comment
#SBATCH --signal=B:USR1@300 --constraint=thp_never
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
export NCCL_DEBUG=INFO
export HF_HOME="$SCRATCH/hf"
export HF_TOKEN=hf_secret_of_mine
WHERE=$PWD/images
IMAGE=$WHERE/ngc.sqsh
WHEN=$(date +%s)
FLAGS="--label --kill-on-bad-exit=1"
ARGS=(
  --lr 1e-5   # the rate
  --out "/out dir"
)
ARGS+=(--seed 1)
cat > hosts <<EOF
srun this is no command
EOF
srun hostname
#SBATCH --nodes=9
A=1 srun $FLAGS --container-image=$IMAGE --container-mounts="$SCRATCH:/scratch,/d/$WHEN:/d" \
  --container-env=NCCL_DEBUG torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 \
  --rdzv_endpoint=$MASTER_ADDR:29500 train.py --config x.yaml "${ARGS[@]}" > log.txt 2>&1
"""


def test_a_batch_script_becomes_an_edf_and_a_job_file():
    edf, job, notes = from_script(SCRIPT)
    assert edf == {
        "image": "/here/images/ngc.sqsh",
        "mounts": ["${SCRATCH}:/scratch", "/d/${WHEN}:/d"],
        "env": {"NCCL_DEBUG": "INFO"},
    }
    host = job.pop("host_setup").splitlines()
    assert (host[:2], host[-2:]) == (["cd /here", "set -euo pipefail"], ["export WHEN", "export A=1"])
    assert {'export HF_HOME="$SCRATCH/hf"', "cat > hosts <<EOF", "srun this is no command"} <= set(host)
    assert job == {
        "summary": "s",
        "command": ["train.py", "--config", "x.yaml", "--lr", "1e-5", "--out", "/out dir", "--seed", "1"],
        "program_in_image": True,
        "environment": "it",
        "launcher": "torchrun",
        "save_seconds": 300,
        "resources": {"nodes": 4, "gpus_per_node": 4, "cpus_per_task": 72, "time": "12:00:00", "tasks_per_node": 4},
        "slurm": {"sbatch": ["--no-requeue", "--constraint=thp_never"], "srun": ["--label", "--kill-on-bad-exit=1"]},
    }
    text = "\n".join(notes)
    for word in (
        "--job-name=train: a run is named after its job file: rename the file to train.toml",
        "line 10: export HF_TOKEN=…: not carried over: it is a secret",
        "line 13: WHEN=$(date +%s): the EDF uses ${WHEN}, so host_setup now exports WHEN",
        "line 23: srun hostname: this step only prints",
        "line 24: #SBATCH --nodes=9: not carried over",
        "> log.txt: not carried over: a run has one log",
        "--rdzv_endpoint=$MASTER_ADDR:29500: not needed",
    ):
        assert word in text, (word, text)
    assert "hf_secret" not in text


STEP = {"command": ["bash", "-c", 'eval "exec $STEP_COMMAND"'], "launcher": "none"}


@pytest.mark.parametrize(
    ("step", "job"),
    [
        ("-n8 -N2 python -u x.py 1", {"command": ["python", "-u", "x.py", "1"], "launcher": "none"}),
        ("bash -c 'cd /x && y \"$A\"'", {"command": ["bash", "-c", 'cd /x && y "$A"'], "launcher": "none"}),
        ("bash -c \"y $A \\$B\"", {**STEP, "host_setup": 'bash -c "y $A \\$B"'}),
        ("python -m torch.distributed.run --nproc-per-node 2 -m a.b -x", {"command": ["-m", "a.b", "-x"],
         "launcher": "torchrun", "resources": {"tasks_per_node": 2}}),
        ("accelerate launch --config_file c.yaml x.py", {"launcher": "none",
         "command": ["accelerate", "launch", "--config_file", "c.yaml", "x.py"]}),
        ("torchrun x.py --id $SLURM_JOB_ID", {**STEP, "launcher": "torchrun",
         "host_setup": "python x.py --id $SLURM_JOB_ID"}),
        ("-n4 torchrun --nproc_per_node=4 x.py", {"command": ["torchrun", "--nproc_per_node=4", "x.py"],
         "launcher": "none", "resources": {"tasks_per_node": 4}}),
        ("torchrun --nproc_per_node=$(nproc) x.py", {**STEP, "host_setup": "torchrun --nproc_per_node=$(nproc) x.py"}),
        ("torchrun x.py", {"command": ["x.py"], "launcher": "torchrun", "resources": {"tasks_per_node": 1}}),
        ("x --at $(date +%s)", {**STEP, "host_setup": "x --at $(date +%s)"}),
        ("x \"${NOWHERE[@]}\" \"$@\"", {**STEP, "host_setup": 'x "${NOWHERE[@]}" "$@"'}),
        ("env A=1 -u B nvidia-smi", {"command": ["env", "A=1", "-u", "B", "nvidia-smi"], "launcher": "none"}),
    ],
)  # fmt: skip
def test_programs_of_steps(step, job):
    made = from_script(f"srun --container-image=i {step}")[1]
    host = made.get("host_setup", "")
    assert {key: made.get(key) for key in job if key != "host_setup"} == {
        k: v for k, v in job.items() if k != "host_setup"
    }
    assert f"export STEP_COMMAND=$(printf '%q ' {job['host_setup']})\n" in host if "host_setup" in job else not host


@pytest.mark.parametrize(
    ("words", "resources"),
    [
        (("-N2", "-n8"), {"nodes": 2, "tasks_per_node": 4}),
        (("--gres=gpu:h100:4",), {"gpus_per_node": 4}),
        (("--gpus=8", "--nodes", "2"), {"gpus_per_node": 4, "nodes": 2}),
        (("--gpus=0",), {"gpus_per_node": 0}),
        (("--cpus-per-gpu=12", "--gpus=2", "-n4"), {"tasks_per_node": 4, "gpus_per_node": 2, "cpus_per_task": 6}),
        (("-w", "a[01-03,7],b"), {"nodes": 5}),
        (("--gpus-per-task=1", "--ntasks-per-node=4"), {"gpus_per_node": 4, "tasks_per_node": 4}),
        (("--mem=450G", "-t", "30", "-pnormal", "-A", "a1"),
         {"memory": "450G", "time": "30", "partition": "normal", "account": "a1"}),
    ],
)  # fmt: skip
def test_counts_are_those_of_a_job_file(words, resources):
    assert from_words("srun", *words, "--container-image=i", "true")[1]["resources"] == resources


def test_counts_of_zero_are_not_carried_over():
    _, job, notes = from_words("srun", "-N0", "-n4", "--container-image=a/b", "true")
    assert job["resources"] == {"tasks_per_node": 4}
    assert any("-N0: runner computes the world size" in note for note in notes)


def test_what_a_condition_sets_is_not_known():
    """Also behind &&, and after a pattern of case."""
    for condition in (
        "if [ -n x ]; then\n  I=/a.sqsh\nfi",
        "[ -n x ] && I=/a.sqsh",
        "case $A in\nx) I=/a.sqsh ;;\nesac",
    ):
        assert "the image must be known at launch" in refused(f"{condition}\nsrun --container-image=$I true", edf=True)


IDIOMS = r"""
: "${APPS:=/fsx}"
: "${IMAGE:=$APPS/$(pwd)/x.sqsh}"
export SCRIPT=${SCRIPT:=train.py}
AUTO=""
if [ -d /opt/x ]; then
  AUTO="--auto-resume=1"
  declare -a MORE=(--container-writable)
fi
declare -a ARGS=(
  --container-image $IMAGE   # comment
  --container-mounts ./data:/data,`pwd`:/here2
)
srun $AUTO -l "${ARGS[@]}" python $SCRIPT "${NOWHERE[@]}"
"""


def test_idioms_of_batch_scripts_in_the_wild():
    edf, job, notes = from_script(IDIOMS)
    assert edf == {"image": "/fsx//here/x.sqsh", "mounts": ["/here/data:/data", "/here:/here2"]}
    assert "printf '%q ' python train.py \"${NOWHERE[@]}\")" in job["host_setup"]
    assert job["slurm"] == {"srun": ["--label"]}
    text = "\n".join(notes)
    for word in (
        "$PWD: read as /here, as if you submitted the script from that folder",
        "line 15: $AUTO: read as ''; the condition that changes the value is not carried over",
        "APPS, IMAGE, SCRIPT: read with the default values in the script",
    ):
        assert word in text, (word, text)


def test_an_array_that_a_condition_sets_is_not_known():
    text = 'if true; then\n  A=(--container-writable)\nfi\nsrun --container-image=i "${A[@]}" true\n'
    assert 'line 5: "${A[@]}": only a shell can evaluate these options' in refused(text, edf=True)


def test_a_script_of_another_language_is_refused():
    with pytest.raises(RunnerError, match="it is not a shell script") as caught:
        read_script("#!/usr/bin/env python3\n", Adopted(), Draft(), Path("/here"), "x.py")
    assert caught.value.fix == "run it unchanged: runner launch ./x.py"


HOST = """#SBATCH -N2
module purge
source /opt/site/env.sh
conda activate lm
cat > hosts <<END
a b
END
[ -d data ] || mkdir data
export ROOT=$(git rev-parse --show-toplevel) PORT=$((RANDOM + 1))
ulimit -s unlimited
LR=${1:-3e-4}
srun --container-image=/i.sqsh --container-mounts=$ROOT:/w python /w/t.py --lr $LR "$ROOT/c d" \\$SLURM_PROCID
"""


def test_lines_before_the_step_run_on_the_host(tmp_path):
    """As they are, in the folder of the script, with its arguments; the words of the step are evaluated there."""
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + HOST)
    edf, job, _ = from_words("sbatch", "job.sh", "1e-5", folder=tmp_path)
    assert edf["mounts"] == ["${ROOT}:/w"]
    head, *lines = job["host_setup"].splitlines()
    assert (head, lines[0]) == (f"cd {tmp_path}", "set -- 1e-5")
    assert lines[1:10] == HOST.splitlines()[1:10]
    assert "ulimit -s unlimited" in job["task_prolog"]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h"}
    for name, body in (("git", "echo /top"), ("conda", ""), ("module", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = job["host_setup"].replace("source /opt/site/env.sh", ":") + "\neval \"printf '%s|' $STEP_COMMAND\""
    done = subprocess.run(("bash", "-c", text), cwd="/", env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "python|/w/t.py|--lr|1e-5|/top/c d|$SLURM_PROCID|"
    assert (tmp_path / "data").is_dir() and (tmp_path / "hosts").read_text() == "a b\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("srun --container-image=i a\nsrun --container-image=j b", "line 2: srun --container-image=i a: a job has"),
        ("srun --container-image=i a\nrsync out /keep", "line 3: rsync out /keep: a job file has no place for"),
        ("mkdir x; srun --container-image=i a", "line 2: mkdir x: a job file has no place for commands on or after"),
        ("for i in 1 2; do\nsrun --container-image=i a $i\ndone", "line 3: srun --container-image=i a $i: it is"),
        ("cd x && srun --container-image=i a", "it is inside a condition, a loop or a function, or behind &&"),
        ("srun --container-image=i a | sort > b", "another command reads the output of the step"),
        ("srun --container-image=i $*", "the script: read without arguments"),
        ("srun --container-image=i a <<E\nx\nE", "the step reads this text as its input"),
        ('R="srun --container-image=$I"\nif a; then R="$R -l"; fi\n$R b', "line 4: $R b: only a shell can"),
        ("apptainer exec x.sif a", "line 2: apptainer exec x.sif a: an EDF cannot name a .sif file"),
        ("srun --container-image=i --pty bash", "line 2: bash: an interactive shell is not a job"),
        ("#SBATCH -a 1-3\nsrun --container-image=i a", "-a 1-3: the tasks of an array would share one run folder"),
        ("srun --container-image=i a : b", "line 2: srun `:`: it starts several programs, but a job has only one"),
        ("srun --container-image=i --container-save=s.sqsh a", "--container-save=s.sqsh: a job's changes"),
        ("#SBATCH -N4\nsrun -N1 --container-image=i a", "-N1: the step uses only a part of the job's 4 nodes"),
        ("#SBATCH -N4\nsrun --container-image=i torchrun --nnodes 2 a.py", "--nnodes 2: the job has 4 nodes"),
        ("srun -n $(nproc) --container-image=i a", "-n $(nproc): only a shell can evaluate this text"),
        ("srun -N2 -n7 --container-image=i a", "--ntasks=7: it cannot be divided evenly among 2 nodes"),
        ("source $(dirname $0)/e\nsrun --container-image=i a", "$0: in host_setup, $0 is not the path"),
        ("trap 'rm -r x' EXIT\nsrun --container-image=i a", "trap 'rm -r x' EXIT: this would end with host_setup"),
        ("export A=1\nmonitor 2>&1 &\nsrun --container-image=i a", "monitor 2>&1 &: this would end with"),
        ("login --token ghijklmnop\nsrun --container-image=i a", "line 2: login --token …: keep the secret"),
        ("docker run --gpus all vllm/vllm-openai --model m", "line 2: --model: only the image knows its entrypoint"),
        ("docker run a/worker:1 token=abcdefghijk", "line 2: token=…: only the image knows its entrypoint"),
        ("#SBATCH -N2 --container-image=i\ntrain", "--nodes=2: the script runs in a container on"),
        ("#SBATCH --environment=i\nsrun train", "line 3: srun train: the script itself runs in a container"),
    ],
)  # fmt: skip
def test_what_a_job_file_cannot_say_is_refused_with_its_line(text, why):
    assert why in refused(text), refused(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("srun --container-image=$(realpath i) a", "--container-image=$(realpath i): only a shell"),
        ("srun --container-image=i --container-mounts=$(dirname $PWD) a", "--container-mounts=$(dirname $PWD)"),
        ("cd $(mktemp -d)\nsrun --container-image=i --container-mounts=./a:/b a", "the folder to which this path"),
        ("srun --container-image=i --container-mounts=tmpfs:/t a", "(tmpfs:/t): the source 'tmpfs' must begin with"),
        ("srun apptainer exec x.sif a", "line 2: apptainer: an EDF cannot name a .sif file"),
        ("if a; then M=/a:/b; fi\nsrun --container-image=i --container-mounts=$M a", "$M: this variable may contain"),
        ("srun --container-image=i --container-env=$(compgen -e) a", "--container-env=$(compgen -e): only a shell"),
        ("V=$(list)\nsrun --container-image=i --container-env=$V a", "(${V}): set the variables in [env] of the EDF"),
        ("srun --environment=$E a", "a base environment must be known at launch"),
        ("#SBATCH --container-mounts=/a:/a\\ \\\n#SBATCH --container-image=i\na", "line 2: #SBATCH --container-mounts"),
    ],
)
def test_what_an_edf_cannot_say_is_refused_with_its_line(text, why):
    assert why in refused(text, edf=True), refused(text, edf=True)


def test_a_script_that_runs_in_a_container_is_the_command():
    """sbatch itself has the container: all lines run inside, once, with the CPUs of all tasks."""
    options = "#SBATCH -n4 -c6 --gres=gpu:a100:2 --container-image=i --container-workdir=/w"
    edf, job, _ = from_script(f"{options}\n# why\ncd $SLURM_SUBMIT_DIR\nmake\n")
    assert edf == {"image": "i", "workdir": "/w"}
    assert job["command"] == ["/bin/bash", "-c", "cd $SLURM_SUBMIT_DIR\nmake\n"]
    assert job["host_setup"] == "export SLURM_SUBMIT_DIR=/here\n"
    assert job["resources"] == {"cpus_per_task": 24, "gpus_per_node": 2, "tasks_per_node": 1}
    assert job["slurm"] == {"sbatch": ["--gres=gpu:a100:2"]}


@pytest.mark.parametrize(
    "step",
    [
        "srun --container-image i --export=ALL,WORLD_SIZE=8,MASTER_ADDR=127.0.0.1 python x.py",
        'srun --container-image i --export="RANK=0" bash -c "python x.py"',
        "srun --container-image i env WORLD_SIZE=8 python x.py",
        "WORLD_SIZE=8 srun --container-image i python x.py",
        "export RANK=$SLURM_PROCID WORLD_SIZE=8\nsrun --container-image i python x.py",
        "docker run -e WORLD_SIZE=1 i python x.py",
    ],
)
def test_a_program_that_gets_ranks_from_the_user_gets_them_from_the_launcher(step):
    """Otherwise, the batch script would unset them, also those of pyxis."""
    assert from_script(f"#SBATCH --ntasks-per-node=8\n{step}\n")[1]["launcher"] == "srun"
    other = step.replace("WORLD_SIZE", "WORLDS").replace("RANK", "MY_RANKS")
    assert from_script(f"#SBATCH --ntasks-per-node=8\n{other}\n")[1]["launcher"] == "none"


def test_directives_in_a_here_document_are_those_of_another_script():
    text = "#SBATCH -N2\ncat > other.sh <<EOF\n#SBATCH -N9\nEOF\n(( x = 1 << y ))\nsrun --container-image=i a\n"
    _, job, notes = from_script(text)
    assert job["resources"] == {"nodes": 2} and not any("ignores" in str(note) for note in notes)


def test_a_line_of_srun_requests_the_resources_itself():
    """What only a job can have goes to sbatch; in a script of sbatch, the same options are those of the step."""
    words = ("--qos=hi", "--constraint=g", "--reservation=r", "--exclusive", "--mpi=pmix", "--container-image=i", "a")
    job = from_words("srun", "-w", "n1,n2", *words)[1]
    assert job["resources"] == {"nodes": 2}
    sbatch = ["--nodelist=n1,n2", "--qos=hi", "--constraint=g", "--reservation=r", "--exclusive"]
    assert job["slurm"] == {"sbatch": sbatch, "srun": ["--mpi=pmix"]}
    assert from_script("#SBATCH -N1\nsrun --exclusive --container-image=i a")[1]["slurm"] == {"srun": ["--exclusive"]}


@pytest.mark.parametrize(
    ("words", "resources"),
    [
        (("docker", "run", "--gpus", "all", "i/i", "torchrun", "--nnodes", "2", "--nproc_per_node=6", "t.py"),
         {"nodes": 2, "gpus_per_node": 6, "tasks_per_node": 6}),
        (("docker", "run", "--gpus", '"device=0,2"', "i/i", "a"), {"gpus_per_node": 2}),
        (("nvidia-docker", "run", "--gpus", "device=1", "i/i", "a"), {"gpus_per_node": 1}),
        (("podman", "run", "--device", "nvidia.com/gpu=all", "i/i", "a"), None),
        (("docker", "run", "i/i", "a"), {"gpus_per_node": 0}),
        (("srun", "--exclusive", "--container-image=i", "torchrun", "--nproc-per-node=3", "t.py"),
         {"gpus_per_node": 3, "tasks_per_node": 3}),
        (("srun", "--exclusive", "--container-image=i", "a"), None),
    ],
)  # fmt: skip
def test_all_gpus_are_those_of_the_sites_node(words, resources):
    """Or one for each process, if the command says how many processes it starts."""
    _, job, notes = from_words(*words)
    assert job.get("resources") == resources
    assert resources or any("the job gets all GPUs of each node" in note for note in notes)


def test_the_variable_of_enroots_hook_is_in_the_edf():
    """The engine reads it before the tasks of the job start."""
    edf, job, _ = from_words(
        "srun", "--export=ALL,NVIDIA_VISIBLE_DEVICES=void,A=1", "--container-image=i", "--mail-type=END", "a"
    )
    assert (edf["env"], job["env"]) == ({"NVIDIA_VISIBLE_DEVICES": "void"}, {"A": "1"})
    assert job["slurm"] == {"sbatch": ["--mail-type=END"]}


def test_secrets_in_arguments_are_not_copied():
    words = (
        "train",
        "--api-key",
        "s3cret-of-mine",
        "--wandb_key=0a1b2c3d4e5f",
        "--input_key",
        "messages",
        "--token=$T",
    )
    _, job, notes = from_words("srun", "--container-image=i", *words)
    assert '--api-key "${API_KEY:?}" --wandb_key="${WANDB_KEY:?}" --input_key messages' in job["host_setup"]
    assert "its value is a secret: export API_KEY where you launch" in "\n".join(notes)
    assert not re.search("s3cret|0a1b2c", f"{job}{notes}")
    lines = "export KEEP=1\nif a; then\n  export WANDB_API_KEY=0a1b2c3d4e5f\nfi\n# export HF_TOKEN=0a1b2c3d4e5f\n"
    _, job, notes = from_script(f"{lines}srun --container-image=i a\n")
    assert "KEEP=1\nif a; then\n  export WANDB_API_KEY\nfi\n" in job["host_setup"] and "0a1b2c" not in f"{job}{notes}"


def test_a_line_that_exports_a_secret_and_more_is_refused():
    why = "line 2: export A=1 TOKEN=…: keep the secret of this line in a file or variable"
    assert why in refused("export A=1 TOKEN=0a1b2c3d4e5f\nsrun --container-image=i a\n")


def test_a_wrapped_command_is_a_script():
    edf, job, _ = from_words("sbatch", "-N2", "--wrap", "srun --container-image=a/b ./x $HOME")
    assert (edf["image"], job["resources"]) == ("a/b", {"nodes": 2})
    assert "printf '%q ' ./x $HOME" in job["host_setup"]


def test_a_copy_of_the_log_is_not_needed():
    _, job, notes = from_script("srun --container-image=i a 2>&1 | tee log.txt\n")
    assert job["command"] == ["a"]
    assert any("line 2: tee log.txt: not carried over: a run has one log" in note for note in notes)
    assert "a job file has no place for commands on or after" in refused("srun --container-image=i a\ntee x <y")


def test_a_file_that_the_script_sources_is_said():
    """It can change any variable."""
    _, job, notes = from_script("I=/i.sqsh\n. ./settings.sh\nsrun --container-image=$I a\n")
    assert job["host_setup"] == "cd /here\nI=/i.sqsh\n. ./settings.sh\ntrue\n"
    assert any("line 3: . ./settings.sh: the options of the step are read as if" in note for note in notes)


def test_tasks_that_read_their_ranks_get_them():
    """Runner unsets the ranks of other jobs, also where the script sets them."""
    job = from_script("#SBATCH -n2\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun --container-image=i a\n")[1]
    assert job["launcher"] == "srun"


LINES = r"""
a 'b c' "d e" f\ g "" '' $A ${A} "$A" "${A}x" ~/x $'t\tb' $'it\'s' c
a --x="$A/y":$A '$A' "\$A" \$A "\\" "a\b" 'it'\''s' a"b"'c'
a x${U:-d e}y "${U:-d}" ${A:-n} "a#b" a#b # comment
a \
  b "c\
d" 'e
f'; a second && a third || a fourth | a fifth & a sixth
a "(x)" [y] {z} = a=b "${ARR[@]}" ${ARR[@]} end
"""


def test_words_are_those_that_bash_reads(tmp_path):
    """Bash itself runs the same lines, with a function that prints its words."""
    head = "ARR=(one 'two 2' \"$A\")\n"
    show = 'a() { printf "%s\\0" "$#" "$@" >> "$OUT"; }\n'
    environ = {"A": "val", "HOME": "/h", "OUT": str(tmp_path / "out"), "PATH": "/usr/bin:/bin"}
    # each command on its own, since a pipe and `||` run some of them never or elsewhere
    ours = [command for command in commands(head + LINES) if command.words[0].raw == "a"]
    for command in ours:
        subprocess.run(("bash", "-c", head + show + command.raw), env=environ, check=True)
    theirs = (tmp_path / "out").read_text().split("\0")
    arrays = {"ARR": ("one", "two 2", "val")}
    read: list[str] = []
    for command in ours:
        words: list[str] = []
        for word in command.words[1:]:
            assert not word.computed, word
            words += arrays[word.array] if word.array else (expand(word.text, environ, "a word"),)
        # an unquoted array with blanks in it splits, as bash does
        bare = [i for i, word in enumerate(command.words[1:]) if word.raw == "${ARR[@]}"]
        if bare:
            words = [*words[:-3], "two", "2", *words[-2:]] if words[-3] == "two 2" else words
        if "x${U:-d e}y" in command.raw:
            words = [piece for word in words for piece in (word.split() if word == "xd ey" else [word])]
        read += [str(len(words)), *words]
    assert read == theirs[:-1]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12), max_size=5))
def test_any_quoted_words_are_read_back(texts):
    import shlex

    [command] = commands("x " + shlex.join(texts))
    assert [expand(word.text, {}, "a word") for word in command.words[1:]] == texts


_words = st.text(st.sampled_from("ab1 $'\"\\#;&*~{}é=-"), min_size=1, max_size=8)
_path = st.text(st.sampled_from("abc-_.é"), min_size=1, max_size=6).map(lambda text: f"/{text}")
_environments = st.builds(
    Environment,
    name=st.just("it"),
    path=st.none(),
    image=_path | st.just("nvcr.io#nvidia/pytorch:24.06-py3"),
    workdir=st.none() | _path,
    entrypoint=st.booleans(),
    writable=st.booleans(),
    mounts=st.lists(
        st.builds(Mount, _path | st.just("${SCRATCH}/x"), _path, st.sampled_from([(), ("ro",)])),
        max_size=3,
        unique=True,
    ).map(tuple),
    env=st.dictionaries(
        st.sampled_from(["A", "B_1", "xy"]), st.just("") | _words.map(lambda text: text.replace("${", "")), max_size=3
    ),
)


@pytest.mark.parametrize("engine", ["pyxis", "podman"])
@settings(max_examples=40)
@given(environment=_environments)
def test_what_emit_writes_for_an_engine_is_adopted_again(engine, environment):
    if engine == "podman" and environment.image.startswith("/"):
        return  # it is entered as a folder: see test_what_is_not_carried_over_is_said
    script, _ = emitted(environment, load_site("generic-slurm"), engine, {"SCRATCH": "/s"})
    adopted = Adopted()
    program = read_script(script.replace('"$@"', "true"), adopted, Draft(), Path("/here"), "x")
    assert adopted.image == environment.image
    assert (adopted.workdir or None) == environment.workdir
    assert (bool(adopted.entrypoint), adopted.writable) == (environment.entrypoint, environment.writable)
    assert tuple(adopted.mounts) == environment.mounts
    # podman: env NAME=VALUE true; an empty value unsets the variable: env -u NAME true
    in_command = dict(word.partition("=")[::2] for word in program.command[1:-1] if word != "-u")
    assert adopted.env | in_command == environment.env


def _help(*argv):
    text = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    assert text
    return text.splitlines()


def test_which_options_of_podman_stand_alone_is_what_podman_says():
    need("podman")
    for line in _help("podman", "run", "--help"):
        words = line.split()
        at = next((index for index, word in enumerate(words[:2]) if word.startswith("--")), None)
        if at is None:
            continue
        # `--volume stringArray   Bind mount …` against `--rm   Remove the container …`
        stands_alone = line.index(words[at]) + len(words[at]) + 1 < len(line) and line.split(words[at], 1)[1][1] == " "
        assert (words[at][2:] in CONTAINER.flags) == stands_alone, line


@pytest.mark.parametrize(("program", "grammar"), [("srun", SRUN), ("sbatch", SBATCH)])
def test_which_options_of_slurm_stand_alone_is_what_slurm_says(program, grammar, slurm):
    lines = slurm.run((program, "--help")).stdout.splitlines()
    # `--label`, `--nodes=N`, `--compress[=library]`
    found = [match for line in lines if (match := re.match(r"\s+(?:-\w, +)?--([\w-]+)(\[?=)?", line))]
    alone = {match[1] for match in found if match[2] != "="}
    # where the help text errs: the manual, and the program, want a value
    alone -= {"container", "export", "mem", "wrap"}
    assert {match[1] for match in found} & (grammar.flags | grammar.optional) == alone
    assert len(found) > 60


def runner(folder, *words):
    argv = (sys.executable, "-m", "runner", "env", "adopt", *words)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_prints_an_edf_and_says_the_rest(tmp_path):
    done = runner(tmp_path, "--", "docker", "run", "--rm", "-v", "/a:/b", "ubuntu:24.04", "true")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        '# Made from a command line by `runner env adopt`.\nimage = "ubuntu:24.04"\nentrypoint = true\n'
        'writable = true\nmounts = ["/a:/b"]\n'
    )
    assert "--rm: not needed" in done.stderr


def test_the_command_says_that_it_adds_writable_to_a_line_of_pyxis(tmp_path):
    """Real pyxis makes the root read-only there; --container-writable and --container-readonly decide it."""
    image = ("--", "srun", "--container-image=ubuntu:24.04")
    for words, added in (
        (image, True),
        ((*image, "--container-writable"), False),
        ((*image, "--container-readonly"), False),
    ):
        done = runner(tmp_path, *words, "true")
        assert ("which pyxis does only with --container-writable" in done.stderr) == added


def test_the_command_writes_both_files_that_launch_takes(tmp_path):
    (tmp_path / "runner.toml").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n" + SCRIPT)
    done = runner(tmp_path, "job.sbatch", "-o", "edf/t.toml", "--job", "jobs/t.toml")
    assert done.stdout == "edf/t.toml\njobs/t.toml\n", done.stderr
    argv = (sys.executable, "-m", "runner", "launch", "t", "--site", "generic-slurm", "--dry-run")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SCRATCH": "/s", "WHEN": "1", "PWD": "/p"}
    environ |= {"RUNNER_IMAGES": "/i", "PYTHONPATH": ":".join(sys.path)}
    launched = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert launched.returncode == 0, launched.stderr
    assert "#SBATCH --nodes=4" in launched.stdout
    assert "torchrun command \\\n    train.py" in launched.stdout
    # the program is in the image: tasks start there, and no code is copied
    assert "inside RUNNER_WORKDIR yes" in launched.stdout
    assert "code snapshot: 0 files" in launched.stderr
    again = runner(tmp_path, "job.sbatch", "-o", "edf/t.toml")
    assert again.returncode == 1 and "edf/t.toml already exists" in again.stderr


def test_a_refused_job_writes_nothing_and_offers_the_script_itself(tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/bash\nsrun --container-image=i a\ntar cf x.tar out\n")
    done = runner(tmp_path, "job.sh", "-o", "edf/t.toml", "--job", "jobs/t.toml")
    assert done.returncode == 1 and not (tmp_path / "edf").exists()
    assert "no job file can do the same as job.sh" in done.stderr
    assert "line 3: tar cf x.tar out: a job file has no place for commands on or after" in done.stderr
    assert "runner launch PATH" in done.stderr
    edf = runner(tmp_path, "job.sh")
    assert edf.returncode == 0 and 'image = "i"' in edf.stdout
    assert "no job file can do the same as job.sh: line 3: tar cf x.tar out" in edf.stderr


def test_a_job_that_is_adopted_in_a_subfolder_finds_its_environment(tmp_path):
    """The git root is the project, so a name would be searched there."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "jobs").mkdir()
    sub = tmp_path / "exp"
    sub.mkdir()
    done = runner(sub, "-o", "edf/t.toml", "--job", "t.toml", "--", "srun", "--container-image=a/b", "true")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((sub / "t.toml").read_text())["environment"] == str(sub / "edf/t.toml")
    done = runner(tmp_path, "-o", "edf/t.toml", "--job", "t.toml", "--", "srun", "--container-image=a/b", "true")
    assert tomllib.loads((tmp_path / "t.toml").read_text())["environment"] == "t"


def test_into_an_edf_adds_and_keeps_its_comments(tmp_path):
    edf = tmp_path / "e.toml"
    edf.write_text('# mine\nimage = "old" # why\nmounts = [\n  "/a", # a\n]\n\n# about\n[env]\nA = "1"\n')
    words = ("--", "podman", "run", "-v", "/a:/a", "-v", "/c:/d", "-e", "B=2", "--entrypoint=", "new:1")
    dry = runner(tmp_path, "--into", "e.toml", "--dry-run", *words)
    assert edf.read_text().startswith('# mine\nimage = "old"')
    done = runner(tmp_path, "--into", "e.toml", *words)
    assert done.stdout == "e.toml\n" and "image: 'old' becomes 'new:1'" in done.stderr
    assert edf.read_text() == dry.stdout
    assert dry.stdout.splitlines() == [
        *("# mine", 'image = "new:1" # why', "mounts = [", '  "/a", # a', '  "/c:/d",', "]", "entrypoint = false"),
        *("writable = true", "", "# about", "[env]", 'A = "1"', 'B = "2"'),
    ]


def test_a_command_without_a_container_makes_no_edf(tmp_path):
    done = runner(tmp_path, "--", "srun", "-n1", "true")
    assert done.returncode == 1 and "does not use a container" in done.stderr and done.stdout == ""
    assert runner(tmp_path).returncode == 2
