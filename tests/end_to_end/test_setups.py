"""The batch scripts of four known set-ups run unchanged by `runner launch PATH`, as under plain sbatch.

The scripts follow the published descriptions of the set-ups. The cluster has their partitions and their GPUs. Programs
that this machine lacks are stand-ins that write down how they are called.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.lab import configuration, parts
from tests.lab.slurm import SlurmLab

PARTITIONS = ("gp1d", "g2gpu", "gpu")

# CSCS Alps: the environment is found by its name; each task takes its rank from Slurm.
ALPS = r"""#!/bin/bash
#SBATCH --job-name=deepspeed-training
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --partition=gpu
#SBATCH --account=a01
#SBATCH --mail-type=END,FAIL

MODEL_ID="meta-llama/Llama-2-7b-hf"
OUTPUT_DIR="./output"
mkdir -p "$OUTPUT_DIR"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500

srun --environment=ngc-pytorch-deepspeed-24.06 sh -c \
    "RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID WORLD_SIZE=\$SLURM_NTASKS sh train.sh \
    --model $MODEL_ID --output $OUTPUT_DIR --deepspeed deepspeed_config.json"
"""
ALPS_TRAIN = """echo "rank $RANK, local rank $LOCAL_RANK of $WORLD_SIZE in $PWD: $GREETING, $*" >>"$4/calls"
"""

# AWS ParallelCluster: fine-tuning in a container that sees the home folder, with a prolog.
AWS = """#!/bin/bash
#SBATCH --job-name=sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x_%j.out
#SBATCH --error=%x_%j.err

srun --container-image="$HOME/llm.sqsh" --container-mount-home --container-workdir="$HOME/work" \\
    --task-prolog="$HOME/work/setup.sh" sh sft.sh --model_name_or_path meta-llama/Llama-3.1-8B --push_to_hub
"""
AWS_SETUP = '#!/bin/sh\necho "export FROM_PROLOG=$SLURM_PROCID"\n'
AWS_TRAIN = """[ -e /srv ] && echo "$SLURM_PROCID in $PWD, $GREETING, prolog $FROM_PROLOG: $*"
cat ~/.cache/huggingface/token && grep api.wandb.ai ~/.netrc
echo "an error of $SLURM_PROCID" >&2
"""

# Google Cloud: no container; three variables with defaults.
GOOGLE_CLOUD = r"""#!/bin/bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --partition=g2gpu
#SBATCH --output=slurm-%j.out
#SBATCH --error=slurm-%j.err

EPOCHS=${EPOCHS:-10}
CHECKPOINT_DIR=${CHECKPOINT_DIR:-./my_gpt2_checkpoint}
DATA_PERCENTAGE=${DATA_PERCENTAGE:-10}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_PER_NODE" --rdzv_backend c10d \
    --rdzv_endpoint "$head:29500" train.py --deepspeed_config deepspeed_config.json --epochs "$EPOCHS" \
    --checkpoint_dir "$CHECKPOINT_DIR" --data_percentage "$DATA_PERCENTAGE"
"""

# TWCC: modules and a conda environment instead of a container; srun starts a shell, which starts torchrun.
TWCC = r"""#!/bin/bash
#SBATCH --job-name=gpt2_multi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:8
#SBATCH --time=00:10:00
#SBATCH --account="XXX"          ## the project
#SBATCH --partition=gp1d
#SBATCH -o %j.out                # the output
#SBATCH -e %j.err                # the errors

module purge
module load pkg/Anaconda3 cuda/11.7 compiler/gcc/11.2.0

conda activate gpt2

export MASTER_ADDR=$(scontrol show hostnames ${SLURM_JOB_NODELIST} | head -n 1)
export MASTER_PORT=$(shuf -i 30000-60000 -n1)
export RDZV_ID=$(shuf -i 10-60000 -n1)
export GPUS_PER_NODE=8

echo "NODELIST="${SLURM_JOB_NODELIST}
echo "MASTER_ADDR="${MASTER_ADDR}

