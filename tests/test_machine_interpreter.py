"""Python set for streams, and as it was before, whatever happens inside."""

from __future__ import annotations

import gc
import sys

import pytest

from runner.images.importer.pack import set_for_streams


@pytest.mark.parametrize("collecting", (True, False))
def test_python_is_as_before_afterwards_whatever_happens_inside(collecting: bool) -> None:
    before = sys.getswitchinterval()
    try:
        if not collecting:
            gc.disable()
        with pytest.raises(KeyError), set_for_streams():
            assert not gc.isenabled() and sys.getswitchinterval() < before
            raise KeyError
        assert gc.isenabled() is collecting and sys.getswitchinterval() == before
    finally:
        gc.enable()
