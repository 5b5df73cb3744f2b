"""Each kind of fine-tuning that TRL has, on a tiny model, in this process: the losses are TRL's own, step by step."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.training

import sft  # noqa: E402
from tests.jobs import conftest  # noqa: E402, F401
from training import demo, heartbeat  # noqa: E402
from training import run as run_folder  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.job import Job  # noqa: E402
from training.processes import ALONE  # noqa: E402

WORDS = ("red", "green", "blue", "seven", "eight", "nine", "cat", "dog", "bird", "runs", "sits", "near", "far")
STEPS = 3


def sentence(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(length))


def said(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sentence(number, 3 + number % 5)},
        {"role": "assistant", "content": sentence(number + 1, 2 + number % 11)},
    ]


KINDS = {
    "messages": (lambda n: {"messages": said(n)}, ()),
    "text": (lambda n: {"text": sentence(n, 4 + n % 9)}, ()),
    "prompt-completion": (lambda n: {"prompt": sentence(n, 5), "completion": " " + sentence(n, 1 + n % 9)}, ()),
    "prompt-completion, loss on both": (
        lambda n: {"prompt": sentence(n, 5), "completion": " " + sentence(n, 1 + n % 9)},
        ("--completion_only_loss=false",),
    ),
    "prompt-completion of messages": (lambda n: {"prompt": said(n)[:1], "completion": said(n)[1:]}, ()),
    "assistant only": (lambda n: {"messages": said(n)}, ("--assistant_only_loss",)),
    "packing wrapped": (lambda n: {"messages": said(n)}, ("--packing", "--packing_strategy=wrapped")),
    "packing bfd": (lambda n: {"messages": said(n)}, ("--packing", "--packing_strategy=bfd")),
    "packing bfd, assistant only": (
        lambda n: {"messages": said(n)},
        ("--packing", "--packing_strategy=bfd", "--assistant_only_loss"),
    ),
    "accumulation": (lambda n: {"messages": said(n)}, ("--gradient_accumulation_steps=2",)),
    "activations twice": (lambda n: {"messages": said(n)}, ("--gradient_checkpointing=true",)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tokenizer and a chat template, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("model")
    tokenizer = demo.train_tokenizer((sentence(n, 12) for n in range(50)), 320)
    set_seed(2)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **size, **ends)
    LlamaForCausalLM(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def write(path: Path, row, count: int = 40) -> Path:
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))
    return path


def train(run: Path, model: Path, data: Path, *words: str, attempt: int = 1, alone: bool = True) -> dict[int, float]:
    """Return the loss of each step, as metrics.jsonl has it."""
    environment = {"RUNNER_RUN": str(run), "RUNNER_ATTEMPT": str(run / "attempts" / str(attempt))}
    folder = run_folder.from_environment(environment, "sft")
    run_folder.make(folder)
    arguments = [
        *(f"--model_name_or_path={model}", f"--dataset_name={data}", "--max_length=48", f"--max_steps={STEPS}"),
        *("--per_device_train_batch_size=4", "--learning_rate=1e-2", "--logging_steps=1", "--save_strategy=no"),
        *("--gradient_checkpointing=false", "--activation_checkpointing=false"),
    ]
    given = {word.split("=")[0] for word in words} | (
        {"--max_length"} if words[:1] and "--config" in words[0] else set()
    )
    known = [word for word in arguments if word.split("=")[0][2:] in names() and word.split("=")[0] not in given]
    assert sft.main([*known, *words], Job("sft", folder, ALONE, heartbeat.Heartbeat(folder, ALONE))) == 0
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in lines if "loss" in entry}


def names() -> set[str]:
    import dataclasses

    from trl import ModelConfig, ScriptArguments, SFTConfig

    return {field.name for kind in (SFTConfig, ScriptArguments, ModelConfig) for field in dataclasses.fields(kind)}


@pytest.fixture(autouse=True)
def as_a_script_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_each_kind_are_those_of_trl(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, words = KINDS[kind]
    if "bfd" in kind and torch.__version__ < "2.6":
        pytest.skip("on torch before 2.6 transformers' sdpa lets a row's documents see each other: TRL's losses differ")
    data = write(tmp_path / "rows.jsonl", row)
    theirs = train(tmp_path / "trl", model, data, *words, "--loss_path=trl")
    ours = train(tmp_path / "ours", model, data, *words, "--loss_path=plain")
    out = capsys.readouterr().out
    assert "ready after" in out
    assert list(ours) == list(range(1, STEPS + 1))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[STEPS] < ours[1], "it learns"


def test_where_a_loss_is_taken_is_what_the_options_say(model: Path, tmp_path: Path) -> None:
    """Else the test above could compare two trainings that both take it everywhere."""
    messages = write(tmp_path / "messages.jsonl", KINDS["messages"][0])
    pairs = write(tmp_path / "pairs.jsonl", KINDS["prompt-completion"][0])
    everywhere = train(tmp_path / "1", model, messages)
    answers = train(tmp_path / "2", model, messages, "--assistant_only_loss")
    completions = train(tmp_path / "3", model, pairs)
    both = train(tmp_path / "4", model, pairs, "--completion_only_loss=false")
    assert everywhere[STEPS] != pytest.approx(answers[STEPS], abs=1e-3)
    assert completions[STEPS] != pytest.approx(both[STEPS], abs=1e-3)


def test_an_adapter_is_trained_saved_resumed_and_answers(model: Path, tmp_path: Path) -> None:
    """LoRA: only the adapter learns and is kept; a second start goes on bitwise; the final folder can generate."""
    import transformers

    data = write(tmp_path / "rows.jsonl", KINDS["messages"][0])
    lora = ("--use_peft", "--lora_r=4", "--lora_target_modules", "q_proj", "v_proj", "--max_steps=6")
    whole = train(tmp_path / "whole", model, data, *lora)
    saving = ("--save_strategy=steps", "--save_steps=2", *lora)
    train(tmp_path / "run", model, data, *saving)
    import shutil

    shutil.rmtree(tmp_path / "run/checkpoints/final")
    shutil.rmtree(tmp_path / "run/checkpoints/checkpoint-6")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step", 0) <= 4]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(kept) + "\n")
    assert train(tmp_path / "run", model, data, *saving, attempt=2) == whole
    final = tmp_path / "run/checkpoints/final"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in final.iterdir()}
    assert not (final / "model.safetensors").exists()
    adapted = transformers.AutoModelForCausalLM.from_pretrained(str(final))
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(final))
    ids = tokenizer.apply_chat_template(said(3)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert adapted.generate(**ids, max_new_tokens=4).shape[1] > ids["input_ids"].shape[1]
    far = (adapted(**ids).logits - plain(**ids).logits).abs().max()
    assert far > 1e-3, "the adapter is in what was loaded"


def test_a_chat_template_of_the_users_own_writes_the_conversations(model: Path, tmp_path: Path) -> None:
    """It is used for the rows and kept with the model."""
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}")
    data = write(tmp_path / "rows.jsonl", KINDS["messages"][0])
    mine = train(tmp_path / "run", model, data, f"--chat_template_path={template}")
    assert mine != train(tmp_path / "other", model, data)
    assert (tmp_path / "run/checkpoints/final/chat_template.jinja").read_text() == template.read_text()


def test_an_evaluation_has_trls_loss_entropy_and_accuracy(model: Path, tmp_path: Path) -> None:
    """The loss of held-out rows is TRL's own; those of a last batch that is smaller count as much as the others."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", KINDS["messages"][0])
    write(folder / "test.jsonl", lambda n: KINDS["messages"][0](n + 100), 7)
    words = ("--eval_strategy=steps", "--eval_steps=2", "--per_device_eval_batch_size=4")
    found = []
    for path in ("trl", "plain"):
        train(tmp_path / path, model, folder, *words, f"--loss_path={path}")
        lines = map(json.loads, (tmp_path / path / "metrics.jsonl").read_text().splitlines())
        found.append(next(entry for entry in lines if "eval_loss" in entry))
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], abs=1e-5)
    assert {"eval_entropy", "eval_mean_token_accuracy"} <= set(found[1])