export OUTPUT_DIR=${HOME}/GPT_DDP_weights

srun --jobid $SLURM_JOBID bash -c \
    'torchrun --nnodes ${SLURM_NNODES} \
    --node_rank ${SLURM_PROCID} \
    --nproc_per_node ${GPUS_PER_NODE} \
    --rdzv_id ${RDZV_ID} \
    --rdzv_backend c10d \
    --rdzv_endpoint ${MASTER_ADDR}:${MASTER_PORT} \
    ./run_clm.py --model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
    --do_train --do_eval --output_dir ${OUTPUT_DIR}'
"""
# What the site's profile gives to every bash. It notes its calls, and what it leaves in the environment.
MODULES = """module() { echo "module $*" >>"$NOTES"; [ "$1" != load ] || export LOADED="$*"; }
conda() { echo "conda $*" >>"$NOTES"; export CONDA_DEFAULT_ENV=$2; }
"""
TORCHRUN = """#!/bin/sh
echo "torchrun $* in $PWD with ${LOADED-none}, ${CONDA_DEFAULT_ENV-none}, ${CUDA_VISIBLE_DEVICES-none}" >>"$NOTES"
"""


@pytest.fixture(scope="module")
def shaped() -> Iterator[SlurmLab]:
    """A cluster with the partitions of the set-ups and eight GPUs per node."""
    need(*parts.SLURM, *parts.PLUGINS)
    lines = [f"PartitionName={name} Nodes=ALL MaxTime=1-00:00:00 State=UP" for name in PARTITIONS]
    with SlurmLab(extra_config=lines, node=configuration.GH200.replace("gpu:4", "gpu:8")) as lab:
        yield lab


class User:
    """A user with a folder of scripts, and the notes that stand-ins have written in it."""

    def __init__(self, runner: Runner, lab: SlurmLab, place: Path) -> None:
        self.runner, self.lab, self.place = runner, lab, place

    def notes(self) -> list[str]:
        path = self.place / "notes"
        lines = sorted(path.read_text().splitlines())
        path.unlink()
        return lines

    def sbatch(self, *words: str) -> str:
        """The id of the job of a plain sbatch, which has ended well."""
        environ = {**self.runner.environ, "PWD": str(self.place)}
        job = self.lab.run(("sbatch", "--parsable", *words), cwd=self.place, env=environ).stdout.strip()
        self.lab.wait_for(job, "COMPLETED")
        return str(job)

    def launch(self, *words: str, **options: object) -> tuple[Path, str]:
        """The run folder, and the id of the job."""
        name = self.runner("launch", "--wait", *words, cwd=self.place, **options).stdout.strip()
        run = self.runner.runs / name
        assert (run / "attempts/1/exit_code").read_text() == "0\n"
        return run, (run / "job_ids").read_text().strip()

    def same(self, first: str, second: str) -> None:
        """Slurm gave both jobs the same resources."""
        keys = (
            "Partition",
            "NumNodes",
            "NumTasks",
            "CPUs/Task",
            "TRES",
            "TresPerNode",
            "TimeLimit",
            "Account",
            "WorkDir",
        )
        jobs = [self.lab.job(job) for job in (first, second)]
        assert [jobs[0].get(key) for key in keys] == [jobs[1].get(key) for key in keys]


@pytest.fixture
def user(shaped: SlurmLab, project: Path, tmp_path: Path) -> User:
    home, place = tmp_path / "home", tmp_path / "home/work"
    write(place, {"bin/torchrun": TORCHRUN, "modules.sh": MODULES})
    (place / "bin/torchrun").chmod(0o755)
    environ = clean_environ(home, shaped.environ)
    own = {
        "RUNNER_RUNS": f"{project}/runs",
        "NOTES": f"{place}/notes",
        "PATH": f"{place}/bin:{environ['PATH']}",
        "BASH_ENV": f"{place}/modules.sh",
    }
    return User(Runner(project, {**environ, **own, "PWD": str(place)}, "generic-slurm"), shaped, place)


def test_twcc_run_clm_ddp(user: User) -> None:
    """The modules come from BASH_ENV, as Lmod has it; the calls are those of a plain sbatch, but for random numbers."""
    write(user.place, {"run_clm_DDP.sh": TWCC})
    random = {"--rdzv_id", "--rdzv_endpoint"}

    def calls() -> list[str]:
        lines = [line.split() for line in user.notes()]
        return [" ".join(word for index, word in enumerate(line) if line[index - 1] not in random) for line in lines]

    first = user.sbatch("run_clm_DDP.sh")
    plain = calls()
    run, second = user.launch("run_clm_DDP.sh")
    assert calls() == plain
    user.same(first, second)
    assert plain[:3] == [
        "conda activate gpt2",
        "module load pkg/Anaconda3 cuda/11.7 compiler/gcc/11.2.0",
        "module purge",
    ]
    for rank, line in enumerate(plain[3:]):
        assert line.startswith(
            f"torchrun --nnodes 2 --node_rank {rank} --nproc_per_node 8 --rdzv_id --rdzv_backend c10d"
        )
        seen, _, gpus = line.rpartition(", ")
        assert seen.endswith(f"in {user.place} with load pkg/Anaconda3 cuda/11.7 compiler/gcc/11.2.0, gpt2")
        assert len(gpus.split(",")) == 8
    assert len(plain) == 5
    assert "NODELIST=nid[001-002]" in (user.place / f"{second}.out").read_text()
    assert (run / "job.err").resolve() == user.place / f"{second}.err"
    assert "MASTER_ADDR=nid001" in user.runner("logs", run.name).stdout


SITE = """base = "twcc"
[values]
account = "XXX"
partition = "gp1d"
modules = ["pkg/Anaconda3", "cuda/11.7", "compiler/gcc/11.2.0"]
"""
JOB = """command = ["sh", "-c", "echo $SLURM_PROCID: $LOADED, $CONDA_DEFAULT_ENV; command -v torchrun"]
host_setup = "conda activate gpt2"
preflight = false

