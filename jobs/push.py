"""Upload a converted model to the Hugging Face hub, at any time after the conversion, for example from a login node.

    python jobs/push.py runs/sft-0001/model-500 --repo my-organisation/my-model --private

Needs Python and huggingface_hub, but no GPU and no torch. The token is HF_TOKEN or that of `hf auth login`; HF_ENDPOINT
selects another hub. The upload is one commit, so that the hub has all files or none. stdout is the URL of the commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors
from training.converting import hub


def main(argv: Sequence[str]) -> int:
    """Upload the folder, print the URL of the commit and return 0."""
    with errors.reported("push"):
        arguments = parser().parse_args(argv)
        size_bytes = hub.check_folder(arguments.folder)
        line = f"push: {size_bytes / 1e9:.2f} GB of weights in {arguments.folder} to {arguments.repo}"
        print(line, file=sys.stderr, flush=True)
        options = {"private": arguments.private, "branch": arguments.branch, "message": arguments.message}
        print(hub.push(arguments.folder, arguments.repo, **options))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="push.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a Hugging Face model, as convert.py prints it")
    parser.add_argument(
        "--repo", required=True, metavar="OWNER/NAME", help="repository on the hub; created if it does not exist"
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--branch", help="default: main")
    parser.add_argument("--message", default="Upload model", help="message of the commit")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
