"""The two scripts, each as it is: TRL's own `trl/scripts/sft.py`, and ours; on a model and data made on the spot.

    python -m bench.training.ways WAY MODE --model FOLDER --data FOLDER --steps N [--profile]

prints one line of JSON: CPU seconds, loss and real tokens of each step. Neither script is changed: what is counted is
counted around transformers' `Trainer.training_step`, and steps are timed by a callback that every trainer gets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODES = {
    "wrapped": ("--packing", "--packing_strategy=wrapped"),
    "default": (),
    "bfd": ("--packing", "--packing_strategy=bfd"),
    "assistant": ("--assistant_only_loss",),
}


@dataclass(frozen=True)
class Shape:
    """A model's shape; `sequences` of 256 tokens make a step."""

    kind: str
    width: int
    layers: int
    vocabulary: int
    sequences: int


SHAPES = {
    "tiny": Shape("llama", 128, 4, 8192, 8),
    "large": Shape("gpt2", 768, 12, 50257, 4),
}
LENGTH = 256


def prepare(work: Path, name: str) -> tuple[Path, Path]:
    """Return the folders of a model with its tokenizer, and of conversations; made once."""
    sys.path.insert(0, str(ROOT / "jobs"))
    from training import demo as corpus
    from training import demo_tokenizer as made_tokenizer

    docs = corpus.build(work)
    shape = SHAPES[name]
    model, data = work / f"model-{name}", work / "data"
    if not data.is_dir():
        data.mkdir()
        keep = ("messages",)
        lines = (docs / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
        rows = ({key: row[key] for key in keep} for row in map(json.loads, lines))
        (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not (model / "config.json").exists():
        from transformers import AutoTokenizer, set_seed

        folder = made_tokenizer.build(work, corpus.texts(docs), docs.name, shape.vocabulary)
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        tokenizer.save_pretrained(str(model))
        set_seed(1)
        _make(shape, tokenizer).save_pretrained(str(model))
    return model, data


def _make(shape: Shape, tokenizer: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    if shape.kind == "gpt2":
        # No dropout: two ways with the same loss must not differ by their random numbers.
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        size = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.width // 64}
        return GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocabulary, n_positions=1024, **size, **still, **ends))
    size = {"hidden_size": shape.width, "num_hidden_layers": shape.layers, "intermediate_size": 352}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=shape.vocabulary, **size, **heads, **ends, pad_token_id=1))


def write_model(work: Path, name: str, config: Mapping[str, Any], half: bool) -> tuple[Path, Path, int, int]:
    """Return folders of a model with random weights and of one long text, its parameters, and its embedding's.

    The text is one document, so that every script cuts the same rows from it.
    """
    sys.path.insert(0, str(ROOT / "jobs"))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    from training import demo as corpus
    from training import demo_tokenizer as made_tokenizer

    docs = corpus.build(work)
    text, model_folder = work / "text", work / f"model-{name}"
    if not text.is_dir():
        text.mkdir()
        whole = "\n\n".join(corpus.texts(docs))
        (text / "train.jsonl").write_text(json.dumps({"text": whole}) + "\n", encoding="utf-8")
    folder = made_tokenizer.build(work, corpus.texts(docs), docs.name, min(config["vocab_size"], 50257))
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    set_seed(1)
    shape = {key: value for key, value in config.items() if key != "model_type"}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    made = AutoConfig.for_model(config["model_type"], **shape, **ends)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(made, **({"dtype": torch.bfloat16} if half else {}))
    model.save_pretrained(str(model_folder))
    tokenizer.save_pretrained(str(model_folder))
    return model_folder, text, model.num_parameters(), model.get_input_embeddings().weight.numel()


