"""The demo: a folder with a tiny Llama, its tokenizer, text, and a config that trains the one on the other.

Everything is made on the spot from the documentation that every Python ships; nothing is downloaded. Source of the
text: CPython, licence PSF-2.0, read from the running interpreter.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from training.job import Job

MODEL, CONVERSATIONS, TEXTS = "tiny-llama", "python-docs.jsonl", "python-docs-text.jsonl"
VOCABULARY = 8192
SEED = 42
# Minutes on a laptop.
COMMON: Mapping[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 100,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "logging_steps": 1,
    "deepspeed": "zero2",
}
SFT = {
    "max_length": 128,
    "packing": True,
    "packing_strategy": "wrapped",
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}
CLM = {"append_eos": True, "block_size": 128}
# Third-party code, which has other licences, and modules without documentation of the library.
SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__")
)
MIN_CHARACTERS, MAX_CHARACTERS = 40, 1500
RECIPE = "demo-1"  # change it with the rules below: folders made by the old rules are then not used
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


def config(job: Job) -> Path:
    """Return the config of the demo for the job's script, once its folder is there."""
    folder = job.run.cache / f"demo-{_key(VOCABULARY)}"
    if job.processes.local_rank == 0:
        write(folder)
    while not folder.is_dir():  # there is no process group yet, whose barrier would do
        time.sleep(0.2)
    return folder / f"{job.script}.yaml"


def write(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Make the folder with model, data and configs unless it exists. `vocabulary`: the most tokens of the model."""
    if folder.is_dir():
        return
    pairs = read_pairs()
    tokenizer = train_tokenizer(texts(pairs), vocabulary)
    with files.whole_folder(folder) as partial:
        tiny_llama(tokenizer).save_pretrained(str(partial / MODEL))
        tokenizer.save_pretrained(str(partial / MODEL))
        _write_lines(partial / CONVERSATIONS, ({"messages": conversation(*pair)} for pair in pairs))
        _write_lines(partial / TEXTS, ({"text": text} for text in texts(pairs)))
        model = {"model_name_or_path": str(folder / MODEL)}
        _write_config(partial / "sft.yaml", {**model, "dataset_name": str(folder / CONVERSATIONS), **COMMON, **SFT})
        _write_config(partial / "clm.yaml", {**model, "train_file": str(folder / TEXTS), **COMMON, **CLM})


def _key(vocabulary: int) -> str:
    """Return what the demo depends on, as a hash: one version of a library may not read what another has saved."""
    import tokenizers
    import transformers

    versions = f"{sys.version} {tokenizers.__version__} {transformers.__version__}"
    options = f"{RECIPE} {vocabulary} {versions} {sysconfig.get_paths()['stdlib']} {CHAT_TEMPLATE} {COMMON} {SFT} {CLM}"
    return hashlib.sha256(options.encode()).hexdigest()[:12]


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write YAML, of which JSON is a part; transformers before 5.23 does not have activation_checkpointing."""
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    left_out = {"activation_checkpointing"} - known
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in values.items() if name not in left_out]
    path.write_text("".join(lines), encoding="utf-8")


def read_pairs() -> list[tuple[str, str]]:
    """Return questions and answers, in an order that is always the same."""
    pairs = [*_topics(), *_docstrings()]
    random.Random(0).shuffle(pairs)
    return pairs


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def texts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the questions and the answers."""
    for question, answer in pairs:
        yield question
        yield answer


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


def tiny_llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a Llama of about 3 million random weights, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
