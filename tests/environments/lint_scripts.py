"""For each code about batch scripts: lines that break its rule alone, and the same fixed."""

from __future__ import annotations

from typing import Any

from tests.environments.lint_cases import NGC, Case, warning

REMAP = "remap.toml"  # an environment with com.pyxis.pytorch_remap_vars = "true"


def error(code: str, broken: str, fixed: str, **more: Any) -> Case:
    return Case(code, broken, fixed, **{"line": 3, **more})


def advice(code: str, broken: str, fixed: str, **more: Any) -> Case:
    return warning(code, broken, fixed, **{"line": 3, **more})


TORCHRUN = "torchrun --nnodes=2 --nproc-per-node=4"

# line 1 is `#!/bin/bash`, line 2 `#SBATCH --nodes=2`
SCRIPTS = [
    error("environment-missing", "srun --environment=nowhere true\n", "srun --environment=plain true\n"),
    error(
        "environment-missing", "srun --environment ./nowhere.toml true\n", 'srun --environment "$PWD/plain.toml" true\n'
    ),
    error(
        "environment-missing",
        "srun -N 2 '--environment=nowhere' python x.py --environment plain\n",
        "srun -N 2 '--environment=plain' python x.py --environment nowhere\n",
    ),
    advice("sbatch-environment", "#SBATCH --environment=plain\nsrun true\n", "srun --environment=plain true\n"),
    error("sbatch-variable", "#SBATCH --output=$HOME/x\n", "#SBATCH --output=%x-%j.log # $HOME\n"),
    error(
        "sbatch-hash",
        f"#SBATCH --container-image={NGC}:25.01-py3\n",
        f"#SBATCH --container-image={NGC.replace('#', chr(92) + '#')}:25.01-py3\n",
        engine="pyxis",
    ),
    error("sbatch-hash", "#SBATCH --job-name=a#b ## why\n", "#SBATCH --job-name='a#b' ### why: see #3, C#\n"),
    error("sbatch-late", "cd /tmp\n#SBATCH --time=1\n", "#SBATCH --time=1\ncd /tmp\n", line=4),
    error("sbatch-refused", "#SBATCH --mem=0\n", "#SBATCH --mem=450G\n", site={"refused": {"--mem=0": "no"}}),
    error("sbatch-refused", "srun --exclusive true\n", "srun --exact true\n", site={"refused": {"--exclusive": "no"}}),
    advice("account-missing", "true\n", "#SBATCH -A g1\ntrue\n", site={"account_required": True}, line=2),
    error(
        "node-rank-too-early",
        f"srun {TORCHRUN} --node-rank=$SLURM_PROCID x.py\n",
        f"srun bash -c '{TORCHRUN} --node-rank=$SLURM_PROCID x.py'\n",
    ),
    error(
        "node-rank-too-early",
        f"srun {TORCHRUN} --rdzv-backend=static --node-rank=$SLURM_PROCID x.py\n",
        f"srun {TORCHRUN} --rdzv-backend=c10d --node-rank=$SLURM_PROCID x.py\n",
    ),
    error(
        "node-rank-too-early",
        'L="accelerate launch --num_machines 2 --rdzv_backend=static --machine_rank $SLURM_NODEID"\nsrun sh -c "$L"\n',
        'L="accelerate launch --num_machines 2 --rdzv_backend=c10d --machine_rank $SLURM_NODEID"\nsrun sh -c "$L"\n',
    ),
    error(
        "node-rank-too-early",
        f'srun bash -c "{TORCHRUN} \\\n  --node_rank \\"$SLURM_NODEID\\" x.py"\n',
        f'srun bash -c "{TORCHRUN} \\\n  --node_rank \\$SLURM_NODEID x.py"\n',
    ),
    error(
        "node-rank-too-early",
        f"cat > t.sh <<EOF\n{TORCHRUN} --node-rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh\n",
        f"cat > t.sh <<'EOF'\n{TORCHRUN} --node-rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh\n",
        line=4,
    ),
    error(
        "node-rank-too-early",
        'L="accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID x.py"\nsrun bash -c "$L"\n',
        'L="accelerate launch --num_machines 2 --machine_rank \\$SLURM_PROCID x.py"\nsrun bash -c "$L"\n',
    ),
    error(
        "node-rank-too-early",
        "srun accelerate launch --num_machines=2 --machine-rank=${SLURM_NODEID} x.py\n",
        "srun bash -c 'accelerate launch --num_machines=2 --machine-rank=${SLURM_NODEID} x.py'\n",
    ),
    error(
        "node-rank-too-early",
        f"sbatch <<EOF\n#!/bin/bash\n#SBATCH -N2\nsrun bash -c '{TORCHRUN} --node_rank=$SLURM_NODEID x.py'\nEOF\n",
        f"sbatch <<EOF\n#!/bin/bash\n#SBATCH -N2\nsrun bash -c '{TORCHRUN} --node_rank=\\$SLURM_NODEID x.py'\nEOF\n",
        line=6,
    ),
    error(
        "node-rank-too-early",
        f"sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N2\nsrun {TORCHRUN} --node_rank=$SLURM_NODEID x.py\nEOF\n",
        f"sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N2\nsrun bash -c '{TORCHRUN} --node_rank=$SLURM_NODEID x.py'\nEOF\n",
        line=6,
    ),
    error(
        "sbatch-late",
        "cat > x.sh <<EOF\n#SBATCH -N1\ntrue\n#SBATCH -t 1\nEOF\n",
        "cat > x.sh <<EOF\n#SBATCH -N1\n#SBATCH -t 1\ntrue\nEOF\n",
        line=6,
    ),
    Case(
        "environment-missing",
        "srun --environment=nowhere true\n",
        "srun --environment=plain true\n",
        severity="note",
        line=3,
        setting={"here": False},
    ),
    advice(
        "sbatch-container",
        "#SBATCH --container-image=/x.sqsh\nsrun python x.py\n",
        "#SBATCH --container-image=/x.sqsh\npython x.py\n",
        engine="pyxis",
    ),
    advice(
        "nnodes-missing",
        "srun torchrun --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint $head:$port x.py\n",
        "srun torchrun --nproc_per_node 4 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $head:$port x.py\n",
    ),
    advice(
        "nnodes-missing",
        'L="python -m torch.distributed.run --nproc_per_node 4"\nsrun bash -c "$L x.py"\n',
        'L="python -m torch.distributed.run --nproc_per_node 4"\nsrun -N1 bash -c "$L x.py"\n',
        line=4,
    ),
    advice("nnodes-missing", "srun accelerate launch x.py\n", "srun accelerate launch --config_file a.yaml x.py\n"),
    advice(
        "torchrun-per-task",
        f"#SBATCH --ntasks-per-node=4\nsrun {TORCHRUN} x.py\n",
        f"#SBATCH --ntasks-per-node=4\nsrun --ntasks-per-node=1 {TORCHRUN} x.py\n",
        line=4,
    ),
    advice("torchrun-per-task", f"srun -n 8 {TORCHRUN} x.py\n", f"srun -n 2 {TORCHRUN} x.py\n"),
    advice(
        "export-without-all",
        "#SBATCH --export=NONE\nexport A=1\nsrun true\n",
        "#SBATCH --export=NONE\nexport A=1\nsrun --export=ALL true\n",
        line=5,
    ),
    advice(
        "export-without-all",
        "#SBATCH --export=HOME,USER\nmodule load cuda\nsrun true\n",
        "#SBATCH --export=ALL,A=1\nmodule load cuda\nsrun true\n",
        line=5,
    ),
    advice("export-without-all", "srun --export=A=1,B=2 true\n", "srun --export=ALL,A=1,B=2 true\n"),
    advice(
        "signal-ends-torchrun",
        f"#SBATCH --signal=USR1@90\nsrun {TORCHRUN} x.py\n",
        f"#SBATCH --signal=B:USR1@90\nsrun {TORCHRUN} x.py\n",
    ),
    advice(
        "signal-ends-torchrun",
        f"#SBATCH --signal=SIGUSR2@90\nsrun {TORCHRUN} x.py\n",
        f"#SBATCH --signal=TERM@90\nsrun {TORCHRUN} x.py\n",
    ),
    advice(
        "rank-remap-torchrun",
        f"srun --environment=./{REMAP} {TORCHRUN} x.py\n",
        f"srun --environment=./{REMAP} env -u RANK -u LOCAL_RANK {TORCHRUN} x.py\n",
        site={"launcher": "srun"},
    ),
    advice(
        "rank-remap-torchrun",
        f"srun --container-image={NGC}:25.01-py3 {TORCHRUN} x.py\n",
        f"srun --container-image={NGC}:25.01-py3 bash -c 'unset RANK LOCAL_RANK; {TORCHRUN} x.py'\n",
        engine="pyxis",
    ),
    error(
        "relative-squashfs",
        "srun --container-image=a.sqsh true\n",
        "srun --container-image=./a.sqsh true\n",
        engine="pyxis",
    ),
    error(
        "slash-after-registry",
        "srun --container-image=nvcr.io/nvidia/cuda:12.4.1 true\n",
        "srun --container-image=nvcr.io#nvidia/cuda:12.4.1 true\n",
        engine="pyxis",
        setting={"enroot": (3, 5, 0)},
    ),
    error(
        "slash-after-registry",
        "srun --container-image=docker://nvcr.io/nvidia/cuda:12.4.1 true\n",
        "srun --container-image=dockerd://myimage:1 true\n",
        engine="pyxis",
        setting={"enroot": (3, 5, 0)},
    ),
    advice("gpus-per-task", "#SBATCH --gpus-per-task=1 -n 8\n", "#SBATCH --gpus-per-node=4 -n 8\n"),
    advice("gpus-per-task", "#SBATCH --gpus-per-task=1 --gpus=8\n", "#SBATCH --gpus-per-task=4 --gpus=8\n"),
    advice("gpus-per-task", "srun -n 8 --gpus-per-task 1 true\n", "srun -n 8 --gpus-per-task 1 --gpu-bind=none true\n"),
    advice(
        "gpus-per-task",
        "#SBATCH --gpus-per-task=1 -n 8 --gpu-bind=none\nsrun --gpus-per-task=1 --gpu-bind=closest true\n",
        "#SBATCH --gpus-per-task=1 -n 8 --gpu-bind=none\nsrun --gpus-per-task=1 true\n",
        line=4,
    ),
    advice(
        "gpus-per-task",
        "#SBATCH --ntasks-per-node=4 --gpus-per-task=1\n",
        "#SBATCH --ntasks-per-node=1 --gpus-per-task=4\n",
    ),
    advice("gpus-per-task", "srun -n 8 --gpus-per-task=1 true\n", "srun -n 2 --gpus-per-task=4 true\n"),
    advice("cpus-not-inherited", "#SBATCH -c 8\nsrun true\n", "#SBATCH -c 8\nsrun -c 8 true\n", line=4),
    advice(
        "cpus-not-inherited",
        "#SBATCH -c 8\nsrun bash -c 'true'\n",
        "#SBATCH -c 8\nsrun -lc8 bash -c 'true'\n",
        line=4,
    ),
    advice(
        "cpus-not-inherited",
        '#SBATCH -c 8\necho "$(srun true)"\n',
        '#SBATCH -c 8\necho "srun true"\n',
        line=4,
    ),
    advice("cpus-not-inherited", "#SBATCH -c 2\nsrun true\n", "#SBATCH -c 1\nsrun true\n", line=4),
    advice("cpus-not-inherited", "#SBATCH -c 8\nsrun ./a.sh\n", "#SBATCH -c 8\nsrun -l hostname\n", line=4),
    advice(
        "cpus-not-inherited",
        "#SBATCH -c 8\nsrun bash -c 'echo begin && python a.py'\n",
        "#SBATCH -c 8\nsrun -N1 /bin/bash -c 'echo $HOSTNAME'\n",
        line=4,
    ),
    advice("cpus-not-inherited", "#SBATCH -c 8\ncommand srun true\n", "#SBATCH -c 8\ncommand -v srun true\n", line=4),
    advice(
        "cpus-not-inherited",
        "#SBATCH --cpus-per-task=8\nsrun true\n",
        "#SBATCH --cpus-per-task=8\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun true\n",
        line=4,
    ),
    advice(
        "master-address",
        "export MASTER_ADDR=$(hostname --ip-address)\n",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n',
    ),
    advice("master-address", "MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR\n", "MASTER_ADDR=$(hostname -s)\n"),
    advice("fixed-port", "export MASTER_PORT=29500\n", "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\n"),
    advice("fixed-port", "MASTER_PORT=7078 srun true\n", "SPARK_MASTER_PORT=7078 srun true\n"),
    advice(
        "fixed-port",
        "accelerate launch --main_process_port 29500 x.py\n",
        'accelerate launch --main_process_port "$PORT" x.py\n',
    ),
    advice("fixed-port", f"{TORCHRUN} --master-port 29500 x.py\n", f'{TORCHRUN} --master-port "$PORT" x.py\n'),
    advice("trace-prints-secrets", "set -ex\nexport HF_TOKEN=$(cat ~/.hf)\n", "set -e\nexport HF_TOKEN=$(cat ~/.hf)\n"),
    error("secret-value", "export HF_TOKEN=hf_abcdefghijklmnopqrst\n", "export HF_TOKEN=$(cat ~/.hf)\n"),
    error("secret-value", "srun --export=ALL,WANDB_API_KEY=0a1b2c3d4e5f true\n", "srun --export=ALL true\n"),
    error("secret-value", "#SBATCH --export=ALL,WANDB_API_KEY=0a1b2c3d4e5f\ntrue\n", "#SBATCH --export=ALL\ntrue\n"),
    advice(
        "path-lost",
        "srun --environment=plain bash -lc 'python x.py'\n",
        "srun --environment=plain bash -c 'python x.py'\n",
    ),
    advice(
        "path-lost",
        "srun --environment=plain /bin/sh -l x.sh\n",
        "srun --environment=plain /bin/sh x.sh -l\n",
    ),
]

