"""Texts that are kept as files and read whole in review."""

from pathlib import Path


def compare(path: Path, text: str, update: bool) -> None:
    """Assert that `text` is the file's; with `update` write the file instead."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: pytest --update-golden writes it"
    assert text == path.read_text(), f"differs from {path}: read the difference, then pytest --update-golden"
