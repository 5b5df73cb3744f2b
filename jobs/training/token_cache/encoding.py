"""Texts to ids: Hugging Face's tokenizers, or gigatoken if it gives the same ids, checked on a sample of the texts.

Runs in processes of its own that import nothing heavier than numpy: the tokenizer comes as JSON.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from training.token_cache.layout import Array

# Of each list of texts (about a megabyte), this much of the first and of the longest is encoded both ways.
SAMPLE_CHARACTERS = 8192
# What pre-tokenizers and normalizers are known to disagree on.
HARD = (
    "", " ", "  \n\n \t x", "don't I'LL we'Ve o'clock", "a1b22c333 4444 55555 3.14e-10",
    "Grüße, naïve café \u0301e\u0301",
    "世界 日本語、テスト。한국어", "🎉👩‍👩‍👧 \U0001f1e9\U0001f1ea", "\x00\x07\x7f\u00a0\u200b\u2028\ufeff",
    "\r\n\r\rx\r\n", "a" * 3000, " " * 300 + "x",
    "def f(x):\n\treturn  x  # \\ \"quoted\"\n", "ﬁ ① Ⅷ ２３ ſ",
    "https://example.org/a?b=c&d=%20", "العربية हिन्दी ไทย", "__init__ <|x|> <s> </s> [UNK]",
)  # fmt: skip


class Differs(Exception):
    """The fast back end gives other ids than Hugging Face's."""


@dataclass(frozen=True)
class TokenizerState:
    """All that decides the ids; another process makes the same tokenizer from it."""

    text: str  # tokenizer.json as it is in use, without truncation and padding
    special_tokens_as_text: bool  # `<eos>` in a text is text, not the token
    end: int | None  # this id is put behind each document that has any
    type_code: int


class Encoder(Protocol):
    name: str

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return the ids of all texts in one array, and each text's number of ids (int32)."""


class HuggingFace:
    """`tokenizers`, without the offsets, which are not needed."""

    name = "tokenizers"

    def __init__(self, state: TokenizerState) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(state.text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = state.special_tokens_as_text

    def encode(self, texts: Sequence[str], special: bool = True) -> tuple[Array, Array]:
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
        return flat(rows)


class Gigatoken:
    """gigatoken, an optional package; what a post-processor adds around a text is learned from Hugging Face's.

    Raises Differs for a tokenizer that it does not know.
    """

    name = "gigatoken"

    def __init__(self, state: TokenizerState) -> None:
        import gigatoken

        if state.special_tokens_as_text:
            raise Differs("special tokens must be encoded as text")
        self.reference = HuggingFace(state)
        try:
            self.tokenizer = gigatoken.Tokenizer.from_json(state.text)
        except Exception as error:  # of many types: what it cannot take is left to the other one
            raise Differs(f"gigatoken does not support this tokenizer: {error}") from error
        self.before, self.behind = self._surroundings()
        words = [str(token.content) for token in self.reference.tokenizer.get_added_tokens_decoder().values()][:64]
        self.check((*HARD, *words, *(f"a {word}b {word}" for word in words)))

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        ids, lengths = self._encode(texts)
        longest = max(range(len(texts)), key=lambda number: len(texts[number]))
        self.check([texts[number][:SAMPLE_CHARACTERS] for number in {0, longest}])
        return ids, lengths

    def check(self, texts: Sequence[str]) -> None:
        """Raise Differs unless both back ends give the same ids."""
        for ours, theirs in zip(self._encode(texts), self.reference.encode(texts), strict=True):
            if not np.array_equal(ours, theirs):
                raise Differs("gigatoken returns other ids than tokenizers for a sample")

    def _encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        rows = self.tokenizer.encode_batch(list(texts), parallel=False).layout
        ids, offsets = np.asarray(rows.content.data), np.asarray(rows.offsets)
        lengths = np.diff(offsets).astype("<i4")
        ids = ids[offsets[0] : offsets[-1]]
        if len(self.before) or len(self.behind):
            ids = _surround(ids, lengths, self.before, self.behind)
            lengths = lengths + np.int32(len(self.before) + len(self.behind))
        return ids, lengths

    def _surroundings(self) -> tuple[list[int], list[int]]:
        bare, whole = (list(self.reference.encode(["a"], special)[0]) for special in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        raise Differs("the tokenizer's post-processor changes ids")


def make(state: TokenizerState, back_end: str) -> Encoder:
    """Return the encoder of a back end. Raises Differs if gigatoken cannot be used."""
    return Gigatoken(state) if back_end == "gigatoken" else HuggingFace(state)


def back_ends(wanted: str) -> tuple[str, ...]:
    """Return the back ends to try in order: gigatoken only where it is installed."""
    if wanted != "auto":
        return (wanted,)
    return ("gigatoken", "tokenizers") if importlib.util.find_spec("gigatoken") else ("tokenizers",)


def flat(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return the ids of all rows in one array (uint32), and the rows' lengths (int32)."""
    lengths = np.fromiter(map(len, rows), "<i4", len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), "<u4", int(lengths.sum())), lengths


def close_documents(ids: Array, lengths: Array, end: int | None) -> tuple[Array, Array]:
    """Return the ids with the end token behind each document that has any, as Megatron does it."""
    if end is None:
        return ids, lengths
    filled = lengths > 0
    ends = np.cumsum(lengths, dtype=np.int64)[filled]
    return np.insert(ids, ends, end), lengths + filled.astype("<i4")


def _surround(ids: Array, lengths: Array, before: list[int], behind: list[int]) -> Array:
    """Return the ids with tokens before and behind each row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    places = np.stack([ends - lengths] * len(before) + [ends] * len(behind), axis=1)
    return np.insert(ids, places.ravel(), [*before, *behind] * len(lengths))
