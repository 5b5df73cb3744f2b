"""Supervised fine-tuning with TRL, on GPUs or CPU, under torchrun, srun, accelerate or alone.

    torchrun --nproc-per-node 2 jobs/sft.py                     the demo: a tiny Llama, a tokenizer made on the spot
    torchrun --nproc-per-node 4 jobs/sft.py --model_name_or_path meta-llama/Llama-3.1-8B \
        --dataset_name trl-lib/Capybara --deepspeed zero3 --global_batch_size 128 --packing

Arguments: those of TRL's SFTConfig, ScriptArguments and ModelConfig by their own names (`--config FILE.yaml` too), and
--global_batch_size, --vocabulary_size, --loss_path. `--deepspeed` takes a preset (zero0 ... zero3) or a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from training import starting


def main(argv: Sequence[str]) -> int:
    """Train, and return 0 when done or 75 when the run is to be continued from its checkpoint."""
    with starting.training("sft") as (run, peers):
        from training import sft_story as supervised

        return supervised.train(argv, run, peers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
