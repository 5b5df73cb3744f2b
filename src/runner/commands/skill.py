"""skill: what a coding agent must know to use runner."""

from __future__ import annotations

import argparse
from pathlib import Path

from runner.commands.console import Console
from runner.project import page


def print_skill(args: argparse.Namespace, console: Console) -> int:
    """`runner skill`: print SKILL.md, a text for coding agents."""
    text = Path(__file__).parents[1].joinpath("SKILL.md").read_text(encoding="utf-8")
    console.answer(text.replace("docs/json-output.md", str(page("json-output"))))
    return 0
