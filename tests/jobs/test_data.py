"""The demo's data and tokenizer are made from the running Python, once; a user's data is checked before the model."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training import dataset, demo, rows  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.processes import Processes  # noqa: E402
from training.settings import Settings  # noqa: E402

ALONE = Processes(0, 0, 1, 1, "alone")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build(tmp_path_factory.mktemp("corpus"))


def test_the_corpus_is_questions_with_answers_from_the_standard_library(made: Path) -> None:
    found = [json.loads(line)["messages"] for line in (made / "pairs.jsonl").read_text().splitlines()]
    assert len(found) > 4000
    assert {tuple(message["role"] for message in row) for row in found} == {("user", "assistant")}
    questions = {row[0]["content"] for row in found}
    assert any(question.startswith("What does `json.dump(obj, fp, *") for question in questions)
    assert any(question.startswith("Explain 'assignment'") for question in questions)
    assert not any("site-packages" in question for question in questions)


def test_the_corpus_is_found_again_and_another_seed_has_its_own(made: Path) -> None:
    before = (made / "pairs.jsonl").stat().st_mtime_ns
    assert demo.build(made.parent) == made
    assert (made / "pairs.jsonl").stat().st_mtime_ns == before
    other = demo.build(made.parent, seed=1)
    assert other != made
    assert sorted((other / "pairs.jsonl").read_text().splitlines()) == sorted(
        (made / "pairs.jsonl").read_text().splitlines()
    )


@pytest.mark.parametrize(
    "text", ["plain words", "tab\tand\nnewline", "Grüße, 世界 🎉", "\x00\x7f", "  spaces  ", "don't , do"]
)
def test_the_tokenizer_gives_back_any_text(trained: "demo.PreTrainedTokenizerFast", text: str) -> None:
    assert trained.decode(trained(text)["input_ids"]) == text


def test_the_chat_template_marks_the_answer_and_its_end(trained: "demo.PreTrainedTokenizerFast") -> None:
    encoded = trained.apply_chat_template(
        demo.conversation("Why?", "Because."), return_dict=True, return_assistant_tokens_mask=True
    )
    answer = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert trained.decode(answer) == "Because.<|end|>"


def test_the_tokenizer_is_trained_once_per_text_and_size(made: Path) -> None:
    folders = [demo.build_tokenizer(made.parent, demo.texts(made), made.name, size) for size in (300, 300, 400)]
    assert folders[0] == folders[1] != folders[2]


@pytest.fixture(scope="module")
def trained(made: Path) -> "demo.PreTrainedTokenizerFast":
    return demo.train_tokenizer(demo.texts(made), 1000)


def test_all_ranks_map_the_same_rows(made: Path) -> None:
    found, folder = demo.python_docs(made.parent, ALONE)
    assert folder == made
    assert len(found) == len((made / "pairs.jsonl").read_text().splitlines())
    assert found.cache_files, "rows lie in a file that every process maps, not in memory"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
        ({"text": "a"}, "text"),
        ({"input_ids": [1]}, "tokens"),
    ],
)
def test_kinds_of_data(row: dict[str, object], kind: str) -> None:
    assert rows.kind_of([row], "x", "text") == kind


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "is empty"),
        ([{"txt": "a"}], "no column to train on (did you mean 'txt'?)"),
        ([{"messages": "hello"}], "is not a conversation"),
        ([{"messages": [{"speaker": "x"}]}], "is not a conversation"),
        ([{"text": 3}], "is not text"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(given: list[dict[str, object]], expected: str) -> None:
    with pytest.raises(JobError) as caught:
        rows.check(given, "x", Settings({"dataset_text_field": "text"}, {}))
    assert expected in caught.value.what


def test_files_are_read_by_their_ending(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert dataset.load(str(tmp_path / "a.jsonl"), None, "train", streaming=False)["text"] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "split", "expected"),
    [
        ("a.jsonl", '{"text": "one"}\n', "test", "has no split 'test'"),
        ("a.jsonl", "", "train", "is empty"),
        ("a.jsonl", "{broken\n", "train", "cannot load"),
        ("a.docx", "x", "train", "cannot read"),
    ],
)
def test_data_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, split: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(JobError) as caught:
        dataset.load(str(tmp_path / name), None, split, streaming=False)
    assert expected in caught.value.what
