"""Models with random weights and text, made on the spot for a benchmark."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS_PER_TOKEN = 5  # more than the tokenizer's 3.9, so that the text is long enough


def write_model(work: Path, config: Mapping[str, Any], half: bool) -> tuple[Path, int, int]:
    """Return the folder of a model and its tokenizer, its parameters, and those of its embedding; made once."""
    folder = work / f"model-{hashlib.sha256(json.dumps([config, half]).encode()).hexdigest()[:12]}"
    facts = folder / "facts.json"
    if not facts.is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, set_seed

        tokenizer = _demo().train_tokenizer(_texts(), min(config["vocab_size"], 50257))
        shape = {key: value for key, value in config.items() if key != "model_type"}
        ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
        made = AutoConfig.for_model(config["model_type"], **shape, **ends)
        set_seed(1)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(made, **({"dtype": torch.bfloat16} if half else {}))
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        facts.write_text(json.dumps([model.num_parameters(), model.get_input_embeddings().weight.numel()]))
    parameters, embedding = json.loads(facts.read_text())
    return folder, parameters, embedding


def write_text(work: Path, tokens: int, rows: bool, longest: int) -> Path:
    """Return a folder with at least `tokens` tokens: one long document, or rows of random length up to `longest`.

    One document is cut into the same blocks by every script.
    """
    folder = work / f"text-{tokens}-{longest if rows else 'whole'}"
    if not (folder / "train.jsonl").is_file():
        folder.mkdir(exist_ok=True)
        text = "\n\n".join(_texts())
        while len(text) < tokens * CHARACTERS_PER_TOKEN:
            text += "\n\n" + text
        pieces, chance, at = [text], random.Random(7), 0
        if rows:
            pieces = []
            while at < tokens * CHARACTERS_PER_TOKEN:
                size = chance.randint(64, 3 * longest)
                pieces.append(text[at : at + size])
                at += size
        lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
        (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _texts() -> Iterator[str]:
    """Yield the text of the demo."""
    demo = _demo()
    return demo.texts(demo.read_pairs())


def _demo() -> Any:
    sys.path.insert(0, str(ROOT / "jobs"))
    from training import demo

    return demo
