"""A command line becomes an EDF and a job file; a script becomes a job file that runs it. Nothing is lost silently."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.bash import UNKNOWN, commands, evaluated
from runner.environments.edf import Mount
from runner.environments.emit import emitted
from runner.environments.environment import Environment
from runner.environments.rewriting import rewrite
from runner.errors import RunnerError
from runner.option_grammar import SBATCH, SRUN
from runner.runs.adopt.command_line import read_command_line
from runner.runs.adopt.containers import GRAMMARS
from runner.runs.adopt.script import job_text, read_container
from runner.site_files import load_site
from tests.conftest import need


def from_words(*argv, folder=Path("/here")):
    """(EDF, job file, notes) made from a command line."""
    adopted, job = read_command_line(argv, folder)
    edf = tomllib.loads(rewrite("", adopted.changes()))
    made = tomllib.loads(rewrite("", job.changes("it", "s")))
    return edf, made, [*adopted.notes, *adopted.no_edf, *adopted.no_job]


def from_script(text):
    """(EDF, why there is none) of a script."""
    adopted = read_container("#!/bin/bash\n" + text)
    edf = None if adopted.no_edf else tomllib.loads(rewrite("", adopted.changes()))
    return edf, "\n".join(adopted.no_edf)


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
        (("--mount", "type=tmpfs,dst=/a", "i"), "an EDF cannot mount a tmpfs"),
        (("--tmpfs", "/a", "i"), "cannot mount a tmpfs"),
        (("--network=none", "i"), "--network=none: not carried over"),
        (("-v", "/dev/shm:/dev/shm", "i"), "-v /dev/shm:/dev/shm: not needed"),
        (("--network=host", "i"), "--network=host: not needed"),
        (("--pull=never", "i"), "--pull=never: not carried over: this cannot be changed: missing images are pulled"),
        (
            ("--tls-verify=false", "i"),
            "--tls-verify=false: not carried over: this cannot be changed: every engine does this",
        ),
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
    for word in ("--container-env=A", "--container-remap-root", "--container-name=x"):
        assert [note for note in notes if note.startswith(word)], word


def test_an_environment_that_is_named_becomes_the_base():
    edf, job, _ = from_words("srun", "-N2", "--environment=ngc", "--container-writable", "python", "x.py")
    assert edf == {"base_environment": "ngc", "writable": True}
    assert (job["command"], job["launcher"], job["resources"]) == (["python", "x.py"], "none", {"nodes": 2})


def test_enroot_and_apptainer():
    words = ("enroot", "start", "--rw", "-m", "/a:/b:none:bind,ro", "-e", "A=1", "/i.sqsh", "python", "t.py")
    edf, job, _ = from_words(*words)
    assert edf == {
        "image": "/i.sqsh",
        "entrypoint": True,
        "writable": True,
        "mounts": ["/a:/b:ro"],
        "env": {"A": "1"},
    }
    assert job["command"] == ["python", "t.py"]
    words = (
        "--nv",
        "-B",
        "/a:/b:ro,/c",
        "--env",
        "A=1,B=2",
        "docker://nvcr.io/nvidia/pytorch:25.01-py3",
        "python",
        "t.py",
    )
    edf, job, _ = from_words("srun", "-N2", "--gpus-per-node=4", "apptainer", "-q", "exec", *words)
    assert edf == {
        "image": "nvcr.io#nvidia/pytorch:25.01-py3",
        "workdir": "/here",
        "entrypoint": False,
        "writable": False,
        "mounts": ["/a:/b:ro", "/c:/c", "${HOME}:${HOME}", "/tmp:/tmp", "/var/tmp:/var/tmp", "/here:/here"],
        "env": {"A": "1", "B": "2", "NVIDIA_VISIBLE_DEVICES": "all"},
    }
    assert (job["command"], job["resources"]) == (["python", "t.py"], {"nodes": 2, "gpus_per_node": 4})


def test_other_programs_are_refused_by_name():
    for words in (("sbatch", "x.sh"), ("docker", "build", "."), ("apptainer", "shell", "x.sif")):
        with pytest.raises(RunnerError, match=f"cannot adopt a command line that starts with '{words[0]} {words[1]}'"):
            from_words(*words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("enroot", "start", "pytorch", "a"), "pytorch: it is an unpacked container"),
        (("apptainer", "exec", "x.sif", "a"), "x.sif: an EDF cannot name this image"),
        (("apptainer", "exec", "--overlay", "o.img", "docker://a/b", "a"), "--overlay o.img: a job's changes"),
        (("srun", "--container-image=i", "bash"), "bash: an interactive shell is not a job"),
        (("srun", "--container-image=i", "a", ":", "b"), "srun `:`: it starts several programs"),
        (("srun", "--container-image=i", "--container-save=s.sqsh", "a"), "--container-save=s.sqsh: a job's changes"),
        (("srun", "-N2", "-n7", "--container-image=i", "a"), "--ntasks=7: it cannot be divided evenly among 2 nodes"),
        (
            ("srun", "-N2", "-n4", "--ntasks-per-node=4", "--container-image=i", "a"),
            "--ntasks=4: it is not nodes × tasks_per_node, which is 2 × 4",
        ),
        (
            ("srun", "-n7", "--ntasks-per-node=4", "--container-image=i", "a"),
            "--ntasks=7: it cannot be divided evenly among 2 nodes",
        ),
        (("srun", "--jobid=7", "--container-image=i", "a"), "--jobid=7: the step belongs to the job of the run"),
        (("srun", "-w", "n1,n2", "--container-image=i", "a"), "the number of nodes is not given: add --nodes"),
        (
            ("srun", "-N4", "--container-image=i", "torchrun", "--nnodes", "2", "a.py"),
            "not the number of nodes of srun",
        ),
        (("srun", "--container-image=i", "a", "--api-key", "s3cret-of-mine"), "…: it looks like a secret"),
        (
            ("docker", "run", "--mount", "type=volume,src=v,dst=/v", "a/b", "c"),
            "'v' is a volume in the engine's storage",
        ),
        (("docker", "run", "--mount", "source=v,target=/v", "a/b", "c"), "'v' is a volume in the engine's storage"),
        (("podman", "run", "--mount", "type=image,src=i,dst=/i", "a/b", "c"), "mounts folders and files, not image"),
        (("docker", "run", "--volumes-from", "other", "a/b", "c"), "other: write the mounts of that container"),
        (("docker", "run", "a/worker:1", "--model", "m"), "--model: only the image knows its entrypoint"),
    ],
)
def test_what_an_edf_or_job_file_cannot_say_is_refused(words, why):
    notes = "\n".join(from_words(*words)[2])
    assert why in notes and "s3cret" not in notes


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (("python", "-u", "x.py", "1"), {"command": ["python", "-u", "x.py", "1"], "launcher": "none"}),
        (("bash", "-c", 'cd /x && y "$A"'), {"command": ["bash", "-c", 'cd /x && y "$A"'], "launcher": "none"}),
        (("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "a.b", "-x"),
         {"command": ["-m", "a.b", "-x"], "launcher": "torchrun", "resources": {"nodes": 2, "tasks_per_node": 2}}),
        (("torchrun", "--nproc_per_node=4", "--rdzv_endpoint=n1:29500", "x.py"), {"command": ["x.py"],
         "launcher": "torchrun", "resources": {"nodes": 2, "tasks_per_node": 4}}),
        (("torchrun", "--nproc_per_node=gpu", "x.py"), {"command": ["torchrun", "--nproc_per_node=gpu", "x.py"],
         "launcher": "none"}),
        (("torchrun", "--nnodes=1:2", "--nproc_per_node=4", "x.py"),
         {"command": ["torchrun", "--nnodes=1:2", "--nproc_per_node=4", "x.py"], "launcher": "none"}),
        (("env", "RANK=0", "x"), {"command": ["env", "RANK=0", "x"], "launcher": "srun"}),
    ],
)  # fmt: skip
def test_programs(words, job):
    made = from_words("srun", "-N2", "--container-image=i", *words)[1]
    assert {key: made[key] for key in job} == job


@pytest.mark.parametrize(
    ("words", "resources"),
    [
        (("-N2", "-n8"), {"nodes": 2, "tasks_per_node": 4}),
        (("--gres=gpu:h100:4",), {"gpus_per_node": 4}),
        (("--gres=gpu",), {"gpus_per_node": 1}),
        (("--gres=gpu:0",), {"gpus_per_node": 0}),
        (("--gres=nvme:1,gpu:a100:2",), {"gpus_per_node": 2}),
        (("--gpus=8", "--nodes", "2"), {"gpus_per_node": 4, "nodes": 2}),
        (("-n8", "--ntasks-per-node=4"), {"nodes": 2, "tasks_per_node": 4}),
        (("--gpus=8", "--gpus-per-node=4", "-n8"), {"gpus_per_node": 4, "nodes": 2, "tasks_per_node": 4}),
        (("--gpus=0",), {"gpus_per_node": 0}),
        (("-N2", "--gpus=16", "--gpus-per-task=2"), {"nodes": 2, "gpus_per_node": 8, "tasks_per_node": 4}),
        (("--gpus-per-task=1", "--ntasks-per-node=4"), {"gpus_per_node": 4, "tasks_per_node": 4}),
        (("--mem=450G", "-t", "30", "-pnormal", "-A", "a1"),
         {"memory": "450G", "time": "30", "partition": "normal", "account": "a1"}),
    ],
)  # fmt: skip
def test_counts_are_those_of_a_job_file(words, resources):
    assert from_words("srun", *words, "--container-image=i", "true")[1]["resources"] == resources


def test_other_options_of_srun_go_to_sbatch_or_srun():
    words = (
        "--qos=hi",
        "--constraint=g",
        "--exclusive",
        "--mpi=pmix",
        "--compress",
        "--gres=gpu:a100:4",
        "--signal=B:USR1@300",
    )
    _, job, notes = from_words("srun", "-N2", "-J", "big", "-o", "log", *words, "--container-image=i", "a")
    sbatch = ["--qos=hi", "--constraint=g", "--exclusive", "--gres=gpu:a100:4"]
    assert job["slurm"] == {"sbatch": sbatch, "srun": ["--mpi=pmix", "--compress"]}
    assert job["save_seconds"] == 300
    assert any(note.startswith("-o log: not carried over: a run has one output file") for note in notes), notes


@pytest.mark.parametrize(
    ("name", "job_file", "note"),
    [
        ("big", "", "; to keep the name: --job jobs/big.toml"),
        ("big", "jobs/small.toml", "; to keep the name: --job jobs/big.toml"),
        ("big", "jobs/big.toml", None),
        ("a/b c", "jobs/small.toml", ""),
    ],
)
def test_a_job_name_becomes_that_of_the_job_file(name, job_file, note):
    adopted, _ = read_command_line(("srun", "-J", name, "--container-image=i", "a"), Path("/here"), job_file)
    told = [each for each in adopted.notes if "named after" in each]
    start = f"-J {name}: not carried over: a run is named after its job file"
    assert told == ([] if note is None else [start + note])


def test_the_variable_of_enroots_hook_is_in_the_edf():
    """The engine reads it before the tasks of the job start."""
    edf, job, _ = from_words("srun", "--export=ALL,NVIDIA_VISIBLE_DEVICES=void,A=1", "--container-image=i", "a")
    assert (edf["env"], job["env"]) == ({"NVIDIA_VISIBLE_DEVICES": "void"}, {"A": "1"})


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (("docker", "run", "--gpus", '"device=0,2"', "i/i", "a"), 2),
        (("nvidia-docker", "run", "--gpus", "device=1", "i/i", "a"), 1),
        (("docker", "run", "--gpus", "all", "i/i", "a"), None),
        (("podman", "run", "--device", "nvidia.com/gpu=all", "i/i", "a"), None),
        (("docker", "run", "i/i", "a"), 0),
        (("docker", "run", "--runtime=runc", "-e", "NVIDIA_VISIBLE_DEVICES=void", "i/i", "a"), 0),
        (("docker", "run", "--device=/dev/infiniband/uverbs0", "i/i", "a"), 0),
        (("docker", "run", "-e", "NVIDIA_VISIBLE_DEVICES=0,1", "i/i", "a"), None),
        (("docker", "run", "-e", "NVIDIA_VISIBLE_DEVICES=0,1", "--gpus=2", "i/i", "a"), 2),
        (("docker", "run", "--runtime=habana", "i/i", "a"), None),
        (("docker", "run", "--device=/dev/kfd", "--device=/dev/dri", "rocm/pytorch", "a"), None),
        (("podman", "run", "--device", "amd.com/gpu=all", "rocm/pytorch", "a"), None),
        (("apptainer", "exec", "--oom-kill-disable", "--rocm", "docker://rocm/pytorch", "a"), None),
        (("apptainer", "exec", "docker://i/i", "a"), 0),
        (("srun", "--exclusive", "--container-image=i", "a"), None),
    ],
)
def test_all_gpus_are_those_of_the_sites_node(words, gpus):
    _, job, notes = from_words(*words)
    assert job.get("resources", {}).get("gpus_per_node") == gpus
    assert (gpus is None) == any("the job gets gpus_per_node of the site" in note for note in notes)
    assert (gpus == 0) == ("GPUs: the command line requests no GPUs, so gpus_per_node is 0" in notes)


@pytest.mark.parametrize(
    ("fstab", "mount"),
    [
        ("/a", "/a:/a"),
        ("/a:/b", "/a:/b"),
        ("/a:ro", "/a:/a:ro"),
        ("/a /b none rbind,x-create=dir,ro,rslave", "/a:/b:ro+rslave"),
        ("/a:none:bind,ro", "/a:/a:ro"),
        ("./a:/b", "/here/a:/b"),
    ],
)
def test_mounts_of_enroot(fstab, mount):
    assert from_words("enroot", "start", "-m", fstab, "i.sqsh", "a")[0]["mounts"] == [mount]


@pytest.mark.parametrize(
    "words", [("apptainer", "exec", "--net", "--ipc", "docker://i/i"), ("enroot", "start", "--net", "--ipc", "/i.sqsh")]
)
def test_a_namespace_of_its_own_is_not_carried_over(words):
    edf, job, notes = from_words(*words, "a")
    assert edf["image"] in {"i/i", "/i.sqsh"} and job["command"] == ["a"]
    assert "--net: not carried over: this cannot be changed: the host's network is used" in notes
    assert "--ipc: not carried over: this cannot be changed: /dev/shm is the host's" in notes


def test_mounts_of_enroot_that_no_edf_can_have():
    _, _, notes = from_words("enroot", "start", "-m", "tmpfs:/tmp", "-m", "/a:b", "i.sqsh", "a")
    assert "-m tmpfs:/tmp: not carried over: an EDF cannot mount a tmpfs; use /dev/shm, which is in memory" in notes
    assert "-m /a:b: the target 'b' must begin with / or ${" in notes


SCRIPT = r"""#SBATCH --job-name=train --nodes=2-4 --ntasks-per-node=1
#SBATCH --gpus-per-node=4 -c 288 -t 12:00:00   # a comment
#SBATCH --export=ALL,HF_TOKEN=hf_secret_of_mine
set -euo pipefail
export ROOT=/project/lm
IMAGE="$ROOT/ngc.sqsh"   # of last week
FLAGS="--mpi=pmix -l"
export IMAGE
cat > hosts <<EOF
srun --container-image=no-command
EOF
srun hostname
#SBATCH --nodes=9
A=1 srun $FLAGS -N $SLURM_NNODES --container-image=$IMAGE --container-mounts="$ROOT:/lm:ro,"'/data' \
  torchrun --rdzv_endpoint=$MASTER_ADDR:29500 train.py "$@" > log.txt 2>&1 &
