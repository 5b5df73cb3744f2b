"""The demo's data and tokenizer are made from the running Python, once; a user's data is checked before the model."""

import dataclasses
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training import dataset, demo, processes, rows, text  # noqa: E402
from training.errors import JobError  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "made"
    demo.write(folder, vocabulary=1000)
    return folder


def test_the_corpus_is_questions_with_answers_from_the_standard_library(made: Path) -> None:
    found = [json.loads(line)["messages"] for line in (made / "python-docs.jsonl").read_text().splitlines()]
    assert len(found) > 4000
    assert {tuple(message["role"] for message in row) for row in found} == {("user", "assistant")}
    questions = {row[0]["content"] for row in found}
    assert any(question.startswith("What does `json.dump(obj, fp, *") for question in questions)
    assert any(question.startswith("Explain 'assignment'") for question in questions)
    assert not any("site-packages" in question for question in questions)


def test_the_folder_is_made_once_and_always_with_the_same_content(made: Path) -> None:
    before = (made / "python-docs.jsonl").stat().st_mtime_ns
    demo.write(made, vocabulary=1000)
    assert (made / "python-docs.jsonl").stat().st_mtime_ns == before
    again = made.with_name("again")
    demo.write(again, vocabulary=1000)
    for name in (
        "python-docs.jsonl",
        "python-docs-text.jsonl",
        "tiny-llama/tokenizer.json",
        "tiny-llama/model.safetensors",
    ):
        assert (again / name).read_bytes() == (made / name).read_bytes(), name


def test_the_text_is_that_of_the_conversations(made: Path) -> None:
    rows = [json.loads(line)["messages"] for line in (made / "python-docs.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in (made / "python-docs-text.jsonl").read_text().splitlines()]
    assert texts == [message["content"] for row in rows for message in row]


def test_the_configs_name_arguments_that_this_version_has(made: Path) -> None:
    import yaml
    from trl import ModelConfig, ScriptArguments, SFTConfig

    from training import clm_arguments

    kinds = {"sft.yaml": (ScriptArguments, SFTConfig, ModelConfig), "clm.yaml": clm_arguments.types()}
    for name, types in kinds.items():
        known = {field.name for kind in types for field in dataclasses.fields(kind)}
        values = yaml.safe_load((made / name).read_text())
        assert values.keys() <= known, name
        assert Path(values["model_name_or_path"], "config.json").is_file()
        assert values["learning_rate"] == 2e-3


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


@pytest.fixture(scope="module")
def trained(made: Path) -> "demo.PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(made / demo.MODEL))


def test_rows_lie_in_a_file_that_every_process_maps(made: Path) -> None:
    found = dataset.load(str(made / "python-docs.jsonl"), None, "train")
    assert len(found) == len((made / "python-docs.jsonl").read_text().splitlines())
    assert found.cache_files, "not in memory"


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
        rows.check(given, "x", SimpleNamespace(dataset_text_field="text", assistant_only_loss=False))
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


@pytest.mark.parametrize("script", ["sft", "clm"])
def test_a_long_download_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The other ranks wait in short collectives meanwhile, and the batch script sees no hang."""
    beats: list[float] = []

    def slow(*words: object, **named: object) -> dict[str, list[dict[str, str]]]:
        deadline = time.monotonic() + 60
        while len(beats) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"train": [{"text": "one"}]}

    monkeypatch.setattr(dataset, "load_splits", slow)
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.01)
    named: Any = SimpleNamespace(dataset_name="org/large", dataset_config=None, dataset_config_name=None)
    named.dataset_streaming = named.streaming = False
    named.text_column, named.data_percentage = None, 100

    def beat() -> None:
        beats.append(time.monotonic())

    if script == "sft":
        assert dataset.load_on_all(named, "train", processes.ALONE, beat) == [{"text": "one"}]
    else:
        model: Any = SimpleNamespace(cache_dir=None, token=None)
        training: Any = SimpleNamespace(do_train=True, do_eval=False)
        found, _ = text.find(named, model, training, processes.ALONE, beat)
        assert found is not None and found.rows == [{"text": "one"}]
    assert len(beats) >= 2


class FakeTokenizer:
    """As many tokens as there are in the model's vocabulary."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 10


def trainer_of(train_dataset: Any) -> Any:
    """What check_prepared needs of a trainer whose model has 10 tokens."""
    import torch

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, Any]:
        ids = torch.tensor([row["input_ids"] for row in batch])
        return {"input_ids": ids, "labels": ids}

    shape = SimpleNamespace(vocab_size=10, max_position_embeddings=8)
    return SimpleNamespace(
        processing_class=FakeTokenizer(),
        train_dataset=train_dataset,
        eval_dataset=None,
        data_collator=collate,
        args=SimpleNamespace(max_length=None, packing=False),
        model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: shape)),
    )


@pytest.mark.parametrize("largest", [9, 10])
def test_rows_of_tokens_may_come_from_another_tokenizer(largest: int) -> None:
    import datasets

    trainer = trainer_of(datasets.Dataset.from_dict({"input_ids": [[1, largest]]}))
    with pytest.raises(JobError, match="the rows have the token 10") if largest == 10 else nullcontext():
        rows.check_prepared(trainer, "x", 1, tokenized=True)


@pytest.mark.parametrize("largest", [9, 10])
def test_the_tokens_of_a_stream_are_checked_as_they_come(largest: int) -> None:
    """A token beyond the vocabulary would be an assertion in a kernel of the GPU, without a name."""
    import datasets

    trainer = trainer_of(datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, largest]]}).to_iterable_dataset())
    assert rows.check_prepared(trainer, "x", None) == ""
    assert trainer.data_collator([{"input_ids": [1, 2]}])["input_ids"].tolist() == [[1, 2]]
    with pytest.raises(JobError, match="the rows have the token 10") if largest == 10 else nullcontext():
        trainer.data_collator(list(trainer.train_dataset))


@pytest.mark.parametrize(
    ("tokens", "padding", "largest"), [([1, 9], 0, None), ([1, 10], 0, 10), ([1, 2], 10, 10), ([1, 2], None, None)]
)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_tokenizer_may_have_tokens_that_no_row_uses(
    tokens: list[int], padding: int | None, largest: int | None, held_out: bool
) -> None:
    """Gemma 3 with 1B parameters has one token more than its model; a token without an embedding is an error."""
    import datasets
    import torch

    class Tokenizer:
        pad_token_id = padding

        def __len__(self) -> int:
            return 11

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {"labels": torch.tensor([row["input_ids"] for row in batch])}

    these, others = (datasets.Dataset.from_dict({"input_ids": [ids]}) for ids in (tokens, [3, 4]))
    trainer = SimpleNamespace(
        processing_class=Tokenizer(),
        train_dataset=others if held_out else these,
        eval_dataset={"a": these} if held_out else None,
        data_collator=collate,
        args=SimpleNamespace(max_length=None, packing=False),
        model=SimpleNamespace(
            config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=10, max_position_embeddings=8))
        ),
    )
    if largest is None:
        assert rows.check_prepared(trainer, "x", 1) == ""
    else:
        with pytest.raises(JobError, match=f"the rows have the token {largest}, but the model's vocabulary has 10"):
            rows.check_prepared(trainer, "x", 1)
