"""Generate text from a trained checkpoint, on a GPU or a CPU.

    python jobs/generate.py --checkpoint runs/sft-0001 --prompt 'What does `json.dumps(obj)` do?'
    python jobs/generate.py runs/sft-0001/checkpoints/checkpoint-50/global_step50 --prompts_file in.txt

A checkpoint is a run folder (its final model, or its newest complete checkpoint), a DeepSpeed checkpoint (ZeRO 0 to 3,
written by any number of processes), the folder or name of a Hugging Face model, or a LoRA adapter. The default is
RUNNER_RUN. A DeepSpeed checkpoint of another program has no configuration and no tokenizer: add --model_name. If the
tokenizer has a chat template, the prompt is a user message; with --plain, the model continues the prompt. stdout
contains only the answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors, run

PROMPT = "What does `pathlib.Path.read_text(self, encoding=None)` do?"


def main(argv: Sequence[str]) -> int:
    """Print the answer to each prompt and return 0."""
    with errors.reported("generate"):
        arguments = parser().parse_args(argv)
        if not run.alone("generate"):
            return 0
        from training import generation
        from training.converting import trained

        named = arguments.checkpoint or arguments.folder
        arguments.tokenizer = arguments.tokenizer or arguments.model_name
        found = trained.find(named, os.environ, config=arguments.config, base=arguments.model_name)
        generation.answer(found, arguments)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generate.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("folder", nargs="?", metavar="CHECKPOINT", help="the same as --checkpoint")
    where.add_argument("--checkpoint", help="folder of a run, a checkpoint, a model or an adapter; or a model's name")
    parser.add_argument("--prompt", action="append", help=f"can be repeated; default: {PROMPT}")
    parser.add_argument(
        "--prompts_file", type=Path, help="one prompt per line; .jsonl: objects with `prompt` or `messages`"
    )
    parser.add_argument("--system", help="a system message before each prompt")
    parser.add_argument("--plain", action="store_true", help="continue the prompt without a chat template")
    parser.add_argument("--max_new_tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the most likely token")
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--top_k", type=int, default=50, help="0: choose from all tokens")
    parser.add_argument("--repetition_penalty", type=float, default=1.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object for each prompt: prompt, answer, tokens")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    parser.add_argument(
        "--model_name", help="model that has the tokenizer (and config.json, if the checkpoint has none), such as gpt2"
    )
    parser.add_argument(
        "--config", help="folder or name of a model whose config.json is used; default: the checkpoint's"
    )
    parser.add_argument("--tokenizer", help="folder or name of the tokenizer; default: the checkpoint's")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.set_defaults(default_prompt=PROMPT)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