BAD = {
    "a conversation in another way of writing": (
        lambda n: {"messages": said(n) if n != 17 else [{"from": "human", "value": "x"}]},
        (),
        "row 17",
        "speaker in 'from', but earlier rows use 'role'",
    ),
    "an unknown role": (
        lambda n: {"messages": said(n) if n != 5 else [{"role": "asistant", "content": "x"}]},
        (),
        "row 5",
        "did you mean 'assistant'",
    ),
    "a message without content": (
        lambda n: {"messages": said(n) if n != 8 else [{"role": "user", "content": None}]},
        (),
        "row 8",
        "without content",
    ),
    "an empty conversation": (lambda n: {"messages": said(n) if n != 2 else []}, (), "row 2", "is empty"),
    "no answer to learn from": (
        lambda n: {"messages": said(n)[: 2 if n != 3 else 1]},
        ("--assistant_only_loss",),
        "row 3",
        "no message from the assistant",
    ),
    "assistant only, of texts": (lambda n: {"text": "x"}, ("--assistant_only_loss",), "has no conversations", ""),
    "a text and a list": (
        lambda n: {"prompt": "x", "completion": said(n)[1:]},
        (),
        "row 0",
        "is text, but column 'completion' is not",
    ),
    "answers beyond the length": (
        lambda n: {"prompt": sentence(n, 40), "completion": " red"},
        ("--max_length=8",),
        "no row",
        "cuts off every answer",
    ),
    "longer than the model": (lambda n: {"text": "red"}, ("--max_length=4096",), "more than the model supports", "256"),
    "a row longer than the model": (
        lambda n: {"text": sentence(n, 300 if n == 9 else 3)},
        ("--config={folder}/no-length.yaml",),
        "a row of",
        "256 positions",
    ),
    "an end token that is none": (lambda n: {"text": "red"}, ("--eos_token=<nope>",), "TRL rejects", "<nope>"),
    "the model's own loss asked for beside another one": (
        lambda n: {"text": "red green"},
        ("--loss_path=plain", "--loss_type=dft"),
        "--loss_path plain cannot be used with --loss_type dft",
        "the loss of the Transformers library",
    ),
    "a null in a row of text": (lambda n: {"text": "red" if n != 7 else None}, (), "row 7", "is not text"),
    "a template that is not there": (
        KINDS["messages"][0],
        ("--chat_template_path=./nofile.jinja",),
        "no chat template './nofile.jinja'",
        "",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_and_arguments_that_do_not_fit_are_one_clear_error(case: str, model: Path, tmp_path: Path) -> None:
    row, words, *wanted = BAD[case]
    data = write(tmp_path / "rows.jsonl", row)
    (tmp_path / "no-length.yaml").write_text("max_length: null")
    with pytest.raises(JobError) as caught:
        train(tmp_path / "run", model, data, *(word.format(folder=tmp_path) for word in words))
    for pattern in wanted:
        assert any(part in str(caught.value) for part in pattern.split("|")), str(caught.value)
    assert caught.value.fix


def test_a_file_that_is_not_utf_8_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", lambda n: {"text": "red"})
    data.write_bytes(data.read_bytes() + '{"text": "Grün"}\n'.encode("latin-1"))
    with pytest.raises(JobError, match="is not UTF-8"):
        train(tmp_path / "run", model, data)


@pytest.mark.parametrize("text", ["\n\n\n", '{"text": "red"}\n{"text": "gr'])
def test_the_fix_for_a_local_file_is_not_to_fetch_it(text: str, model: Path, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE=1 is set in all of these tests, and has nothing to do with a file."""
    data = tmp_path / "rows.jsonl"
    data.write_text(text)
    for path in (data, tmp_path / "missing.jsonl"):
        with pytest.raises(JobError) as caught:
            train(tmp_path / "run", model, path)
        assert "HF_HUB_OFFLINE" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ((), "note: 3 of 40 rows reach --max_length 48"),
        (("--packing", "--packing_strategy=bfd"), "note: 3 of 40 rows reach --max_length 48"),
        (("--packing", "--packing_strategy=wrapped"), ""),
    ],
)
def test_rows_that_are_cut_are_counted(
    words: tuple[str, ...], note: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "rows.jsonl", lambda n: {"text": sentence(n, 60 if n < 3 else 5)})
    train(tmp_path / "run", model, data, *words)
    out = capsys.readouterr().out
    assert (note in out) if note else ("note:" not in out)


def test_rows_left_without_an_answer_are_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "rows.jsonl", lambda n: {"prompt": sentence(n, 60 if n < 2 else 5), "completion": " red"})
    train(tmp_path / "run", model, data)
    assert "2 of 40 rows were left out, because they contain no token to learn from" in capsys.readouterr().out


def test_on_a_cpu_the_models_own_loss_is_taken(model: Path, tmp_path: Path) -> None:
    """TRL's kernel needs Triton; its fallback takes more than twice the time."""
    data = write(tmp_path / "rows.jsonl", KINDS["messages"][0])
    assert train(tmp_path / "1", model, data) == train(tmp_path / "2", model, data, "--loss_path=plain")


def test_nothing_looks_for_unused_weights(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DeepSpeed, that is a pass over the graph at every step; a mixture of experts needs it."""
    made = []
    monkeypatch.setattr(Job, "finish", lambda job, trainer, *others: made.append(trainer) or 0)
    data = write(tmp_path / "rows.jsonl", KINDS["messages"][0])
    train(tmp_path / "run", model, data, "--max_steps=1")
    assert made[0].args.ddp_find_unused_parameters is False


def test_documents_that_would_see_each_other_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch before 2.6, transformers' sdpa makes no mask for a row of several documents."""
    monkeypatch.setattr(torch, "__version__", "2.4.0a0+f70bd71a48")
    data = write(tmp_path / "rows.jsonl", KINDS["messages"][0])
    with pytest.raises(JobError, match=r"--packing_strategy bfd cannot be used with torch 2\.4"):
        train(tmp_path / "run", model, data, "--packing", "--packing_strategy=bfd")
