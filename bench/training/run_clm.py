"""What transformers' example run_clm.py does, rewritten for comparison; none of its code is here.

By its documentation: tokenize with a batched `map`; join and cut 1,000 documents at a time to blocks of one length with
a second one, the remainder dropped, labels a copy of the ids; Trainer with `default_data_collator`. It prints a line
when the first step has been taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any


def main(words: Sequence[str]) -> None:
    """Train by those of run_clm's arguments that the benchmarks use; a model folder without weights gives new ones."""
    import datasets
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
    for name in ("model_name_or_path", "train_file", "dtype", "attn_implementation"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--block_size", type=int)
    arguments, other = parser.parse_args_into_dataclasses(list(words))
    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    set_seed(arguments.seed)
    raw = datasets.load_dataset("json", data_files=other.train_file)["train"]
    tokenizer = AutoTokenizer.from_pretrained(other.model_name_or_path)
    chosen = {name: getattr(other, name) for name in ("dtype", "attn_implementation") if getattr(other, name)}
    if any(Path(other.model_name_or_path).glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(other.model_name_or_path, **chosen)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(other.model_name_or_path), **chosen)
    ids = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=raw.column_names)

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in rows.items()}
        total = len(joined["input_ids"]) // other.block_size * other.block_size
        cut = {
            name: [values[at : at + other.block_size] for at in range(0, total, other.block_size)]
            for name, values in joined.items()
        }
        return {**cut, "labels": [list(block) for block in cut["input_ids"]]}

    class FirstStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            print("first step", flush=True)

    transformers.Trainer(
        model=model, args=arguments, train_dataset=ids.map(group, batched=True), processing_class=tokenizer,
        data_collator=transformers.default_data_collator, callbacks=[FirstStep()],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
