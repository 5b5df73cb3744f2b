"""Causal language modelling, from scratch or continued, on GPUs or CPU, under torchrun, srun, accelerate or alone.

    torchrun --nproc-per-node 2 jobs/clm.py                     the demo: a tiny Llama, a tokenizer made on the spot
    torchrun --nproc-per-node 8 jobs/clm.py --model_type gpt2 --config_overrides n_embd=1024,n_head=16,n_layer=24 \
        --tokenizer_name openai-community/gpt2 --train_file corpus.jsonl --block_size 1024 --global_batch_size 512

Arguments: those of transformers' run_clm by their own names (`--config FILE.yaml` too), and a few more: `--help`.
Without --do_train and --do_eval it trains. `--deepspeed` takes a preset (zero0 ... zero3) or a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from training import errors, imports, processes, run_folder


def main(argv: Sequence[str]) -> int:
    """Train, and return 0 when done or 75 when the run is to be continued from its checkpoint."""
    with errors.reported("clm"):
        peers = processes.from_environment(os.environ)
        run = run_folder.from_environment(os.environ, "clm")
        run_folder.make(run)
        run_folder.point_caches(run, os.environ)
        threads = processes.set_threads(os.environ, peers)
        # From here on the slow imports: they read what has been set above.
        imports.prepare(imports.unused_by_clm(argv))
        processes.settle_device(os.environ)
        from training.clm import modelling

        if peers.first:
            print(
                f"clm: {peers.world_size} processes by {peers.launcher}, {threads} threads each, run {run.path}",
                flush=True,
            )
        code = modelling.train(argv, run, peers)
        processes.leave_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
