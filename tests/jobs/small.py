"""What the trainings of the tests train on: the demo's model with few tokens, and the demo's text."""

import fcntl
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
_one_at_a_time = threading.Lock()  # transformers loads its classes lazily: two threads must not import it at once


def filled(words: Iterable[str], cache: Path) -> tuple[str, ...]:
    """Return the words with the folder's name in them; the folder is made in the cache if a word names it."""
    return tuple(word.replace(SMALL, str(small(cache))) if SMALL in word else word for word in words)


def small(cache: Path) -> Path:
    """Return the folder, made once per cache, which several processes may share."""
    cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time, (cache / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.path.insert(0, str(JOBS))
        try:
            from training import demo
        finally:
            sys.path.remove(str(JOBS))
        demo.write(cache / "small", vocabulary=512)
    return cache / "small"
