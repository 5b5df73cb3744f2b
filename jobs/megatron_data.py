"""Convert text to Megatron's .bin and .idx files, with the arguments of Megatron-LM's tools/preprocess_data.py.

    python jobs/megatron_data.py --input 'corpus/*.jsonl' --output-prefix data/gpt2 --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

When all parts are complete, stdout is one prefix per key, as `--data-path` of pretrain_gpt.py takes it. Documents keep
the order of the files, which are sorted by name, and of their lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training import errors
from training import run as run_module
from training.errors import JobError

NOT_HERE = {
    "split_sentences": ("the documents of GPT are not split into sentences", "leave out {}; BERT and T5 need Megatron's"
                        " own tools/preprocess_data.py"),
    "find_optimal_num_workers": ("one process per core is always the optimum", "leave out {}"),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Write the files unless they exist, and return 0."""
    with errors.reported("megatron_data"):
        arguments = parser().parse_args(argv)
        check(arguments)
        run_module.point_caches(run_module.from_environment(os.environ, "megatron_data"), os.environ)
        from training import hub_files
        from training.token_cache import pairs, tokenizers_of_megatron

        arguments.input = [hub_files.local(word) for word in arguments.input]
        for name in ("vocab_file", "merge_file", "tokenizer_model"):
            setattr(arguments, name, hub_files.local(getattr(arguments, name)))
        paths = pairs.named(arguments.input)
        state = tokenizers_of_megatron.load(arguments)
        job = pairs.Job(
            arguments.output_prefix.absolute(), tuple(arguments.json_keys), paths, state, arguments.partitions
        )
        with contextlib.redirect_stdout(sys.stderr):
            workers = arguments.workers or len(os.sched_getaffinity(0))
            complete = pairs.make(job, arguments.partition, workers, Progress(arguments))
        for key in arguments.json_keys if complete else ():
            print(pairs.prefix(job.prefix, key))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_data.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add(
        "--input",
        required=True,
        nargs="+",
        help="JSON lines: .jsonl or .json, also .gz, .xz, .zst; `*` matches several",
    )
    add("--json-keys", nargs="+", default=["text"], help="keys of a line to tokenize, each into its own files")
    add("--output-prefix", type=Path, required=True, help="write OUTPUT_PREFIX_KEY_document.bin and .idx")
    add(
        "--tokenizer-type",
        required=True,
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"),
    )
    add(
        "--tokenizer-model", help="HuggingFaceTokenizer: a folder, or a name on the hub; SentencePieceTokenizer: a file"
    )
    add("--vocab-file", help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", help="GPT2BPETokenizer: merges.txt")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true", help="do not add tokens such as <s>")
    add("--append-eod", action="store_true", help="add the end token to each document that is not empty")
    add("--workers", type=int, help="number of processes; default: one per core")
    add("--partitions", type=int, default=1, help="number of parts; finished parts survive an interruption")
    add("--partition", type=int, help="make only this part, from 0; the task that finishes last joins the parts")
    add("--keep-sequential-samples", action="store_true", help="no effect: the order of the input is always kept")
    add("--log-interval", type=int, default=1000, help="print the speed every N documents")
    add("--use-gigatoken", action="store_true", help="no effect: gigatoken is used if it gives the same ids")
    for name in NOT_HERE:
        add(f"--{name.replace('_', '-')}", action="store_true", help=argparse.SUPPRESS)
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Raise JobError for arguments that cannot be used."""
    for name, (why, fix) in NOT_HERE.items():
        if getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise JobError(f"{flag} cannot be used", why, fix.format(flag))
    for name in ("workers", "partitions", "log_interval"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise JobError(
                f"--{name.replace('_', '-')} {value} cannot be used", "it must be 1 or more", "give a larger number"
            )
    if arguments.partition is not None and not 0 <= arguments.partition < arguments.partitions:
        raise JobError(
            f"there is no part {arguments.partition}",
            f"--partitions {arguments.partitions} makes the parts 0 to {arguments.partitions - 1}",
            "give all tasks the same --partitions N, and each its own --partition, from 0 to N-1",
        )
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        raise JobError("--json-keys names a key twice", "each key gets its own files", "give each key once")


class Progress:
    """Prints documents and MB per second (MiB, as Megatron's tool counts them)."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.interval, self.documents, self.size_bytes, self.printed = arguments.log_interval, 0, 0, 0
        self.started = time.monotonic()

    def __call__(self, documents: int, size_bytes: int) -> None:
        self.documents, self.size_bytes = self.documents + documents, self.size_bytes + size_bytes
        if self.documents - self.printed < self.interval:
            return
        self.printed = self.documents - self.documents % self.interval
        seconds = max(time.monotonic() - self.started, 1e-6)
        speed = f"{self.documents / seconds:.1f} docs/s, {self.size_bytes / seconds / 2**20:.2f} MB/s"
        print(f"Processed {self.documents} documents ({speed}).", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
