"""What `runner memory` says is within a tenth of the bytes of all tensors in a real step, at every stage of ZeRO."""

from pathlib import Path

import pytest
from bench.training import memory


@pytest.mark.training
def test_paper_and_real_steps_of_two_processes_agree(tmp_path: Path) -> None:
    """`python -m bench.training.memory` compares all families, both precisions, eager attention and LoRA too."""
    pytest.importorskip("torch")
    pytest.importorskip("tomllib", reason="the paper is the tool's, with Python 3.11 or newer")
    found = memory.compared(memory.few(), tmp_path, 2)
    assert len(found) == 5
    assert {row["what"]: row["parameters_off"] for row in found if row["parameters_off"]} == {}
    assert {row["what"]: row["ratio"] for row in found if not 0.9 <= row["ratio"] <= 1.1} == {}
