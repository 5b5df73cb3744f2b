"""Any stack of layers, flattened from the top down, is what a dictionary holds after all from the bottom up."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from tests.images.handmade import layer
from tests.images.layer_builder import flattened, listing
from tests.images.model import Unsure, expected

EXAMPLES = int(os.environ.get("RUNNER_EXAMPLES", "500"))
PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from("ddffffllhhhpwwwo")


@st.composite
def stacks(draw: st.DrawFn) -> list[list[tuple[str, str, str, int]]]:
    number = 0
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        operations = []
        for _ in range(draw(st.integers(0, 7))):
            number += 1
            kind, path = draw(KINDS), draw(PATHS)
            if kind in "do" and draw(st.integers(0, 9)) == 0:
                path = ""
            # symlinks lead nowhere: those of the same layer would be followed, and the model does not
            text = {"f": f"content {number}", "l": f"nowhere-{number}"}.get(kind, "")
            operations.append((kind, path, draw(PATHS) if kind == "h" else text, number + 0o100))
        layers.append(operations)
    return layers


def below_own_symlink(operations) -> bool:
    links = {path for kind, path, *_ in operations if kind == "l"}
    for _ in operations:
        links |= {path for kind, path, text, _ in operations if kind == "h" and text in links}
    places = {path for _, path, *_ in operations} | {text for kind, _, text, _ in operations if kind == "h"}
    return any(place.startswith(link + "/") for link in links for place in places)


def contradicts_itself(operations) -> bool:
    """A path with something in it that is also a file, twice changed, and marked: which marks count is not said."""
    marked = {path if kind == "o" else path.rpartition("/")[0] for kind, path, *_ in operations if kind in "wo"}
    files = {path for kind, path, *_ in operations if kind not in "dwo"}
    return any(mark == file or mark.startswith(file + "/") for mark in marked for file in files)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(stacks())
@example(  # a file of a lower layer at the place of an opaque directory, and a link to it
    [
        [("f", "a", "content 1", 65), ("h", "b", "a", 66), ("h", "a", "b", 67)],
        [("d", "", "", 68), ("o", "b", "", 69), ("f", "b/a", "content 6", 70)],
    ]
)
@example(  # a hidden link to itself, which is not what another link means
    [
        [("h", "b/a/b", "b/a/b", 65), ("h", "a", "b/a/b", 66), ("f", "b/a/b", "content 3", 67)],
        [("f", "b", "content 4", 68)],
    ]
)
def test_top_down_is_bottom_up(layers) -> None:
    assume(not any(below_own_symlink(operations) or contradicts_itself(operations) for operations in layers))
    try:
        want = expected(layers)
    except Unsure:
        assume(False)
    tars = [layer(operations) for operations in layers]
    if want is None:
        with pytest.raises(RunnerError):
            flattened(tars)
    else:
        assert listing(flattened(tars)) == want
