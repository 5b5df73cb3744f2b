"""Text to a token cache, before a training that would make it itself: on a node without GPUs, with all its cores.

    python jobs/tokenize_data.py --train_file 'corpus/*.jsonl' --tokenizer_name openai-community/gpt2

The arguments are those of clm by the same names, so that clm finds this cache: the same files, tokenizer and options.
The folder of the cache goes to stdout; it holds text.bin and text.idx, which Megatron reads as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors, imports, processes, transformers_names
from training import run as run_folder
from training.errors import JobError


def main(argv: Sequence[str]) -> int:
    """Make the cache, or find it, and return 0."""
    with errors.reported("tokenize_data"):
        arguments = parser().parse_args(argv)
        run = run_folder.from_environment(os.environ, "tokenize_data")
        run_folder.make(run)
        run_folder.point_caches(run, os.environ)
        transformers_names.remember(run.cache)
        imports.hide(("datasets", "peft", "deepspeed", "sklearn"))
        with contextlib.redirect_stdout(sys.stderr):
            prefix = tokenize(arguments, run)
        print(prefix.parent)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenize_data.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--train_file", required=True, help="text, JSONL, Parquet or CSV; `*` stands for several files")
    parser.add_argument("--tokenizer_name", required=True, help="a name on the hub, or a folder")
    parser.add_argument("--text_column", help="the column that holds the text; default: text, or the only one")
    parser.add_argument("--append_eos", action="store_true", help="put the end token behind each document")
    parser.add_argument("--no_keep_linebreaks", action="store_true", help="lines of text files without their ends")
    parser.add_argument("--preprocessing_num_workers", type=int, help="processes; default: one for each core")
    parser.add_argument("--overwrite_cache", action="store_true", help="tokenize again")
    return parser


def tokenize(arguments: argparse.Namespace, run: run_folder.RunFolder) -> Path:
    """Return the path of text.bin without its ending."""
    from transformers import AutoTokenizer

    from training import text as columns
    from training.token_cache import cache

    paths = columns.named(arguments.train_file)
    if not paths:
        raise JobError(f"no file {arguments.train_file!r}", "no file matches that name", "check the path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        fix = "check the name on the hub, or give a folder as the container sees it"
        raise JobError(f"cannot load the tokenizer {arguments.tokenizer_name!r}", why, fix) from error
    column = columns.column_of(columns.first_row(paths[0]), arguments.train_file, vars(arguments))
    tokens = cache.open_tokens(
        cache.Corpus(paths, column, not arguments.no_keep_linebreaks),
        tokenizer,
        run.cache,
        processes.Processes(0, 0, 1, 1, "alone"),
        end_of_document=arguments.append_eos,
        processes=arguments.preprocessing_num_workers,
        anew=arguments.overwrite_cache,
    )
    return tokens.file.prefix


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
