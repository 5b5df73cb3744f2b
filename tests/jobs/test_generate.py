"""A trained checkpoint answers; what is none is refused by name."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import Attempt  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.generating import generation  # noqa: E402


def test_the_answer_alone_goes_to_stdout(
    whole: Attempt, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import generate

    monkeypatch.setenv("RUNNER_RUN", str(whole.run))
    monkeypatch.delenv("RANK", raising=False)
    words = ["--max_new_tokens=8", "--prompt=What does `a` do?", "--prompt=Why?", "--seed=1"]
    assert generate.main(words) == 0
    first = capsys.readouterr()
    assert first.err.count("tokens in") == 2
    assert "> What does `a` do?" in first.err
    assert "What does `a` do?" not in first.out
    assert first.out.strip()
    assert generate.main(words) == 0
    assert capsys.readouterr().out == first.out, "the same seed gives the same text"


def test_the_default_is_the_final_model_of_the_run(whole: Attempt) -> None:
    final = whole.run / "checkpoints" / "final"
    assert generation.find_checkpoint(None, {"RUNNER_RUN": str(whole.run)}) == final
    assert generation.find_checkpoint(whole.run, {}) == final


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: None, "no checkpoint is named"),
        (lambda folder: folder / "none", "there is no checkpoint"),
        (lambda folder: folder, "is no Hugging Face model"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, make: object, expected: str) -> None:
    with pytest.raises(JobError) as caught:
        generation.find_checkpoint(make(tmp_path), {})  # type: ignore[operator]
    assert expected in caught.value.what


def test_a_model_whose_weights_are_cut_is_an_error_with_a_way_out(whole: Attempt, tmp_path: Path) -> None:
    for source in (whole.run / "checkpoints" / "final").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    import generate

    arguments = generate.parser().parse_args(["--max_new_tokens=1"])
    with pytest.raises(JobError, match="cannot load"):
        generation.answer(tmp_path, arguments)
