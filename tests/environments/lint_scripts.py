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
    advice("sbatch-environment", "#SBATCH --environment=plain\nsrun true\n", "srun --environment=plain true\n"),
    error("sbatch-variable", "#SBATCH --output=$HOME/x\n", "#SBATCH --output=%x-%j.log # $HOME\n"),
    error(
        "sbatch-hash",
        f"#SBATCH --container-image={NGC}:25.01-py3\n",
        f"#SBATCH --container-image={NGC.replace('#', chr(92) + '#')}:25.01-py3\n",
        engine="pyxis",
    ),
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
        f'srun bash -c "{TORCHRUN} \\\n  --node_rank \\"$SLURM_NODEID\\" x.py"\n',
        f'srun bash -c "{TORCHRUN} \\\n  --node_rank \\$SLURM_NODEID x.py"\n',
    ),
    error(
        "node-rank-too-early",
        f"cat > t.sh <<EOF\n{TORCHRUN} --node-rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh\n",
        f"cat > t.sh <<'EOF'\n{TORCHRUN} --node-rank=$SLURM_NODEID x.py\nEOF\nsrun bash t.sh\n",
        line=4,
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
    advice("gpus-per-task", "#SBATCH --gpus-per-task=1\n", "#SBATCH --gpus-per-node=4\n"),
    advice("gpus-per-task", "srun --gpus-per-task 1 true\n", "srun --gpus-per-task 1 --gpu-bind=none true\n"),
    advice("cpus-not-inherited", "#SBATCH -c 8\nsrun true\n", "#SBATCH -c 8\nsrun -c 8 true\n", line=4),
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
    advice("fixed-port", f"{TORCHRUN} --master-port 29500 x.py\n", f'{TORCHRUN} --master-port "$PORT" x.py\n'),
    advice("trace-prints-secrets", "set -ex\nexport HF_TOKEN=$(cat ~/.hf)\n", "set -e\nexport HF_TOKEN=$(cat ~/.hf)\n"),
    error("secret-value", "export HF_TOKEN=hf_abcdefghijklmnopqrst\n", "export HF_TOKEN=$(cat ~/.hf)\n"),
    advice(
        "path-lost",
        "srun --environment=plain bash -lc 'python x.py'\n",
        "srun --environment=plain bash -c 'python x.py'\n",
    ),
]
