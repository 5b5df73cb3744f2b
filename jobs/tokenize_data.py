"""Tokenize text into a token cache before training, on a node without GPUs, with all its cores.

    python jobs/tokenize_data.py --train_file 'corpus/*.jsonl' --tokenizer_name openai-community/gpt2

The arguments have the same names as those of clm. clm finds this cache if files, tokenizer and options are the same.
stdout is the folder of the cache. It contains text.bin and text.idx, which Megatron can read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training import errors, processes
from training import run as run_module
from training.errors import JobError
from training.run import RunFolder


def main(argv: Sequence[str]) -> int:
    """Create the cache unless it exists, and return 0."""
    with errors.reported("tokenize_data"):
        arguments = parser().parse_args(argv)
        run = run_module.from_environment(os.environ, "tokenize_data")
        run_module.make(run)
        run_module.point_caches(run, os.environ)
        with contextlib.redirect_stdout(sys.stderr):
            prefix = tokenize(arguments, run)
        print(prefix.parent)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenize_data.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--train_file", required=True, help="text, JSONL, Parquet or CSV; `*` matches several files")
    parser.add_argument("--tokenizer_name", required=True, help="a name on the hub, or a folder")
    parser.add_argument("--text_column", help="the column with the text; default: `text`, or the only column")
    parser.add_argument("--append_eos", action="store_true", help="put the end token after each document")
    parser.add_argument("--no_keep_linebreaks", action="store_true", help="remove the line breaks of text files")
    parser.add_argument("--preprocessing_num_workers", type=int, help="number of processes; default: one per core")
    parser.add_argument("--overwrite_cache", action="store_true", help="tokenize again despite a cache")
    return parser


def tokenize(arguments: argparse.Namespace, run: RunFolder) -> Path:
    """Return the path of text.bin without its extension."""
    from training import models, text
    from training.token_cache import cache

    workers = arguments.preprocessing_num_workers
    if workers is not None and workers < 0:
        fix = "leave it out: the default is one process per core"
        raise JobError(f"--preprocessing_num_workers cannot be {workers}", "it must be 0 or more", fix)
    paths = text.named(arguments.train_file)
    if not paths:
        raise JobError(
            f"no file matches {arguments.train_file!r}",
            "the path must exist inside the container",
            "check the path, and mount the files' folder",
        )
    tokenizer = models.load_tokenizer(arguments.tokenizer_name)
    column = text.column_of(text.first_row(paths[0]), arguments.train_file, arguments.text_column)
    tokens = cache.open_tokens(
        cache.Corpus(paths, column, not arguments.no_keep_linebreaks),
        tokenizer,
        run.cache,
        processes.ALONE,
        end_of_document=arguments.append_eos,
        workers=workers,
        rebuild=arguments.overwrite_cache,
    )
    return tokens.file.prefix


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
