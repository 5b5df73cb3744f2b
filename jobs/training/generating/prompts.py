"""What a model is asked: prompts of the command line and of files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import JobError


@dataclass(frozen=True)
class Prompt:
    """A text, or a conversation that ends with the user's turn."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def shown(self) -> str:
        return self.text or str(self.messages[-1].get("content", ""))


def read_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file: a line each, or with .jsonl an object with `prompt` or `messages` each."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"cannot read the prompts in {str(path)!r}", str(error), "a text file, or .jsonl, as this process sees it"
        ) from error
    found = [_of_line(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise JobError(f"{str(path)!r} holds no prompts", "every line of it is empty", "write one prompt per line")
    return found


def _of_line(line: str, path: Path, number: int) -> Prompt:
    if path.suffix not in (".jsonl", ".json"):
        return Prompt(line)
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise JobError(f"{path}:{number} is not JSON", str(error), "one object per line") from error
    if isinstance(entry, str):
        return Prompt(entry)
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(text, str):
        return Prompt(text)
    messages = (entry.get("messages") if isinstance(entry, dict) else None) or text
    if isinstance(messages, list) and messages and all(isinstance(each, dict) and "role" in each for each in messages):
        if messages[-1]["role"] == "assistant":  # of a training set: the answer is what is asked for
            messages = messages[:-1]
        if messages:
            return Prompt("", tuple(messages))
    raise JobError(
        f"{path}:{number} holds neither `prompt` nor `messages`",
        f"its keys are {', '.join(map(str, entry)) if isinstance(entry, dict) else 'none: it is no object'}",
        '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )
