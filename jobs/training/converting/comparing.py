"""Are they the same model? The answers of both to the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from training.errors import JobError

# Share of the largest logit by which one may differ: what rounding the weights to this type brings, with room.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
# an adapter that is merged adds up in another order than base and adapter apart
LEAST_OF_MERGED = 5e-5
TEXT = "The quick brown fox jumps over the lazy dog. def main(argv): return {'loss': 1.25, 'tokens': 4096}\n"
TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    difference: float  # the largest between two logits
    largest: float  # the largest logit of the first model, without its sign
    same_choice: float  # share of the places where both like the same token best
    tokens: int

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.largest else self.difference


def sample(tokenizer: Any | None, vocabulary: int, positions: int | None) -> Any:
    """Return tokens to compare on: int64 (1, tokens), of a text where there is a tokenizer."""
    import torch

    length = min(TOKENS, positions or TOKENS)
    ids = tokenizer(TEXT * 2, add_special_tokens=False)["input_ids"] if tokenizer is not None else []
    ids = [token for token in ids if token < vocabulary]
    ids = ids or [(7 + 101 * index) % vocabulary for index in range(length)]
    return torch.tensor([ids[:length]])


def logits(model: Any, tokens: Any, device: str = "cpu") -> Any:
    """Return float32 (tokens, vocabulary)."""
    import torch

    with torch.inference_mode():
        return model.to(device)(input_ids=tokens.to(device), use_cache=False).logits[0].float().cpu()


def compare(left: Any, right: Any) -> Comparison:
    difference = float((left - right).abs().max())
    same = (left.argmax(-1) == right.argmax(-1)).float().mean()
    return Comparison(difference, float(left.abs().max()), float(same), left.shape[0])


def judge(found: Comparison, tolerance: float, dtype: str) -> str:
    """Return what to say. Raises JobError where the two differ by more than the tolerance."""
    text = (
        f"logits of both in float32, {found.tokens} tokens: maximum difference {found.difference:.3g}"
        f" = {found.relative:.2g} of the largest ({found.largest:.3g}), {tolerance:g} is tolerated for {dtype};"
        f" the same likeliest token at {found.same_choice:.0%}"
    )
    if math.isnan(found.relative) or found.relative > tolerance:
        raise JobError(
            f"the converted model answers differently: {text}",
            "the checkpoint holds values that this type cannot, or a weight has gone astray",
            "--dtype float32 tells which; --tolerance SHARE where you know better",
        )
    return text
