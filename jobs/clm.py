"""Causal language modelling, from scratch or continued, on GPUs or CPU, under torchrun, srun, accelerate or alone.

    torchrun --nproc-per-node 2 jobs/clm.py                     the demo: a tiny Llama, a tokenizer made on the spot
    torchrun --nproc-per-node 8 jobs/clm.py --model_type gpt2 --config_overrides n_embd=1024,n_head=16,n_layer=24 \
        --tokenizer_name openai-community/gpt2 --train_file corpus.jsonl --block_size 1024 --global_batch_size 512

Arguments: those of transformers' run_clm by their own names (`--config FILE.yaml` too), and a few more: `--help`.
Without --do_train and --do_eval it trains. `--deepspeed` takes a preset (zero0 ... zero3) or a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from training import imports, starting


def main(argv: Sequence[str]) -> int:
    """Train, and return 0 when done or 75 when the run is to be continued from its checkpoint."""
    with starting.training("clm", imports.unused_by_clm(argv)) as (run, peers):
        from training import clm_story as modelling

        return modelling.train(argv, run, peers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
