"""A trained checkpoint answers, in whichever form it was saved; what is none is refused by name."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import STEPS, Attempt, older_step  # noqa: E402
from training import generation  # noqa: E402
from training.converting import trained  # noqa: E402
from training.errors import JobError  # noqa: E402


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_the_answer_alone_goes_to_stdout(
    whole: Attempt, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    import generate

    monkeypatch.setenv("RUNNER_RUN", str(whole.run))
    words = ["--max_new_tokens=8", "--prompt=What does `a` do?", "--prompt=Why?", "--seed=1"]
    assert generate.main(words) == 0
    first = capsys.readouterr()
    assert first.err.count("tokens in") == 2
    assert "> What does `a` do?" in first.err
    assert "What does `a` do?" not in first.out
    assert first.out.strip()
    assert generate.main(words) == 0
    assert capsys.readouterr().out == first.out, "the same seed gives the same text"


def test_a_script_that_fails_in_this_process_ends_its_test_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    import generate

    with pytest.raises(SystemExit) as caught:
        generate.main([f"--checkpoint={tmp_path}"])
    assert caught.value.code == 1
    assert "because:" in capsys.readouterr().err


def test_shards_answer_as_the_model_that_was_saved_beside_them(
    whole: Attempt, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    import generate

    checkpoint = whole.run / "checkpoints" / f"checkpoint-{STEPS}"
    words = ["--max_new_tokens=12", "--temperature=0", "--prompt=What does `a` do?", "--json"]
    answers = []
    for folder in (whole.run / "checkpoints" / "final", checkpoint, checkpoint / f"global_step{STEPS}"):
        assert generate.main([*words, f"--checkpoint={folder}"]) == 0
        said = capsys.readouterr()
        answers.append(json.loads(said.out))
    assert "ZeRO-2 of 2 processes" in said.err
    assert answers[0] == answers[1] == answers[2]
    assert set(answers[0]) == {"prompt", "answer", "tokens"}


def test_a_tag_folder_of_another_program_answers_with_the_config_and_tokenizer_of_the_named_model(
    whole: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: None
) -> None:
    """As `inference.py TAG_FOLDER --prompt … --model_name … --device … --max_new_tokens …` of the GPT-2 set-up."""
    import generate

    final, tag = whole.run / "checkpoints" / "final", tmp_path / "my_gpt2_checkpoint" / f"global_step{STEPS}"
    shutil.copytree(whole.run / "checkpoints" / f"checkpoint-{STEPS}" / tag.name, tag)
    words = ["--prompt=The future of AI is", "--device=cpu", "--max_new_tokens=8", "--temperature=0", "--plain"]
    answers = []
    for named in ([str(tag)], [str(tag.parent)], [f"--checkpoint={final}"]):
        assert generate.main([*named, *words, f"--model_name={final}"]) == 0
        answers.append(capsys.readouterr())
    assert "ZeRO-2 of 2 processes" in answers[0].err
    assert answers[0].out == answers[1].out == answers[2].out != "\n"
    with pytest.raises(SystemExit):
        generate.main([str(tag), *words])
    assert "there is no config.json for the shards" in (said := capsys.readouterr().err) and "--model_name" in said
    with pytest.raises(SystemExit):
        generate.main([str(tag), f"--checkpoint={final}"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_default_is_the_final_model_of_the_run_and_before_its_end_the_newest_checkpoint(
    whole: Attempt, tmp_path: Path
) -> None:
    final = str(whole.run / "checkpoints" / "final")
    assert trained.find(None, {"RUNNER_RUN": str(whole.run)}).weights == final
    assert trained.find(whole.run, {}).weights == final
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    shutil.rmtree(run / "checkpoints" / "final")
    (run / "checkpoints" / f"checkpoint-{STEPS}" / "complete.json").unlink()
    found = trained.find(run, {})
    assert found.weights == str(run / "checkpoints" / f"checkpoint-{older_step(run)}")
    assert f"checkpoint-{STEPS}" in found.notes[0], "the one that was passed over is named"


def test_a_run_with_another_output_dir_is_found_by_its_folder(whole: Attempt, tmp_path: Path) -> None:
    """As with CHECKPOINT_DIR of the GPT-2 job."""
    shutil.copytree(whole.run / "checkpoints" / "final", tmp_path / "elsewhere" / "final")
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.json").write_text(json.dumps({"output_dir": {"value": str(tmp_path / "elsewhere")}}))
    assert trained.find(run, {}).weights == str(tmp_path / "elsewhere" / "final")
    (run / "settings.json").write_text("[]")
    with pytest.raises(JobError, match="is neither a Hugging Face model nor a DeepSpeed checkpoint"):
        trained.find(run, {})


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: None, "no checkpoint is given"),
        (lambda folder: folder / "none", "no checkpoint '"),
        (lambda folder: folder, "is neither a Hugging Face model nor a DeepSpeed checkpoint"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, make: object, expected: str) -> None:
    with pytest.raises(JobError) as caught:
        trained.find(make(tmp_path), {})  # type: ignore[operator]
    assert expected in caught.value.what


def test_a_model_whose_weights_are_cut_is_an_error_with_a_way_out(whole: Attempt, tmp_path: Path) -> None:
    for source in (whole.run / "checkpoints" / "final").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    import generate

    arguments = generate.parser().parse_args(["--max_new_tokens=1"])
    with pytest.raises(JobError, match="cannot load"):
        generation.answer(trained.find(tmp_path, {}), arguments)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max_new_tokens=5000"], "too long for the model"),
        (["--prompts_file=/nowhere/asked.txt"], "cannot read the prompts"),
    ],
)
def test_bad_input_is_one_clear_error(whole: Attempt, words: list[str], said: str) -> None:
    import generate

    arguments = generate.parser().parse_args(words)
    with pytest.raises(JobError) as caught:
        generation.answer(trained.find(whole.run, {}), arguments)
    assert said in caught.value.what


def test_a_file_of_prompts_is_lines_or_objects(tmp_path: Path) -> None:
    text = tmp_path / "asked.txt"
    text.write_text("one\n\n  two words\n")
    assert [each.text for each in generation.read_file(text)] == ["one", "  two words"]
    lines = tmp_path / "asked.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines.write_text("\n".join(map(json.dumps, ({"prompt": "p"}, {"messages": turns}, {"prompt": turns[:1]}))))
    assert [each.text for each in generation.read_file(lines)] == ["p", "q", "q"]
    assert all(each.messages == tuple(turns[:1]) for each in generation.read_file(lines)[1:])
    lines.write_text(json.dumps({"prompt": "one\u2028two\x85"}, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    assert [each.text for each in generation.read_file(lines)] == ["one\u2028two\x85"]


@pytest.mark.parametrize("line", ['{"text": 1}', "[1]", "{", '{"messages": []}'])
def test_a_bad_line_of_prompts_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(JobError, match=r"asked\.jsonl:2 "):
        generation.read_file(path)