wait
"""


def test_a_script_becomes_a_job_file_that_runs_it_and_an_edf():
    edf, _ = from_script(SCRIPT)
    assert edf == {
        "image": "/project/lm/ngc.sqsh",
        "entrypoint": False,
        "writable": True,
        "mounts": ["/project/lm:/lm:ro", "/data:/data"],
    }
    text = job_text("train.sbatch", "jobs/train.sbatch", "#!/bin/bash\n" + SCRIPT)
    assert tomllib.loads(text) == {"batch": "jobs/train.sbatch"}
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith("# [")]
    assert tomllib.loads("\n".join(lines)) == {
        "batch": "jobs/train.sbatch",
        "hang_seconds": 1800,
        "restart": {"time_limit": 5, "node_failure": 2, "hang": 2},
        "resources": {"tasks_per_node": 1, "cpus_per_task": 288, "time": "12:00:00"},
        "slurm": {"sbatch": ["--job-name=train", "--nodes=2-4", "--gpus-per-node=4"]},
    }


STEP = "srun --container-image=$I a"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"if [ -n x ]; then\nI=/a.sqsh\nfi\n{STEP}", "line 5: --container-image=$I: only a shell can evaluate"),
        (f"[ -n x ] && I=/a.sqsh\n{STEP}", "line 3: --container-image=$I"),
        (f"case $A in\nx) I=/a.sqsh ;;\nesac\n{STEP}", "line 5: --container-image=$I"),
        (f"I=/a.sqsh\nI=/b.sqsh\n{STEP}", "line 4: --container-image=$I"),
        (f"I=/a.sqsh\nread -r I < file\n{STEP}", "line 4: --container-image=$I"),
        (f"I=/a.sqsh\nfor I in a b; do\n{STEP}\ndone", "line 4: --container-image=$I"),
        (f"I=/a.sqsh\n. ./settings.sh\n{STEP}", "line 4: --container-image=$I"),
        (f"I=$HOME/a.sqsh\n{STEP}", "line 3: --container-image=$I"),
        (f"I=~/a.sqsh\n{STEP}", "line 3: --container-image=$I"),
        ("srun --container-image=$(realpath i) a", "line 2: --container-image=$(realpath i)"),
        ("srun --container-image=i --container-mounts=$HOME:/h a", "line 2: --container-mounts=$HOME:/h"),
        ("srun --container-image=./i.sqsh a", "line 2: ./i.sqsh: a relative path depends on the folder"),
        ('A=(--container-writable)\nsrun --container-image=i "${A[@]}" a', 'line 3: "${A[@]}": only a shell knows'),
        ("srun $FLAGS a", "line 2: $FLAGS: only a shell knows whether this contains options of a container"),
        (f'RUN="{STEP} $A"\n$RUN a', "line 3: $RUN: only a shell can evaluate this command"),
        ('RUN=(\n  srun\n  --container-image="$I"\n)\n"${RUN[@]}" a', 'line 6: "${RUN[@]}": only a shell can evaluate'),
        ("RUN=srun\nRUN+=' --environment=x'\n$RUN a", "line 4: $RUN: only a shell can evaluate this command"),
        ("RUN='srun -l'\n$RUN a", "it has no command with the options of a container"),
        ("docker run --rm $I a", "line 2: $I: only a shell can evaluate this image"),
        ("srun apptainer exec x.sif a", "line 2: x.sif: an EDF cannot name this image"),
        ("srun --container-image=i a\nsrun --container-image=j b", "line 2 and line 3: they start different"),
        ("srun --container-image <path to image> a", "line 2: <path to image>: replace this placeholder"),
        ("srun --container-name=x a", "line 2: srun --container-name=x a: it names no image"),
        ("#SBATCH --container-image=$I\na", "#SBATCH: --container-image=$I: only a shell can evaluate"),
        ("srun a", "it has no command with the options of a container"),
    ],
)
def test_a_container_that_only_a_shell_knows_has_no_edf(text, why):
    assert why in from_script(text)[1]


def test_containers_in_directives_loops_and_twice():
    assert from_script("#SBATCH --container-image=i --container-workdir=/w\na\n")[0]["workdir"] == "/w"
    assert from_script("for i in 1 2; do\nsrun --container-image=i a $i\ndone\nsrun --container-image=i b\n")[0]
    assert from_script("docker run --rm --name $USER -u $(id -u) -v /a:/b i/i python $X\n")[0]["mounts"] == ["/a:/b"]
    assert "it is not a shell script" in read_container("#!/usr/bin/env python3\n#SBATCH -N1\n").no_edf


LINES = r"""
a 'b c' "d e" f\ g "" '' $A ${A} "$A" "${A}x" "$A"/y 'it'\''s' a"b"'c' $BLANKS $EMPTY "$EMPTY" "$BLANKS"
a --x="$A/y":$A '$A' "\$A" \$A "\\" "a\b" "a#b" a#b # comment
a \
  b "c\
d" 'e
f'; a second && a third || a fourth | a fifth & a sixth
a "(x)" a=b 'new
line' '*' "[x]" end
"""


def test_words_are_those_that_bash_reads(tmp_path):
    """Bash itself runs the same lines, with a function that prints its words."""
    show = 'a() { printf "%s\\0" "$#" "$@" >> "$OUT"; }\n'
    values = {"A": "val", "BLANKS": "one  two", "EMPTY": ""}
    environ = {**values, "OUT": str(tmp_path / "out"), "PATH": "/usr/bin:/bin"}
    # each command on its own, since a pipe and `||` run some of them never or elsewhere
    ours = [command for command in commands(LINES) if command.words[0] == "a"]
    for command in ours:
        subprocess.run(("bash", "-c", show + command.raw), env=environ, check=True)
    read: list[str] = []
    for command in ours:
        words = [text for word in command.words[1:] for text in evaluated(word, values)]
        read += [str(len(words)), *words]
    assert read == (tmp_path / "out").read_text().split("\0")[:-1]


def test_words_that_only_a_shell_can_evaluate():
    known = {"A": "val", "BLANKS": "one two", "PATTERN": "*.py"}
    text = 'a $B ${A%l} ${A:-x} $(b) `b` *.py [a] {a,b} ~/x $\'\\t\' ${X[@]} $1 $@ x$BLANKS $PATTERN "$(b "c")"\n'
    [command] = commands(text)
    assert len(command.words) == 17
    assert [evaluated(word, known) for word in command.words[1:]] == [(word + UNKNOWN,) for word in command.words[1:]]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12), max_size=5))
def test_any_quoted_words_are_read_back(texts):
    import shlex

    [command] = commands("x " + shlex.join(texts))
    assert [text for word in command.words[1:] for text in evaluated(word, {})] == texts


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
        st.builds(Mount, _path, _path, st.sampled_from([(), ("ro",)])),
        max_size=3,
        unique=True,
    ).map(tuple),
    env=st.dictionaries(
        st.sampled_from(["A", "B_1", "xy"]), st.just("") | _words.map(lambda text: text.replace("${", "")), max_size=3
    ),
)


@settings(max_examples=40)
@given(environment=_environments)
def test_what_emit_writes_for_pyxis_is_adopted_again(environment):
    script, _ = emitted(environment, load_site("generic-slurm"), "pyxis", {})
    adopted = read_container(script.replace('"$@"', "true"))
    assert adopted.no_edf == []
    assert (adopted.image, adopted.workdir or None) == (environment.image, environment.workdir)
    assert (bool(adopted.entrypoint), adopted.writable) == (environment.entrypoint, environment.writable)
    assert tuple(adopted.mounts) == environment.mounts


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
        assert (words[at][2:] in GRAMMARS["docker"].flags) == stands_alone, line


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
        assert ("because the default differs between engines" in done.stderr) == added


def test_a_job_file_of_a_script_launches_the_script_as_it_is(tmp_path):
    """In the script's project, and beside it; the dry run is that of the script itself."""
    (tmp_path / "runner.toml").touch()
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N2\n" + STEP)
    done = runner(tmp_path, "job.sbatch", "--job", "jobs/t.toml", "-o", "edf/t.toml")
    assert done.stdout == "jobs/t.toml\n" and not (tmp_path / "edf").exists()
    assert "no EDF: line 3: --container-image=$I: only a shell can evaluate this text" in done.stderr
    dry = []
    for word in ("t", "./job.sbatch"):
        argv = (sys.executable, "-m", "runner", "launch", word, "--site", "generic-slurm", "--dry-run")
        launched = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        dry.append(launched.stdout)
        assert re.search(r"--nodes +2 +\S*job.sbatch:2", launched.stderr), launched.stderr
    assert dry[0] == dry[1] != ""
    assert "jobs/t.toml already exists" in runner(tmp_path, "job.sbatch", "--job", "jobs/t.toml").stderr
    alone = runner(tmp_path, "job.sbatch", "-o", "edf/t.toml")
    assert alone.returncode == 1 and "cannot make an EDF from job.sbatch" in alone.stderr
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\nI=/i.sqsh\n" + STEP)
    both = runner(tmp_path, "job.sbatch")
    assert both.stdout.startswith("# ---- jobs/job.toml\n") and "# ---- edf/job.toml\n" in both.stdout


