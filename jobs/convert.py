"""Convert a checkpoint (DeepSpeed ZeRO 0 to 3, LoRA or Hugging Face) to a Hugging Face model.

    python jobs/convert.py --checkpoint runs/sft-0001 --dtype bfloat16
    python jobs/convert.py --checkpoint runs/sft-0001/checkpoints/checkpoint-500 --output my-model --max_shard_size 2GB

DeepSpeed's fp32 weights are preferred. An adapter is merged into its base model. The new folder appears only after the
model's logits have been compared with the checkpoint's. stdout is the path of the folder.
To publish it, at any time and from any machine: `python jobs/push.py FOLDER --repo NAME`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors, run

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Write the model, print its folder and return 0."""
    with errors.reported("convert"):
        arguments = parser().parse_args(argv)
        if not run.alone("convert"):
            return 0
        from training.converting import conversion

        print(conversion.convert(arguments, os.environ))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of a run, a checkpoint or a model; default: $RUNNER_AFTER, or $RUNNER_RUN",
    )
    parser.add_argument(
        "--output", type=Path, help="default: model-STEP in the run's folder, or NAME-model beside the checkpoint"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the weights; default: the dtype in the checkpoint's config.json"
    )
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a weight file")
    parser.add_argument(
        "--config", help="folder or name of a model whose config.json is used; default: the checkpoint's"
    )
    parser.add_argument("--tokenizer", help="folder or name of the tokenizer; default: the checkpoint's")
    parser.add_argument(
        "--check", choices=("logits", "none"), default="logits",
        help="logits: compare the logits of the new model and the checkpoint, which needs memory for a model in fp32",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance",
        type=float,
        help="allowed difference as a share of the largest logit; default: depends on the dtype",
    )
    parser.add_argument("--device", default="cpu", help="device on which the logits are computed")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
