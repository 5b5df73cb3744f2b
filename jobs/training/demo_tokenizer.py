"""A byte-level BPE tokenizer trained on the spot, with a chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from training import files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
# `generation` marks what an answer is, for TRL's assistant_only_loss.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}<|user|>\n{{ message['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build(cache: Path, texts: Iterable[str], text_key: str, vocabulary: int) -> Path:
    """Return the folder of a tokenizer trained on the texts; built once per text key, size and library versions.

    The cache is shared by runs in other images: what one version of transformers has saved, another may not read.
    """
    import tokenizers
    import transformers

    options = f"{text_key} {vocabulary} {tokenizers.__version__} {transformers.__version__} {CHAT_TEMPLATE}"
    folder = cache / f"tokenizer-{hashlib.sha256(options.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        tokenizer = train(texts, vocabulary)
        with files.whole_folder(folder) as partial:
            tokenizer.save_pretrained(str(partial))
    return folder


def train(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that gives back any text byte for byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
