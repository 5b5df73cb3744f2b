"""The demo says little, and looks for torch before it builds."""

import io
from pathlib import Path

import pytest
from bench import demo

VERSION = demo.PINS.read_text().partition("torch==")[2].split()[0]


@pytest.fixture
def without_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip looks nowhere, and PyTorch's index cannot be reached."""
    for name, value in {"NO_INDEX": "1", "CONFIG_FILE": "/dev/null", "FIND_LINKS": "", "EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(demo, "TORCH_FOR_CPU", "http://127.0.0.1:1/whl/cpu")


def test_without_pytorchs_index_it_builds_with_pypis_torch_and_says_so_before(
    without_indexes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.torch_arguments() == (f"--build-arg=TORCH={VERSION.partition('+')[0]}",)
    said = capsys.readouterr().out
    assert "http://127.0.0.1:1/whl/cpu cannot be reached" in said and "3 GB" in said


def test_where_pip_finds_the_cpu_build_nothing_is_said(
    without_indexes: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"torch-{VERSION}-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert (demo.torch_arguments(), capsys.readouterr().out) == ((), "")


def test_an_excerpt_has_the_first_lines_and_every_fifth_of_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [f"[default0]:step {step:3}/100 loss {9 - step / 50:.4f} 900 tok/s\n" for step in range(1, 101)]
    last = demo.excerpt(io.StringIO("".join(["first\n", "\n", *["setting\n"] * 40, *steps, "end\n"])), 9)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "  first" and shown[1:9] == ["  setting"] * 8
    assert [line.split()[1] for line in shown[9:]] == ["1/100", "20/100", "40/100", "60/100", "80/100", "100/100"]
    assert len(last) == 30 and last[-1] == "end"