def test_a_command_line_becomes_both_files_that_launch_takes(tmp_path):
    (tmp_path / "runner.toml").touch()
    words = ("srun", "-N4", "--container-image=/i.sqsh", "torchrun", "--nproc-per-node=4", "train.py")
    done = runner(tmp_path, "-o", "edf/t.toml", "--job", "jobs/t.toml", "--", *words)
    assert done.stdout == "edf/t.toml\njobs/t.toml\n", done.stderr
    argv = (sys.executable, "-m", "runner", "launch", "t", "--site", "generic-slurm", "--dry-run")
    launched = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert launched.returncode == 0, launched.stderr
    assert "#SBATCH --nodes=4" in launched.stdout
    assert "torchrun command \\\n    train.py" in launched.stdout
    # the program is in the image: tasks start there, and no code is copied
    assert "inside RUNNER_WORKDIR yes" in launched.stdout
    assert "code snapshot: 0 files" in launched.stderr


def test_a_secret_that_a_command_line_exports_is_in_no_file(tmp_path):
    """Neither by its name nor by its look, and what stands beside it stays."""
    export = "--export=ALL,A=1,HF_TOKEN=hf_secret_of_mine,MINE=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
    words = ("srun", export, "--container-image=i", "python", "t.py")
    done = runner(tmp_path, "-o", "edf/t.toml", "--job", "jobs/t.toml", "--", *words)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "edf/t.toml").read_text() + (tmp_path / "jobs/t.toml").read_text()
    assert 'A = "1"' in written and "HF_TOKEN" not in written and "MINE" not in written
    assert "HF_TOKEN=…: not carried over: it is a secret" in done.stderr
    assert "hf_" not in done.stdout + done.stderr + written


