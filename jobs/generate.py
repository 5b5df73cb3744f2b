"""Text from a trained checkpoint, on GPU or CPU.

    python jobs/generate.py --checkpoint runs/sft-0001/checkpoints/final --prompt 'What does `json.dumps(obj)` do?'

Without --checkpoint: the newest final model of the run named by RUNNER_RUN. The prompt is asked as a user's message
where the tokenizer has a chat template (--plain continues it as it stands). The answer alone goes to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors, processes, run_folder
from training.generating import generation

PROMPT = "What does `pathlib.Path.read_text(self, encoding=None)` do?"


def main(argv: Sequence[str]) -> int:
    """Print the answer to each prompt and return 0."""
    with errors.reported("generate"):
        arguments = parser().parse_args(argv)
        run = run_folder.from_environment(os.environ, "generate")
        run_folder.point_caches(run, os.environ)
        # One process answers: a second one of the same launch has nothing to do.
        if int(os.environ.get("RANK", "0")) > 0:
            return 0
        processes.set_threads(os.environ, processes.Processes(0, 0, 1, 1, "alone"))
        checkpoint = generation.find_checkpoint(arguments.checkpoint, os.environ)
        generation.answer(checkpoint, arguments)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generate.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="folder of a Hugging Face model (or of a LoRA adapter)")
    parser.add_argument("--prompt", action="append", help=f"may be given several times; default: {PROMPT}")
    parser.add_argument("--max_new_tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest token")
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--repetition_penalty", type=float, default=1.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="continue the prompt; no chat template")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one")
    parser.set_defaults(default_prompt=PROMPT)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
