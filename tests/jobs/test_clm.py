"""Two processes train a GPT-2 from scratch on a file, stop when asked, go on exactly, and say the perplexity."""

import json
import math
import re
import urllib.request
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.training

from accelerate.data_loader import BatchSamplerShard  # noqa: E402
from torch.utils.data import BatchSampler  # noqa: E402
from transformers import Trainer  # noqa: E402

from tests.jobs import small  # noqa: E402
from tests.jobs.conftest import Attempt, Launcher  # noqa: E402
from tests.jobs.hub import serving  # noqa: E402
from tests.jobs.test_sft import wait_for_step  # noqa: E402
from training import demo  # noqa: E402
from training.blocks import Stream  # noqa: E402
from training.perplexity import ROW, BlockTrainer, perplexity  # noqa: E402
from training.processes import Processes  # noqa: E402
from training.text import Text  # noqa: E402
from training.token_cache import cache  # noqa: E402

ALONE = Processes(0, 0, 1, 1, "alone")
STEPS = 8
SMALL = (
    *("--model_type=gpt2", "--config_overrides=n_embd=32,n_head=2,n_layer=2,vocab_size=512,n_positions=64"),
    *(f"--tokenizer_name={small.MODEL}", "--block_size=32", "--logging_steps=1"),
    *("--per_device_train_batch_size=2", "--learning_rate=3e-3", f"--max_steps={STEPS}", "--save_steps=5"),
    *("--max_eval_samples=20", "--append_eos", "--do_train", "--do_eval", "--validation_split_percentage=10"),
)


def documents(count: int) -> list[str]:
    """Different ones, of different lengths; one is empty."""
    return ["".join(f"{i} times {j} is {i * j}.\n" for j in range(i % 7)) for i in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "numbers.jsonl"
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in documents(300)))
    return path


@pytest.fixture(scope="module")
def clm(launcher: Launcher) -> Launcher:
    return Launcher(launcher.cache, "clm.py")


@pytest.fixture(scope="module")
def whole_clm(clm: Launcher, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    attempt = clm.forked(tmp_path_factory.mktemp("clm"), *SMALL, f"--train_file={corpus}")
    assert attempt.code == 0, attempt.output
    return attempt


def test_it_learns_evaluates_and_leaves_a_model_to_continue_from(
    whole_clm: Attempt, clm: Launcher, corpus: Path, tmp_path: Path
) -> None:
    """The final model, evaluated alone by its folder on the same text, has the perplexity that the training said."""
    losses = whole_clm.losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.2
    summary = json.loads((whole_clm.run / "summary.json").read_text())
    assert summary["perplexity"] == pytest.approx(math.exp(summary["eval_loss"]))
    lines = (whole_clm.run / "metrics.jsonl").read_text().splitlines()
    assert any("eval_perplexity" in json.loads(line) for line in lines)

    words = (f"--model_name_or_path={summary['final']}", f"--train_file={corpus}", "--do_eval", "--block_size=32")
    same = ("--max_eval_samples=20", "--append_eos", "--validation_split_percentage=10")
    alone = clm.forked(tmp_path, *words, *same, processes=1)
    assert alone.code == 0, alone.output
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-4)


def test_no_document_is_trained_on_and_evaluated_on(whole_clm: Attempt) -> None:
    """The last tenth of the 300 is held out, and the rest is trained on."""
    said = re.findall(r"^.*\b(train|validation): ([\d,]+) documents", whole_clm.output, re.MULTILINE)
    assert sorted(said) == [("train", "270"), ("validation", "30")]


def test_asked_to_save_and_exit_it_goes_on_with_bitwise_the_same_losses(
    clm: Launcher, whole_clm: Attempt, corpus: Path, tmp_path: Path
) -> None:
    words = (*SMALL, f"--train_file={corpus}")
    process = clm.start(tmp_path, *words)
    wait_for_step(tmp_path, 2, process)
    (tmp_path / "attempts" / "1" / "save-and-exit").touch()
    output, _ = process.communicate(timeout=600)
    assert "exiting with code 75; start the run again to resume" in output
    second = clm.forked(tmp_path, *words, attempt=2)
    assert second.code == 0, second.output
    assert "resuming from" in second.output
    assert second.losses == whole_clm.losses and second.steps == whole_clm.steps  # no step is taken twice
    final, expected = (json.loads((run / "summary.json").read_text()) for run in (tmp_path, whole_clm.run))
    assert final["perplexity"] == expected["perplexity"]


@pytest.mark.parametrize(
    ("line", "words", "what"),
    [
        ({"body": "x", "title": "y"}, [], "has no text column 'text'"),
        ({"text": "too short"}, ["--block_size=64"], "is shorter than one block"),
        ({"text": None}, ["--text_column=text"], "line 2 of"),
    ],
)
def test_what_is_wrong_with_the_text_is_said_by_one_rank(
    clm: Launcher, tmp_path: Path, line: dict[str, str], words: list[str], what: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "x"} if line == {"text": None} else line) + "\n" + json.dumps(line) + "\n")
    attempt = clm.finish(tmp_path, *SMALL, f"--train_file={path}", *words, "--do_eval=false", seconds=100)
    assert attempt.code == 1
    assert attempt.output.count("because:") == 1, attempt.output
    assert what in attempt.output


