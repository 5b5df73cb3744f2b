"""Texts to ids: Hugging Face's tokenizers, or gigatoken if it gives the same ids, checked on a sample of the texts.

Runs in processes of its own that import nothing heavier than numpy: the tokenizer comes as JSON.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from training.token_cache.layout import Array

# Of each list of texts (some megabytes), this much of the first and of the longest is encoded both ways.
SAMPLE_CHARACTERS = 1024
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
    sentencepiece: bytes = b""  # a model of SentencePiece, in place of `text`


class Encoder(Protocol):
    name: str
    tokenizer: Any

    def encode(self, texts: Sequence[str], special: bool = True) -> list[Array]:
        """Return the ids of each text."""


class HuggingFace:
    """`tokenizers`, without the offsets, which are not needed."""

    name = "tokenizers"

    def __init__(self, state: TokenizerState) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(state.text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = state.special_tokens_as_text

    def encode(self, texts: Sequence[str], special: bool = True) -> list[Array]:
        made = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [np.array(encoding.ids, "<u4") for encoding in made]


class SentencePiece:
    """`sentencepiece`, for models that have no tokenizer.json."""

    name = "sentencepiece"

    def __init__(self, state: TokenizerState) -> None:
        from sentencepiece import SentencePieceProcessor

        self.tokenizer = SentencePieceProcessor(model_proto=state.sentencepiece)

    def encode(self, texts: Sequence[str], special: bool = True) -> list[Array]:
        return [np.array(ids, "<u4") for ids in self.tokenizer.encode(list(texts), num_threads=1)]


class Gigatoken:
    """gigatoken, an optional package; what a post-processor adds around a text is learned from the reference.

    Raises Differs for a tokenizer that it does not know.
    """

    name = "gigatoken"

    def __init__(self, state: TokenizerState) -> None:
        import gigatoken

        if state.special_tokens_as_text:
            raise Differs("special tokens must be encoded as text")
        self.reference = make(state, "tokenizers")
        load = gigatoken.Tokenizer.from_sentencepiece if state.sentencepiece else gigatoken.Tokenizer.from_json
        try:
            self.tokenizer = load(state.sentencepiece or state.text)
        except Exception as error:  # of many types: what it cannot take is left to the other one
            raise Differs(f"gigatoken does not support this tokenizer: {error}") from error
        self.before, self.behind = self._surroundings()
        words = []
        if not state.sentencepiece:
            added = self.reference.tokenizer.get_added_tokens_decoder().values()
            words = [str(token.content) for token in added][:64]
        self.check((*HARD, *words, *(f"a {word}b {word}" for word in words)))

    def encode(self, texts: Sequence[str], special: bool = True) -> list[Array]:
        rows = self._encode(texts)
        longest = max(range(len(texts)), key=lambda number: len(texts[number]))
        self.check([texts[number][:SAMPLE_CHARACTERS] for number in {0, longest}])
        return rows

    def check(self, texts: Sequence[str]) -> None:
        """Raise Differs unless both back ends give the same ids."""
        if not all(map(np.array_equal, self._encode(texts), self.reference.encode(texts))):
            raise Differs(f"gigatoken returns other ids than {self.reference.name} for a sample")

    def _encode(self, texts: Sequence[str]) -> list[Array]:
        # one call for each text, because encode_batch needs the package awkward, which takes half a second to import
        rows = map(self.tokenizer.backend.encode, texts)
        if len(self.before) or len(self.behind):
            return [np.concatenate((self.before, row, self.behind)) for row in rows]
        return list(rows)

    def _surroundings(self) -> tuple[Array, Array]:
        (bare,), (whole,) = (self.reference.encode(["a"], special) for special in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if np.array_equal(whole[start : start + len(bare)], bare):
                return whole[:start], whole[start + len(bare) :]
        raise Differs("the tokenizer's post-processor changes ids")


def make(state: TokenizerState, back_end: str) -> Encoder:
    """Return the encoder of a back end. Raises Differs if gigatoken cannot be used."""
    if back_end == "gigatoken":
        return Gigatoken(state)
    return SentencePiece(state) if state.sentencepiece else HuggingFace(state)


def back_ends(wanted: str) -> tuple[str, ...]:
    """Return the back ends to try in order: gigatoken only where it is installed."""
    if wanted != "auto":
        return (wanted,)
    return ("gigatoken", "tokenizers") if importlib.util.find_spec("gigatoken") else ("tokenizers",)


def encode_documents(
    encoder: Encoder, values: Sequence[str | list[str]], end: int | None, dtype: str
) -> tuple[Array, Array, Array]:
    """Return ids of a type, the lengths of the sequences that have any, and each document's number of these (int32).

    A list of texts is a document of several sequences. The end token follows the last sequence of each document that
    has any, as Megatron does it.
    """
    texts: Sequence[Any] = values
    document: Array = np.arange(len(values))
    if not all(map(str.__instancecheck__, values)):
        lists = [[value] if isinstance(value, str) else value for value in values]
        texts = list(itertools.chain.from_iterable(lists))
        document = np.repeat(document, np.fromiter(map(len, lists), "<i8", len(lists)))
    rows = encoder.encode(texts) if texts else []
    lengths = np.fromiter(map(len, rows), "<i4", len(rows))
    filled = lengths > 0
    rows, lengths, document = list(itertools.compress(rows, filled.tolist())), lengths[filled], document[filled]
    counts = np.bincount(document, minlength=len(values)).astype("<i4")
    if end is not None and rows:
        last = np.append(document[1:] != document[:-1], True)
        lengths = lengths + last.astype("<i4")
        tails = (np.array([], "<u4"), np.array([end], "<u4"))
        rows = [part for row, closes in zip(rows, last.tolist(), strict=True) for part in (row, tails[closes])]
    ids = np.concatenate(rows, dtype=dtype, casting="unsafe") if rows else np.array([], dtype)
    return ids, lengths, counts
