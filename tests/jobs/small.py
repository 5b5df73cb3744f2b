"""What the trainings of the tests train on: the demo's model with few tokens, and the demo's text."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SMALL = "{small}"
"""in a command line: the folder of `small`"""
MODEL = f"{SMALL}/tiny-llama"
CONVERSATIONS = f"{SMALL}/python-docs.jsonl"
TEXTS = f"{SMALL}/python-docs-text.jsonl"
_one_at_a_time = threading.Lock()  # two threads must not import transformers: it loads its classes later, one by one


def filled(words: Iterable[str], cache: Path) -> tuple[str, ...]:
    """Return the words with the folder's name in them; the folder is made in the cache if a word names it."""
    return tuple(word.replace(SMALL, str(small(cache))) if SMALL in word else word for word in words)


def small(cache: Path) -> Path:
    """Return the folder, made once per cache."""
    with _one_at_a_time:
        sys.path.insert(0, str(JOBS))
        try:
            from training import demo
        finally:
            sys.path.remove(str(JOBS))
        demo.write(cache / "small", vocabulary=512)
    return cache / "small"
