"""What every rank imports, imported once: ranks are forked from a process that has done it (see attempts.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

import sft  # noqa: F401
from training import course  # noqa: F401
from training import sft_story as supervised  # noqa: F401
