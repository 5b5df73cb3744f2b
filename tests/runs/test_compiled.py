"""The batch template's byte code is kept between calls, is never out of date, and is never needed."""

import sys
from collections.abc import Mapping
from pathlib import Path

import jinja2
import pytest

from runner.runs.schedulers import template

ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a template; byte code may be kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "x.j2").write_text("a {{ name }}")
    return tmp_path


def render(place: Path, environ: Mapping[str, str] | None = None) -> str:
    home = {"XDG_CACHE_HOME": str(place / "cache")} if environ is None else environ
    return template.template(place / "x.j2", ENVIRONMENT, home).render(name="b")


def kept(place: Path) -> list[Path]:
    return sorted((place / "cache/runner/templates").glob("*"))


def test_the_second_call_compiles_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert render(place) == "a b"
    monkeypatch.setattr(ENVIRONMENT, "compile", lambda *words: pytest.fail("compiled again"))
    assert render(place) == "a b"
    assert len(kept(place)) == 1


def test_another_text_has_another_file(place: Path) -> None:
    render(place)
    (place / "x.j2").write_text("c {{ name }}")
    assert render(place) == "c b"
    assert len(kept(place)) == 2


@pytest.mark.parametrize("content", [b"", b"damaged", b"i\x01\x00\x00\x00"], ids=["empty", "no byte code", "a number"])
def test_a_damaged_file_is_made_again(place: Path, content: bytes) -> None:
    render(place)
    (file,) = kept(place)
    whole = file.read_bytes()
    file.write_bytes(content)
    assert render(place) == "a b"
    assert file.read_bytes() == whole


def test_where_nothing_can_be_kept_it_is_compiled_each_time(place: Path) -> None:
    (place / "cache").write_text("a file where the folder should be")
    assert render(place) == "a b"
    assert render(place, {"HOME": "/proc"}) == "a b"


def test_without_byte_code_nothing_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONDONTWRITEBYTECODE counts here as for Python's own."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert render(place) == "a b"
    assert kept(place) == []