def test_a_stream_gives_the_blocks_of_the_cache_in_their_order(corpus: Path, tmp_path: Path) -> None:
    """However many workers read it, and no further than it is asked to."""
    import datasets

    tokenizer = demo.train_tokenizer(documents(300), 300)
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", streaming=True, cache_dir=str(tmp_path / "hf")
    )
    tokens = cache.open_tokens(cache.Corpus((corpus,), "content"), tokenizer, tmp_path, ALONE, end_of_document=True)
    blocks = tokens.blocks(50)
    stream = Stream(Text("numbers", "content", rows=rows), tokenizer, 50, True, len(blocks) - 3)
    found = [block["input_ids"].tolist() for block in stream]
    assert found == [blocks[number]["input_ids"].tolist() for number in range(len(blocks) - 3)]
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)
    assert [block["input_ids"].tolist() for block in islice(loader, 9)] == found[:9]
    end = tokenizer.eos_token_id
    assert sum(ids.count(end) for ids in found) > 100, "documents have their end"


CARD = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
---
"""


def test_the_command_of_run_clm_no_trainer_trains_on_wikitext_by_its_old_name(
    clm: Launcher, whole_clm: Attempt, tmp_path: Path
) -> None:
    """The name `wikitext` has no owner; the hub still knows it, but huggingface_hub 2 no longer reads such a name."""
    from datasets import Dataset

    with serving(tmp_path / "hub") as hub:
        hub.moved["wikitext"] = "Salesforce/wikitext"
        files: dict[str, bytes | str] = {"README.md": CARD}
        for split in ("train", "validation"):
            path = tmp_path / f"{split}.parquet"
            Dataset.from_dict({"text": documents(100)}).to_parquet(path)
            files[f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet"] = path.read_bytes()
        hub.put("dataset", "Salesforce/wikitext", files)
        final = json.loads((whole_clm.run / "summary.json").read_text())["final"]
        typed = ("--dataset_name", "wikitext", "--dataset_config_name", "wikitext-2-raw-v1", "--model_name_or_path",
                 final, "--output_dir", str(tmp_path / "test-clm"), "--max_train_steps=2", "--num_warmup_steps=1",
                 "--checkpointing_steps=1", "--block_size=32", "--do_train", "--do_eval")  # fmt: skip
        home = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        attempt = clm.finish(tmp_path, *typed, **home)
    assert attempt.code == 0, attempt.output
    assert sorted(path.name for path in (tmp_path / "test-clm").iterdir()) == ["checkpoint-1", "checkpoint-2", "final"]
    assert "perplexity" in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.network
@pytest.mark.slow
def test_gpt2_reaches_a_perplexity_of_about_20_on_wikitext_2(clm: Launcher, tmp_path: Path) -> None:
    """The example of run_clm's page as it is. It needs the hub, and minutes on a GPU or many hours on a CPU."""
    try:
        urllib.request.urlopen("https://huggingface.co/api/models/gpt2", timeout=10).close()
    except OSError as error:
        pytest.skip(f"the hub cannot be reached: {error}")
    typed = ("--model_name_or_path", "gpt2", "--dataset_name", "wikitext", "--dataset_config_name", "wikitext-2-raw-v1",
             "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8", "--do_train", "--do_eval",
             "--output_dir", str(tmp_path / "test-clm"))  # fmt: skip
    attempt = clm.finish(tmp_path, *typed, processes=1, seconds=24 * 3600, HF_HUB_OFFLINE="0")
    assert attempt.code == 0, attempt.output
    assert json.loads((tmp_path / "summary.json").read_text())["perplexity"] == pytest.approx(20, abs=2)


def test_perplexity_of_a_diverged_model_is_infinite() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.inf


@pytest.mark.parametrize("blocks", [3, 4, 9, 16])
def test_blocks_that_fill_the_last_round_are_not_counted_again(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Two processes and batches of 4. With fewer blocks than a batch, accelerate repeats them in the first one too."""
    shards = (BatchSamplerShard(BatchSampler(range(blocks), 4, drop_last=False), 2, rank) for rank in range(2))
    monkeypatch.setattr(Trainer, "prediction_step", lambda trainer, model, inputs: (torch.ones(()), None, None))
    counted = []
    for rank, shard in enumerate(shards):
        trainer = object.__new__(BlockTrainer)
        trainer.args = SimpleNamespace(world_size=2, process_index=rank, eval_batch_size=4)
        trainer.eval_dataset = range(blocks)
        trainer.rounds, trainer.blocks_counted, trainer.loss_sum = 0, 0, 0.0
        for rows in shard:
            inputs = {"labels": torch.zeros(4, 2, dtype=torch.int64), ROW: torch.tensor(rows)}
            trainer.prediction_step(None, inputs)
            counted += [row for row, (label, _) in zip(rows, inputs["labels"].tolist(), strict=True) if label == 0]
        assert trainer.loss_sum == trainer.blocks_counted
    assert sorted(counted) == list(range(blocks))


def test_the_loss_of_a_block_is_divided_as_the_page_says(tmp_path: Path) -> None:
    """docs/clm.md: by L - 1 or by L, after the name of the model's class and the version of transformers."""
    import transformers

    shapes = (
        transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=64, n_positions=32),
        transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 vocab_size=64),
    )  # fmt: skip
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    ids = torch.randint(0, 64, (3, 20))
    divisors = []
    for shape in shapes:
        trainer = transformers.Trainer(transformers.AutoModelForCausalLM.from_config(shape), arguments)
        divisors.append(int(trainer.get_batch_samples(iter([{"input_ids": ids, "labels": ids}]), 1, "cpu")[1]))
    assert divisors == ([60, 57] if int(transformers.__version__.split(".")[0]) >= 5 else [60, 60])