def test_the_name_of_a_script_stays_in_its_comment(tmp_path):
    name = 'a\n[env]\nA = "1" #.sbatch'
    (tmp_path / name).write_text("#!/bin/bash\nI=/i.sqsh\n" + STEP)
    done = runner(tmp_path, name, "--job", "jobs/t.toml", "-o", "edf/t.toml")
    assert done.returncode == 0, done.stderr
    assert set(tomllib.loads((tmp_path / "jobs/t.toml").read_text())) == {"batch"}
    assert "env" not in tomllib.loads((tmp_path / "edf/t.toml").read_text())


def test_the_job_file_and_the_edf_are_two_files(tmp_path):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\nI=/i.sqsh\n" + STEP)
    done = runner(tmp_path, "job.sbatch", "--job", "t.toml", "-o", "./t.toml")
    assert done.returncode == 2 and "--job and -o name the same file, t.toml" in done.stderr
    assert not (tmp_path / "t.toml").exists()


def test_a_refused_job_writes_nothing(tmp_path):
    words = ("srun", "--container-image=i", "bash")
    done = runner(tmp_path, "-o", "edf/t.toml", "--job", "jobs/t.toml", "--", *words)
    assert done.returncode == 1 and not (tmp_path / "edf").exists()
    assert "no job file can do the same as this command line" in done.stderr
    edf = runner(tmp_path, "--", *words)
    assert edf.returncode == 0 and 'image = "i"' in edf.stdout
    assert "this command line cannot become a job file: bash: an interactive shell" in edf.stderr


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