[resources]
nodes = 2
tasks_per_node = 1
"""


def test_twcc_modules_of_the_site_and_conda_of_the_job(user: User, project: Path) -> None:
    """A job of runner's without a container: the tasks see what the two have set."""
    write(user.place.parent, {".config/runner/sites/mine.toml": SITE})
    write(project, {"jobs/own.toml": JOB})
    mine = Runner(project, user.runner.environ, "mine")
    _, log = mine.finished("own", "--env", "plain")
    assert sorted(line for line in log.splitlines() if ", gpt2" in line) == [
        f"{rank}: load compiler/gcc/11.2.0, gpt2" for rank in (0, 1)
    ]
    assert log.count(f"{user.place}/bin/torchrun") == 2
    modules = ["module load compiler/gcc/11.2.0", "module load cuda/11.7", "module load pkg/Anaconda3"]
    assert user.notes() == ["conda activate gpt2", *modules]


@pytest.mark.parametrize(
    ("submit", "launch", "expected"),
    [
        ((), (), ("10", "./my_gpt2_checkpoint", "10")),
        (
            ("--export=ALL,EPOCHS=3,DATA_PERCENTAGE=25,CHECKPOINT_DIR=/fsx/my_training_run",),
            ("--sbatch=--export=ALL,EPOCHS=3,DATA_PERCENTAGE=25,CHECKPOINT_DIR=/fsx/my_training_run",),
            ("3", "/fsx/my_training_run", "25"),
        ),
    ],
)
def test_google_cloud_run_llm(
    user: User, submit: tuple[str, ...], launch: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    write(user.place, {"run_llm.slurm": GOOGLE_CLOUD})
    first = user.sbatch(*submit, "run_llm.slurm")
    plain = user.notes()
    run, second = user.launch(*launch, "run_llm.slurm")
    assert user.notes() == plain
    user.same(first, second)
    epochs, folder, percentage = expected
    words = f"--epochs {epochs} --checkpoint_dir {folder} --data_percentage {percentage}"
    assert len(plain) == 3 and all("--nproc_per_node 1 " in line and f" {words} in " in line for line in plain)
    assert user.runner("status", run.name).stdout.count("COMPLETED") == 1


def test_google_cloud_packages_of_pip_user(user: User, project: Path) -> None:
    """A job of runner's without a container finds what `pip3 install --user` has installed, and the shell's EPOCHS."""
    python = Path(sys.executable).resolve()  # of the system: a virtual environment has no packages of the user's
    site = user.runner("shell", "plain", "--", str(python), "-m", "site", "--user-site").stdout.strip()
    write(Path(site), {"only_there.py": "WORD = 'from the home folder'\n"})
    code = "import os, only_there; print(only_there.WORD, os.environ['EPOCHS'])"
    mine = Runner(project, {**user.runner.environ, "EPOCHS": "5"}, "gcp-g2")
    words = ("--partition", "g2gpu", "--gpus-per-node", "1", "--no-preflight", "--engine", "host", "--env", "host")
    _, log = mine.finished(*words, "--", str(python), "-c", code)
    assert "from the home folder 5\n" in log


def test_google_cloud_variables_of_the_shell(user: User) -> None:
    write(user.place, {"run_llm.slurm": GOOGLE_CLOUD})
    user.launch("run_llm.slurm", extra_environ={"EPOCHS": "7"})
    assert all(" --epochs 7 " in line for line in user.notes())


@pytest.mark.uses("squashfuse")
def test_aws_task(user: User, busybox_sqsh: Path) -> None:
    """The container sees the home folder, so the logins of huggingface-cli and wandb are there."""
    home = user.place.parent
    write(user.place, {"task.sbatch": AWS, "setup.sh": AWS_SETUP, "sft.sh": AWS_TRAIN})
    write(home, {".cache/huggingface/token": "hf_login\n", ".netrc": "machine api.wandb.ai login user password key\n"})
    (user.place / "setup.sh").chmod(0o755)
    (home / "llm.sqsh").symlink_to(busybox_sqsh)
    first = user.sbatch("task.sbatch")
    run, second = user.launch("task.sbatch")
    user.same(first, second)
    texts = [sorted((user.place / f"sft_{job}.out").read_text().splitlines()) for job in (first, second)]
    assert texts[0] == texts[1]
    words = "--model_name_or_path meta-llama/Llama-3.1-8B --push_to_hub"
    assert texts[1][:2] == [f"{n} in {user.place}, from the image, prolog {n}: {words}" for n in (0, 1)]
    assert texts[1][2:].count("hf_login") == 2 and len(texts[1]) == 6
    assert sorted((user.place / f"sft_{second}.err").read_text().splitlines()) == ["an error of 0", "an error of 1"]
    assert "an error of 1" in user.runner("logs", run.name).stdout


@pytest.mark.uses("squashfuse")
def test_alps_deepspeed(user: User, busybox_sqsh: Path) -> None:
    """The EDF is found by its name in ~/.edf; eight tasks take their rank from Slurm."""
    edf = environment(busybox_sqsh, mounts=[f"{user.place}:{user.place}"]).replace("[env]", "")
    name = "ngc-pytorch-deepspeed-24.06"
    write(user.place.parent, {f".edf/{name}.toml": f'workdir = "{user.place}"\n{edf}'})
    write(user.place, {"deepspeed.sbatch": ALPS, "train.sh": ALPS_TRAIN})
    first = user.sbatch("deepspeed.sbatch")
    calls = user.place / "output/calls"
    plain = sorted(calls.read_text().splitlines())
    calls.unlink()
    run, second = user.launch("deepspeed.sbatch")
    user.same(first, second)
    assert sorted(calls.read_text().splitlines()) == plain
    words = "--model meta-llama/Llama-2-7b-hf --output ./output --deepspeed deepspeed_config.json"
    assert plain == [
        f"rank {rank}, local rank {rank % 4} of 8 in {user.place}: from the image, {words}" for rank in range(8)
    ]
    assert (run / "job.log").resolve() == user.place / f"slurm-{second}.out"
