"""What cannot be meant is refused before any process waits for another; what is left out is filled in and said."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import JOBS  # noqa: E402
from training import clm_arguments as arguments  # noqa: E402
from training import clm_models, processes, text  # noqa: E402
from training import run as run_folder  # noqa: E402
from training.arguments import or_demo  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.settings import Settings, from_variables  # noqa: E402
from training.settings import read as read_settings  # noqa: E402

TWO = processes.Processes(0, 0, 2, 2, "torchrun")
SCRATCH = ("--model_type=gpt2", "--tokenizer_name=some/tokenizer")


def read(folder: Path, *words: str, attempt: int = 1) -> Settings:
    run = run_folder.from_environment(
        {"RUNNER_RUN": str(folder), "RUNNER_ATTEMPT": str(folder / "attempts" / str(attempt))}, "clm"
    )
    job = SimpleNamespace(script="clm", run=run, processes=TWO)
    arguments.read(or_demo(words, job), job)
    return job.settings


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "a"}\n')
    return path


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--train_file={corpus}"], "no model is given"),
        ([*SCRATCH], "no data is given"),
        (["--model_type=gpt2", "--train_file={corpus}"], "no tokenizer is given"),
        ([*SCRATCH, "--train_file={corpus}", "--dataset_name=x"], "are both given"),
        ([*SCRATCH, "--train_file={corpus}", "--model_name_or_path=x"], "--model_type and --model_name_or_path"),
        (["--model_name_or_path=x", "--config_overrides=n_embd=8", "--train_file={corpus}"], "--config_overrides and"),
        ([*SCRATCH, "--train_file={corpus}", "--config_name=x"], "--model_type and --config_name"),
        ([*SCRATCH, "--train_file=nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
        ([*SCRATCH, "--train_file=nowhere-*.txt"], "no file matches 'nowhere-*.txt'"),
        ([*SCRATCH, "--train_file={folder}/empty.txt"], "is empty"),
        ([*SCRATCH, "--train_file={folder}/corpus.doc"], "cannot read"),
        ([*SCRATCH, "--validation_file={corpus}", "--do_train"], "there is no text to train on"),
        ([*SCRATCH, "--train_file={corpus}", "--streaming"], "--streaming needs --max_steps"),
        ([*SCRATCH, "--train_file={corpus}", "--streaming", "--max_steps=1", "--data_percentage=5"], "--data_percent"),
        ([*SCRATCH, "--train_file={corpus}", "--data_percentage=0"], "--data_percentage cannot be 0"),
        (
            [*SCRATCH, "--train_file={corpus}", "--validation_split_percentage=100"],
            "--validation_split_percentage cannot be 100",
        ),
        ([*SCRATCH, "--train_file={corpus}", "--block_size=1"], "--block_size cannot be 1"),
        ([*SCRATCH, "--train_file={corpus}", "--max_train_samples=0"], "--max_train_samples cannot be 0"),
        ([*SCRATCH, "--train_file={corpus}", "--max_eval_samples=-1"], "--max_eval_samples cannot be -1"),
        ([*SCRATCH, "--train_file={corpus}", "--preprocessing_num_workers=-1"], "--preprocessing_num_workers cannot"),
        ([*SCRATCH, "--train_file={corpus}", "--block_size=2000"], "--block_size 2000 is more than the model supports"),
        ([*SCRATCH, "--train_file={corpus}", "--global_batch_size=7"], "7 sequences cannot be split evenly"),
        ([*SCRATCH, "--train_file={corpus}", "--config_overrides=n_emb=8"], "--config_overrides n_emb=8"),
        ([*SCRATCH, "--train_file={corpus}", "--config_overrides=n_embd=wide"], "--config_overrides n_embd=wide"),
        (["--model_type=gpt22", "--tokenizer_name=x", "--train_file={corpus}"], "there is no model type 'gpt22' (did"),
        ([*SCRATCH, "--train_file={corpus}", "--variables=EPOCHS"], "--variables: cannot read 'EPOCHS'"),
        (["--model_name_or_path={folder}/nothing", "--train_file={corpus}"], "cannot load the model"),
    ],
)
def test_contradictions_are_refused(corpus: Path, words: list[str], what: str) -> None:
    (corpus.parent / "empty.txt").touch()
    (corpus.parent / "corpus.doc").write_text("text")
    with pytest.raises(JobError) as caught:
        read(corpus.parent, *(word.format(corpus=corpus, folder=corpus.parent) for word in words))
    assert what in caught.value.what
    assert caught.value.fix


def test_the_demo_is_what_no_arguments_mean(tmp_path: Path) -> None:
    settings = read(tmp_path)
    folder = Path(settings["model_name_or_path"]).parent
    assert settings["train_file"] == str(folder / "python-docs-text.jsonl")
    assert (settings["block_size"], settings["append_eos"]) == (128, True)
    assert settings.sources["deepspeed"] == f"config {folder}/clm.yaml 'zero2'"


def test_nothing_of_the_demo_reaches_a_training_of_the_users_own(corpus: Path) -> None:
    settings = read(corpus.parent, *SCRATCH, f"--train_file={corpus}")
    assert [name for name, source in settings.sources.items() if source.startswith("config")] == []
    assert (settings["deepspeed"], settings["do_train"], settings["do_eval"]) == (None, True, False)
    assert (settings["block_size"], settings.sources["block_size"]) == (1024, "script: the model has 1024 positions")


def test_an_evaluation_alone_trains_nothing_and_takes_no_checkpoint(corpus: Path) -> None:
    settings = read(corpus.parent, *SCRATCH, f"--validation_file={corpus}", "--do_eval", "--deepspeed=zero2")
    assert (settings["do_train"], settings["deepspeed"], settings["resume_from_checkpoint"]) == (False, None, "false")


def test_a_restart_of_a_run_that_overwrites_takes_no_checkpoint_of_another(corpus: Path) -> None:
    words = (*SCRATCH, f"--train_file={corpus}", "--overwrite_output_dir")
    assert read(corpus.parent, *words)["resume_from_checkpoint"] == "false"
    # resume.find_own comes first: it finds what the first start has saved, and nothing that was there before
    assert read(corpus.parent, *words, attempt=2)["resume_from_checkpoint"] == "false"


def test_a_variable_named_for_it_has_the_last_word(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --export=ALL,EPOCHS=7` beats the job file's --num_train_epochs; an empty or absent one says nothing."""
    monkeypatch.setenv("EPOCHS", "7")
    monkeypatch.setenv("DATA_PERCENTAGE", "")
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    names = ("EPOCHS=num_train_epochs", "DATA_PERCENTAGE=data_percentage", "CHECKPOINT_DIR=output_dir")
    settings = read(corpus.parent, *SCRATCH, f"--train_file={corpus}", "--num_train_epochs=2", "--variables", *names)
    assert (settings["num_train_epochs"], settings.sources["num_train_epochs"]) == (7.0, "variable EPOCHS")
    assert settings["data_percentage"] == 100
    assert settings["output_dir"] == str(corpus.parent / "checkpoints")
    assert from_variables(names, {"CHECKPOINT_DIR": "/x"}) == {"output_dir": ("CHECKPOINT_DIR", "/x")}


