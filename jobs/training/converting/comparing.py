"""Whether two models are the same: their logits for the same tokens."""

from __future__ import annotations

import math
from typing import Any

from training.errors import JobError

# Share of the largest logit by which logits may differ: rounding the weights to this type, with room.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
MERGED_TOLERANCE = 5e-5  # at least, for a merged adapter: it adds up in another order than base and adapter apart
TEXT = "The quick brown fox jumps over the lazy dog. def main(argv): return {'loss': 1.25, 'tokens': 4096}\n"
TOKENS = 64


def sample(tokenizer: Any | None, config: Any) -> Any:
    """Return tokens to compare with: int64 (1, tokens), of a text if there is a tokenizer."""
    import torch

    text = config.get_text_config()
    vocabulary, length = text.vocab_size, min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    ids = tokenizer(TEXT * 2, add_special_tokens=False)["input_ids"] if tokenizer is not None else []
    ids = [token for token in ids if token < vocabulary]
    ids = ids or [(7 + 101 * index) % vocabulary for index in range(length)]
    return torch.tensor([ids[:length]])


def logits(model: Any, tokens: Any, device: str = "cpu") -> Any:
    """Return float32 (tokens, vocabulary)."""
    import torch

    with torch.inference_mode():
        return model.to(device)(input_ids=tokens.to(device), use_cache=False).logits[0].float().cpu()


def compare(reference: Any, new: Any, tolerance: float, dtype: str) -> str:
    """Return the result in words. Raises JobError if the logits differ by more than the tolerance."""
    difference, largest = float((reference - new).abs().max()), float(reference.abs().max())
    relative = difference / largest if largest else difference
    same = float((reference.argmax(-1) == new.argmax(-1)).float().mean())
    text = (
        f"logits of the checkpoint and the new model, in float32, for {len(reference)} tokens: maximum difference"
        f" {difference:.3g} ({relative:.2g} of the largest logit, {largest:.3g}); tolerance for {dtype}: {tolerance:g};"
        f" the most likely token is the same at {same:.0%} of the positions"
    )
    if math.isnan(relative) or relative > tolerance:
        raise JobError(
            f"the converted model gives different results from the checkpoint: {text}",
            "the logits are not numbers: the training may have diverged"
            if math.isnan(relative)
            else f"the checkpoint has values that {dtype} cannot represent, or a weight is wrong",
            "use an older checkpoint; to convert it without the check: --check none"
            if math.isnan(relative)
            else "to find out which, convert with --dtype float32; to accept the difference: --tolerance SHARE",
        )
    return text