# scripts that break no rule, though they look like it
HARMLESS = {
    "one process for each torchrun": "#SBATCH --ntasks-per-node=4\nsrun torchrun --nnodes=8 --nproc-per-node=1 x.py\n",
    "tasks that only the job knows": "srun -n $N torchrun --nnodes=2 --nproc-per-node=4 x.py\n",
    "a task for each node": f"#SBATCH --ntasks-per-node=4\nsrun -n $SLURM_NNODES {TORCHRUN} x.py\n",
    "nodes in a variable of the environment": "export PET_NNODES=2\nsrun torchrun x.py\n",
    "nodes in another variable": 'ARGS=(--nnodes 2)\nsrun torchrun "${ARGS[@]}" x.py\n',
    "independent nodes": "srun torchrun --standalone --nproc-per-node=4 x.py\n",
    "a step on one node": 'OPTIONS="--nodes=1 --ntasks=1"\nsrun $OPTIONS torchrun --nproc-per-node=4 x.py\n',
    "options that only the job knows": "srun $OPTIONS torchrun --nproc-per-node=4 x.py\n",
    "an option of the program": "#SBATCH --ntasks-per-node=1 --gpus-per-task=4\nsrun python x.py -n 8\n",
    "nothing to lose": "#SBATCH --export=NONE\nsrun python x.py\n",
    "the exports are set again": "#SBATCH --export=NONE\nexport SLURM_EXPORT_ENV=ALL\nexport A=1\nsrun true\n",
    "no variables on purpose": "export A=1\nsrun --export=NONE true\n",
    "a signal for the program": "#SBATCH --signal=USR1@90\nsrun python x.py\n",
    "a signal that torchrun handles": (
        f"#SBATCH --signal=USR1@90\nexport TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGUSR1\nsrun {TORCHRUN} x.py\n"
    ),
    "a job with values from a loop": (
        "for N in 1 2; do\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=${N} --output=$PWD/%j.log\n"
        'cd "\\${SCRATCH}"\nsrun python x.py\nEOF\ndone\n'
    ),
    "GPUs of all tasks, by another line": (
        "#SBATCH --gpus-per-task=1 -n 8\n#SBATCH --gpu-bind=none\nsrun -n 8 --gpus-per-task=1 true\n"
    ),
    "GPUs of all tasks, by the step": (
        "#SBATCH --gpus-per-task=1 -n 8\nsrun -N 1 -n 1 nvidia-smi\nsrun --gpu-bind none true\n"
    ),
    "GPUs of all tasks, by a flag": "#SBATCH --gpus-per-task=1 -n 8\nsrun --gres-flags=allow-task-sharing true\n",
    "srun in a message": (
        '#SBATCH -c 8\necho "[$(date)] starting srun now"\nif ! command -v srun > /dev/null; then exit 1; fi\n'
    ),
    "options of a script": "srun --environment=plain bash train.sh -lr 1e-4\nsrun --environment=plain ./run.sh -l 5\n",
    "options of the program, named as srun's": (
        "srun python train.py --environment CartPole-v1\nsrun uv run train.py --export onnx\n"
        "srun -N 2 ./train.sh --export=onnx --container-image=a.sqsh -n 8\n"
    ),
    "an option after a variable": "#SBATCH -c 8\nsrun $OPTIONS --cpus-per-task=8 true\n",
    "what an example has in the place of a secret": (
        'export HF_TOKEN="<your-token-here>"\nexport HF_TOKEN=hf_your_token_here\n'
        'export WANDB_API_KEY="your_wandb_key_here" API_KEY=CHANGE_THIS GH_TOKEN=ghp_xxxxxxxxxx\nsrun true\n'
    ),
    "arithmetic": "(( x = 1 << y ))\nsrun python x.py\n",
}