def test_nothing_of_the_demo_is_in_a_training_that_variables_choose(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TYPE", "gpt2")
    monkeypatch.setenv("DATA", str(corpus))
    settings = read(corpus.parent, "--tokenizer_name=x", "--variables", "TYPE=model_type", "DATA=train_file")
    assert (settings["train_file"], settings.sources["train_file"]) == (str(corpus), "variable DATA")
    assert [name for name, source in settings.sources.items() if source.startswith("config")] == []


def test_names_that_run_clm_has_had_over_the_years_are_taken(corpus: Path) -> None:
    words = ("--torch_dtype=bfloat16", "--dataset-config-name=x", "--low_cpu_mem_usage", "--no_keep_linebreaks")
    settings = read(corpus.parent, *SCRATCH, f"--train_file={corpus}", *words)
    assert (settings["dtype"], settings.sources["dtype"]) == ("bfloat16", "command line")
    assert (settings["dataset_config_name"], settings["low_cpu_mem_usage"], settings["keep_linebreaks"]) == (
        "x", True, False)  # fmt: skip


def test_the_arguments_of_run_clm_no_trainer_are_taken(corpus: Path) -> None:
    words = ("--max_train_steps=30", "--num_warmup_steps=3", "--checkpointing_steps=10", "--with_tracking",
             "--use_slow_tokenizer", "--low_cpu_mem_usage", "--hub_model_id=a/b", "--preprocessing_num_workers=2",
             "--lr_scheduler_type=cosine", "--seed=7", "--no_keep_linebreaks", "--trust_remote_code")  # fmt: skip
    settings = read(corpus.parent, *SCRATCH, f"--train_file={corpus}", *words)
    names = ("max_steps", "warmup_steps", "save_steps", "save_strategy", "report_to", "use_fast_tokenizer")
    assert [settings[name] for name in names] == [30, 3, 10, "steps", ["all"], False]
    assert {settings.sources[name] for name in names} == {"command line"}
    epochs = read(corpus.parent, *SCRATCH, f"--train_file={corpus}", "--checkpointing_steps=epoch", "--report_to=none")
    assert (epochs["save_strategy"], epochs["save_steps"]) == ("epoch", 500)
    for wrong, what in (("--max_steps=3", "--max_train_steps and --max_steps are both given"),
                        ("--checkpointing_steps=often", "--checkpointing_steps cannot be 'often'")):  # fmt: skip
        with pytest.raises(JobError, match=what):
            read(corpus.parent, *SCRATCH, f"--train_file={corpus}", "--max_train_steps=30", wrong)


def test_overrides_set_what_is_there_in_its_own_kind() -> None:
    words = "n_embd=1024,n_head=16,resid_pdrop=0,scale_attn_weights=false"
    shape = clm_models.configuration(arguments.ModelArguments(model_type="gpt2", config_overrides=words))
    assert (shape.n_embd, shape.hidden_size, shape.n_head) == (1024, 1024, 16)
    assert shape.resid_pdrop == 0.0
    assert shape.scale_attn_weights is False


@pytest.mark.parametrize(
    ("row", "given", "column"),
    [
        ({"text": "a", "title": "b"}, None, "text"),
        ({"content": "a", "stars": 5}, None, "content"),
        ({"content": "a", "title": "b"}, "title", "title"),
        ({"content": "a", "title": "b"}, None, "has no text column 'text'"),
        ({"text": 5}, None, "has no text column 'text'"),
        ({"txet": "a", "title": "b"}, "text", "(did you mean 'txet'?)"),
    ],
)
def test_the_column_is_text_or_the_only_one(row: dict[str, object], given: str | None, column: str) -> None:
    try:
        assert text.column_of(row, "data", given) == column
    except JobError as error:
        assert column in error.what


def test_the_first_row_is_seen_in_every_kind_of_file(tmp_path: Path) -> None:
    import gzip
    import lzma

    import pyarrow
    from pyarrow import parquet

    lines = json.dumps({"body": "x", "n": 1})
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "a.json").write_text(f"[\n{lines}\n]")
    (tmp_path / "a.csv").write_text("body,n\nx,1\n")
    (tmp_path / "long.csv").write_text(f"body,n\n{'x' * 200_000},1\n")
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    table = pyarrow.table({"body": ["x"], "n": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    for path in tmp_path.iterdir():
        row = text.first_row(path)
        assert isinstance(row["text" if path.suffix == ".txt" else "body"], str), path
        assert not isinstance(row.get("n"), str) or path.suffix == ".csv", path


def test_a_pattern_matches_files_in_several_folders(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", "a[1]/3.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    found = [path.relative_to(tmp_path).as_posix() for path in text.named(f"{tmp_path}/*/*.txt")]
    assert found == ["a/1.txt", "a[1]/3.txt", "b/2.txt"]
    assert text.named(f"{tmp_path}/*/1.txt") == (tmp_path / "a/1.txt",)
    assert text.named(f"{tmp_path}/a[1]/*.txt") == (tmp_path / "a[1]/3.txt",)
    assert text.named("c.txt") == (Path("c.txt"),)


def test_a_compressed_file_is_not_streamed() -> None:
    with pytest.raises(JobError, match="cannot stream"):
        text._stream("corpus.jsonl.gz", keep_linebreaks=True)


def test_the_job_files_of_clm_name_arguments_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shipped job file of clm is read to the point where the model would be fetched."""
    tomllib = pytest.importorskip("tomllib", reason="job files are read by the tool, with Python 3.11 or newer")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in sorted(JOBS.glob("*.toml")):
        job = tomllib.loads(path.read_text())
        if job.get("script") != "jobs/clm.py":
            continue
        words = [str(word) for word in job.get("arguments", [])]
        parsed = read_settings("clm", arguments.types(), words)
        assert parsed.given("deepspeed") or not words, path
