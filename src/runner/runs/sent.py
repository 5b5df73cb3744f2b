"""The record in a project that `--on` has copied to this machine: its files, and what git said about the original.

With the record, a launch from the copy has the same snapshot and lock as a launch from a clone.
"""

import json
import os
from pathlib import Path

from runner.machine import files
from runner.runs.git import Git

SENT = ".runner-sent"
"""the folder of the record"""
FILES, STATE = f"{SENT}/files", f"{SENT}/state.json"
Names = tuple[tuple[str, ...], Git | None, list[tuple[str, str]], list[str]]
"""(the files of a project, its state in git, the files that are left out with the reason, notes)"""


def names_and_state(root: Path) -> Names | None:
    """What the record says; None if the project is not a copy."""
    text = files.text_of(root / STATE)
    if not text:
        return None
    state = json.loads(text)
    names = os.fsdecode(files.content(f"{root}/{FILES}")).split("\0")
    git = (
        Git(state["commit"], tuple(state["modified"]), tuple(state["untracked"]))
        if "commit" in state
        else None
    )
    return (
        tuple(filter(None, names)),
        git,
        [(name, why) for name, why in state["left_out"]],
        state["notes"],
    )
