"""The steps of transformers' example run_clm.py, in their order, written anew for comparison; none of its code is here.

By its documentation and what it is seen to do: parse the arguments into TrainingArguments; `datasets.load_dataset` of a
JSON file; config, tokenizer and a fresh model; tokenize with a batched `map`; join and cut to blocks of one length with
a second batched `map` of 1000 documents, a remainder of each batch dropped, labels a copy of the ids; Trainer with
`default_data_collator`; train. It prints one line when the first step has been taken.
"""

import sys
import time
from itertools import chain

import datasets
import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class FirstStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        print(f"first step at {time.time():.3f}", flush=True)


def main() -> None:
    train_file, model_folder, length, *words = sys.argv[1:]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    set_seed(arguments.seed)
    raw = load_dataset("json", data_files={"train": train_file})
    config = AutoConfig.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, use_fast=True)
    model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    tokenized = raw.map(
        lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=raw["train"].column_names, desc="tokenize"
    )
    size = int(length)

    def group(rows):
        joined = {name: list(chain(*rows[name])) for name in rows}
        total = len(joined["input_ids"]) // size * size
        cut = {name: [ids[at : at + size] for at in range(0, total, size)] for name, ids in joined.items()}
        cut["labels"] = cut["input_ids"].copy()
        return cut

    blocks = tokenized.map(group, batched=True, desc="group")
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks["train"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[FirstStep()],
    )
    trainer.train()
    print(f"blocks {len(blocks['train'])}", flush=True)


if __name__ == "__main__":
    main()
