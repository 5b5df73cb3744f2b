"""What every rank imports, imported once: ranks are forked from a process that has done it (see attempts.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

import transformers  # noqa: F401
import trl  # noqa: F401

import sft  # noqa: F401
from training import checkpoints, job, sft_trainer  # noqa: F401
