"""A converted model onto the Hugging Face hub: a step of its own, now or days later, from a login node.

    python jobs/push.py runs/sft-0001/model-500 --repo my-organisation/my-model --private

Needs Python and huggingface_hub, no GPU, no torch. The token is HF_TOKEN or that of `hf auth login`; HF_ENDPOINT names
another hub. One commit: the model is on the hub whole or not at all. The commit's address alone goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors
from training.converting import hub


def main(argv: Sequence[str]) -> int:
    """Send the folder, print the commit's address and return 0."""
    with errors.reported("push"):
        arguments = parser().parse_args(argv)
        size_bytes = hub.check_folder(arguments.folder)
        hub_says = f"push: {size_bytes / 1e9:.2f} GB of weights in {arguments.folder} to {arguments.repo}"
        print(hub_says, file=sys.stderr, flush=True)
        print(
            hub.push(
                arguments.folder,
                arguments.repo,
                private=arguments.private,
                branch=arguments.branch,
                message=arguments.message,
            )
        )
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="push.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of a Hugging Face model, as convert.py has printed it")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="made where it is not there")
    parser.add_argument("--private", action="store_true", help="make it private where it is new")
    parser.add_argument("--branch", help="default: main")
    parser.add_argument("--message", default="Upload model", help="of the commit")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
