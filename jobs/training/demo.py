"""The demo: a tiny Llama, a tokenizer and text, all made on the spot from the documentation that every Python ships.

Source of the text: CPython, licence PSF-2.0. It is read from the running interpreter; nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import files
from training.processes import Processes, once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Third-party code, which has other licences, and modules without documentation of the library.
SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__")
)
MIN_CHARACTERS, MAX_CHARACTERS = 40, 1500
RECIPE = "pairs-1"  # change it with the rules below: caches made by the old rules are then not used
END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
# `generation` marks the answer, for TRL's assistant_only_loss.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}<|user|>\n{{ message['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build(cache: Path, seed: int = 0) -> Path:
    """Return the folder with `pairs.jsonl`, one conversation per line; made once per Python and rules."""
    key = hashlib.sha256(f"{RECIPE} {seed} {sys.version} {sysconfig.get_paths()['stdlib']}".encode()).hexdigest()
    folder = cache / f"corpus-{key[:12]}"
    if not folder.is_dir():
        pairs = [*_topics(), *_docstrings()]
        random.Random(seed).shuffle(pairs)
        with files.whole_folder(folder) as partial:
            lines = (json.dumps({"messages": conversation(*pair)}, ensure_ascii=False) for pair in pairs)
            (partial / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def texts(folder: Path) -> Iterator[str]:
    """Yield the contents of all messages."""
    with (folder / "pairs.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                yield message["content"]


def _sources() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(library).parts):
            yield path


def _topics() -> Iterator[tuple[str, str]]:
    """Yield (question, paragraph) of the language reference; some Pythons come without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        paragraphs = [_tidy(part) for part in re.split(r"\n\s*\n", topics[name])]
        prose = [part for part in paragraphs if len(part) >= MIN_CHARACTERS and part[0].isupper() and part[-1] in ".:"]
        for number, part in enumerate(prose):
            ask = f"Explain {name!r} in Python." if number == 0 else f"Explain {name!r} in Python, part {number + 1}."
            yield ask, part[:MAX_CHARACTERS]


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield (question on a signature, docstring) for each documented function and class."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in _sources():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # a template, or a file in another encoding
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        for signature, docstring in _documented(tree, module):
            answer = _tidy(inspect.cleandoc(docstring).split("\n\n")[0])
            if len(answer) >= MIN_CHARACTERS and answer not in seen:
                seen.add(answer)
                yield f"What does `{signature}` do?", answer[:MAX_CHARACTERS]


def _documented(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}"
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                arguments = "" if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
                yield f"{name}({arguments})", docstring
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, name)


def _tidy(text: str) -> str:
    """Return the text on one line, without reStructuredText markup."""
    return re.sub(r"\s+", " ", re.sub(r"[*`]+|\"\"", "", text)).strip()


def build_tokenizer(cache: Path, texts: Iterable[str], text_key: str, vocabulary: int) -> Path:
    """Return the folder of a tokenizer trained on the texts; made once per text key, size and library versions.

    Runs in other images share the cache, and one version of transformers may not read what another has saved.
    """
    import tokenizers
    import transformers

    options = f"{text_key} {vocabulary} {tokenizers.__version__} {transformers.__version__} {CHAT_TEMPLATE}"
    folder = cache / f"tokenizer-{hashlib.sha256(options.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        tokenizer = train_tokenizer(texts, vocabulary)
        with files.whole_folder(folder) as partial:
            tokenizer.save_pretrained(str(partial))
    return folder


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: it decodes any text to the same bytes."""
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


def python_docs(cache: Path, processes: Processes) -> tuple[Any, Path]:
    """Return the demo's dataset and the folder of its text; rank 0 makes it, and all ranks map the same file."""
    import datasets

    def load() -> Any:
        return datasets.Dataset.from_json(str(folder / "pairs.jsonl"), cache_dir=str(cache / "datasets"))

    folder = once(processes, lambda: build(cache))
    once(processes, lambda: load() and None)
    return load(), folder


def text_file(cache: Path, processes: Processes) -> Path:
    """Return a JSONL file with one question or answer per row."""
    folder = python_docs(cache, processes)[1]
    path = folder / "texts.jsonl"

    def write() -> None:
        if not path.is_file():
            files.write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts(folder)))

    once(processes, write)
    return path


def load_tokenizer(cache: Path, vocabulary: int, processes: Processes) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the tiny model; rank 0 trains it."""
    from transformers import AutoTokenizer

    folder = python_docs(cache, processes)[1]
    path = once(processes, lambda: build_tokenizer(cache, texts(folder), folder.name, vocabulary))
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    return made


def tiny_llama(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> PreTrainedModel:
    """Return a Llama of about 3 million random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(length, 512),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