class Meter:
    """Counts around `Trainer.training_step`; a step's CPU seconds are those from one step's end to the next's."""

    def __init__(self, profile: bool) -> None:
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.cpu: list[float] = []
        self.profile, self.profiler = profile, None

    def install(self) -> None:
        import transformers
        from transformers import trainer

        meter, stock = self, transformers.Trainer.training_step

        def training_step(self: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            meter.tokens.append(_real(inputs))
            loss = stock(self, model, inputs, *more, **named)
            meter.losses.append(float(loss))
            return loss

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                meter.start(len(meter.cpu))
                meter.began = time.process_time()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter.cpu.append(time.process_time() - meter.began)
                meter.stop()

        transformers.Trainer.training_step = training_step
        trainer.DEFAULT_CALLBACKS.append(Clock)

    def start(self, step: int) -> None:
        if self.profile and step == 2:
            from torch.profiler import ProfilerActivity, profile

            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()

    def stop(self) -> None:
        if self.profiler is not None and len(self.cpu) == 4:
            self.profiler.__exit__(None, None, None)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"losses": self.losses, "tokens": self.tokens, "cpu": self.cpu}
        if self.profiler is not None:
            found["profile"] = grouped(self.profiler)
        return found


def _real(inputs: Any) -> int:
    if "real_tokens" in inputs:
        return int(inputs["real_tokens"])
    mask = inputs.get("attention_mask")
    return int(inputs["input_ids"].numel() if mask is None else mask.sum())


GROUPS = (
    ("attention", ("scaled_dot_product", "_flash_attention", "bmm", "baddbmm")),
    ("optimizer and clipping", ("_fused_adamw", "_foreach", "adam", "linalg_vector_norm")),
    ("softmax and loss", ("softmax", "nll_loss", "cross_entropy", "logsumexp", "argmax", "gather", "exp", "topk")),
    ("matrix products", ("mm", "linear", "matmul")),
    ("embedding and places", ("embedding", "index", "scatter", "nonzero", "masked")),
    ("copies, zeros, sums", ("copy_", "zero", "fill", "cat", "clone", "contiguous", "empty", "add_", "sum")),
)


def grouped(profiler: Any) -> dict[str, float]:
    """Return milliseconds per step by kind of work, of the operators' own CPU time over the two steps watched."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::").lower()
        group = next((group for group, words in GROUPS if any(word in name for word in words)), "other")
        found[group] = found.get(group, 0.0) + event.self_cpu_time_total / 2000
    return found


def arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line, the same for both scripts."""
    return [
        f"--model_name_or_path={options.model}",
        f"--dataset_name={options.data}",
        f"--max_length={LENGTH}",
        f"--per_device_train_batch_size={options.sequences}",
        f"--max_steps={options.steps}",
        *("--learning_rate=1e-3", "--lr_scheduler_type=cosine", "--seed=7", "--save_strategy=no", "--report_to=none"),
        *("--use_cpu=true", "--bf16=false", "--optim=adamw_torch_fused", "--disable_tqdm=true"),
        *("--gradient_checkpointing=false", *_without_checkpointing(), *MODES[options.mode]),
    ]


def _without_checkpointing() -> tuple[str, ...]:
    """TRL turns it on by default, and transformers 5.23 has a second name for it."""
    import dataclasses

    from trl import SFTConfig

    known = {field.name for field in dataclasses.fields(SFTConfig)}
    return ("--activation_checkpointing=false",) if "activation_checkpointing" in known else ()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("trl", "ours"))
    parser.add_argument("mode", choices=sorted(MODES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--run", required=True, help="an empty folder")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(argv)
    words = arguments(options)
    meter = Meter(options.profile)
    meter.install()
    sys.argv = ["sft.py", *words]
    if options.way == "trl":
        from trl.scripts import sft

        sys.argv += [f"--output_dir={options.run}"]
        stock = sft.make_parser()
        sft.main(*stock.parse_args_and_config(fail_with_unknown_args=False))
    else:
        os.environ.update(RUNNER_RUN=options.run, RUNNER_CACHE=f"{options.run}/cache")
        sys.path.insert(0, str(ROOT / "jobs"))
        import sft as ours

        ours.main(words)
    print("RESULT " + json.dumps(meter.result()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
