"""A tiny model, its tokenizer and 64 conversations, made on the spot: what TRL's sft.py needs."""

import json
import sys
from pathlib import Path


def build(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|end|>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=template
    ).save_pretrained(folder / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, **shape)).save_pretrained(
        folder / "model"
    )
    (folder / "data").mkdir()
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!" * 9}]}
            for n in range(64)]  # fmt: skip
    for split in ("train", "test"):
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
