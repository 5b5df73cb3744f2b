"""Text that every Python ships: the language reference of `pydoc` and the docstrings of the standard library.

Source: CPython, licence PSF-2.0; read from the running interpreter, nothing is downloaded or copied into this project.
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
from collections.abc import Iterator
from pathlib import Path

from training import files

# Bundled third-party code, whose licences differ, and things whose text is no documentation of the library.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "__pycache__",
}
MIN_CHARACTERS, MAX_CHARACTERS = 40, 1500
RECIPE = "pairs-1"  # raise it when the rules below change: caches of the old rules are then left alone


def build(cache: Path, seed: int = 0) -> Path:
    """Return the folder with `pairs.jsonl` (one `messages` conversation per line); built once, then found again."""
    sources = tuple(_sources())
    folder = cache / f"corpus-{_key(sources, seed)}"
    if not folder.is_dir():
        pairs = [*_topics(), *_docstrings(sources)]
        random.Random(seed).shuffle(pairs)
        with files.whole_folder(folder) as partial:
            lines = (json.dumps({"messages": conversation(*pair)}, ensure_ascii=False) for pair in pairs)
            (partial / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def texts(folder: Path) -> Iterator[str]:
    """Yield the contents of all messages, for the tokenizer to learn from."""
    with (folder / "pairs.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                yield message["content"]


def _sources() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(library).parts):
            yield path


def _key(sources: tuple[Path, ...], seed: int) -> str:
    """Return a key of Python's version, the rules, and each file's name and size."""
    digest = hashlib.sha256(f"{RECIPE} {seed} {sys.version}".encode())
    for path in sources:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def _topics() -> Iterator[tuple[str, str]]:
    """Yield (question, paragraph) from the language reference; none where this Python ships without it."""
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


def _docstrings(sources: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield (question on a signature, docstring) for each documented function and class."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sources:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # a template or a file in another encoding: not ours to mend
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
    """Return the text on one line, without the marks of reStructuredText."""
    return re.sub(r"\s+", " ", re.sub(r"[*`]+|\"\"", "", text)).strip()
