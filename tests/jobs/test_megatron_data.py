"""The files are byte for byte those of Megatron's IndexedDatasetBuilder, however they are made, and never half."""

import contextlib
import gzip
import hashlib
import importlib.util
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

import megatron_data  # noqa: E402
from tests.jobs.conftest import JOBS  # noqa: E402
from tests.waiting import until  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.token_cache import encoding, pairs  # noqa: E402

LONG = "Sphinx of black quartz, judge my vow. 123 " * 30_000  # more than a megabyte
ROWS: list[dict[str, Any]] = [
    {"text": "Hello world.\n", "title": "one", "parts": ["First. ", "Second.", ""]},
    {"text": "", "title": "", "parts": []},
    {"text": 'Grüße, 世界 🎉 don\'t\t"quoted" \\ / \u2028', "title": "Ünï\u0301 ﬁ", "parts": "not a list"},
    {"text": "a <|endoftext|> b", "title": "  \n\n ", "parts": ["", ""]},
    {"text": LONG, "title": "x" * 3000, "parts": [LONG[:5000], "العربية हिन्दी", "\x00\x07"]},
    *({"text": f"{n} the " * n, "title": f"{n}", "parts": [f"of {n}"] * (n % 4)} for n in range(60)),
]
WORDS = [
    " the",
    " of",
    " and",
    "Hello",
    " world",
    " judge",
    " vow",
    " black",
    " quartz",
    "Sphinx",
    "123",
    "世",
    "ü",
    "ß",
]


def vocabulary(size: int = 0) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of GPT-2's kind: each byte, the beginnings of a few words, and the end token last."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        ((visible, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        merges.update({(visible[:end], visible[end]): None for end in range(1, len(visible))})
    tokens = [*letters, *("".join(pair) for pair in merges)]
    tokens += [f"unused {number}" for number in range(size - len(tokens))]
    return {token: number for number, token in enumerate(dict.fromkeys([*tokens, "<|endoftext|>"]))}, list(merges)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizers, as their types take them, and the same rows as one file, compressed, and as three files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("megatron")
    for name, size in (("gpt2", 0), ("large", 65_600)):
        tokens, merges = vocabulary(size)
        (folder / name).mkdir()
        (folder / name / "vocab.json").write_text(json.dumps(tokens))
        (folder / name / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / "gpt2" / name) for name in ("vocab.json", "merges.txt"))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(folder / "around"))
    (folder / "a.json").write_text(json.dumps({letter: number for number, letter in enumerate("abcdefghij")}))
    lines = [json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for number, row in enumerate(ROWS)]
    text = "".join(lines).encode()
    (folder / "rows.jsonl").write_bytes(text)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(text[:400_000]) + gzip.compress(text[400_000:]))
    (folder / "rows.jsonl.xz").write_bytes(lzma.compress(text))
    import pyarrow

    with pyarrow.output_stream(str(folder / "rows.jsonl.zst"), compression="zstd") as file:
        file.write(text)
    for number, cut in enumerate((lines[:3], lines[3:10], lines[10:])):
        (folder / f"cut-{number}.json").write_text("".join(cut))
    return folder


GPT2 = (
    "--tokenizer-type",
    "GPT2BPETokenizer",
    "--vocab-file",
    "{}/gpt2/vocab.json",
    "--merge-file",
    "{}/gpt2/merges.txt",
)
LARGE = tuple(word.replace("gpt2", "large") for word in GPT2)
AROUND = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "{}/around")
ROW = ("--input", "{}/rows.jsonl")
EOD = "--append-eod"

OPTIONS: dict[str, Sequence[str]] = {
    "no end of document": (*GPT2, *ROW),
    "end of document": (*GPT2, *ROW, EOD),
    "two keys": (*GPT2, *ROW, EOD, "--json-keys", "text", "title"),
    "lists of texts": (*GPT2, *ROW, EOD, "--json-keys", "parts"),
    "three keys, no end": (*GPT2, *ROW, "--json-keys", "parts", "title", "text"),
    "gzip": (*GPT2, "--input", "{}/rows.jsonl.gz", EOD),
    "xz": (*GPT2, "--input", "{}/rows.jsonl.xz", EOD),
    "zstd": (*GPT2, "--input", "{}/rows.jsonl.zst", EOD),
    "several files": (*GPT2, "--input", "{}/cut-*.json", EOD),
    "files in another order": (*GPT2, "--input", "{}/cut-2.json", "{}/cut-0.json"),
    "two processes": (*GPT2, *ROW, EOD, "--workers", "2"),
    "compressed, two processes": (*GPT2, "--input", "{}/rows.jsonl.xz", EOD, "--workers", "2"),
    "partitions": (*GPT2, "--input", "{}/cut-*.json", EOD, "--partitions", "7", "--json-keys", "title", "parts"),
    "four bytes": (*LARGE, *ROW, EOD),
    "tokens around a text": (*AROUND, *ROW, EOD, "--json-keys", "text", "parts"),
    "no special tokens": (*AROUND, *ROW, EOD, "--tokenizer-hf-no-include-special-tokens"),
}
# SHA-256 of all .bin and .idx files, one after the other, as IndexedDatasetBuilder of megatron-core 0.16.1 wrote them
# in `expected` below. Where megatron-core is installed, the test runs `expected` again.
SUMS = {
    "no end of document": "36692011579356a784eb090e678eecf20c70d2719192230301a41c6b54a167c2",
    "end of document": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "two keys": "cac1c6851631bfde6f8c0d4c444afc29917d678ca8648bdf66e821a23f5f604e",
    "lists of texts": "876ba163445c68050c377d3f02f6e4545c2aac60b455e56be495dd3ee6d0e312",
    "three keys, no end": "a89aecef311393d29b9f5e6df7e76be4da4c9e69d6cedaf282396bcf10d1143d",
    "gzip": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "xz": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "zstd": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "several files": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "files in another order": "de311af4a60af17778eccac6e814c28f1f20a603f46d503b3bac9f001792b864",
    "two processes": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "compressed, two processes": "88e1b88e9a2431a1a2e00b168bf29757b6c7d5b8826abb56fa91ce23ce0303c2",
    "partitions": "ffae33937e70e9424bbf45bb405b51ecff235360837d5401b96872335c959608",
    "four bytes": "5d8054a3c78aaae6c312c447ec72f228148c9bc6694765ed7ef4f33fa3794e15",
    "tokens around a text": "4af04bfdd8fb7ec098557f489ed6737c405cb0dc72182c799af85d067e50d151",
    "no special tokens": "0e0b5773fbc75ff1d326d63aec9999525f795458b1c3fe27b9eb90abb4db7410",
}


def run(folder: Path, words: Sequence[str], prefix: Path) -> Path:
    """Run the script in this process."""
    workers = () if "--workers" in words else ("--workers", "1")
    filled = [word.format(folder) for word in words]
    assert megatron_data.main([*filled, "--output-prefix", str(prefix), *workers]) == 0
    return prefix


def sums(prefix: Path) -> str:
    found = sorted(path for path in prefix.parent.iterdir() if path.suffix in (".bin", ".idx"))
    assert found
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()


def expected(folder: Path, words: Sequence[str], prefix: Path) -> None:
    """Write what Megatron's preprocess_data.py does with its own builder: line by line, with the stock tokenizer."""
    from megatron.core.datasets import indexed_dataset
    from transformers import AutoTokenizer, GPT2Tokenizer

    arguments = megatron_data.parser().parse_args([*(word.format(folder) for word in words), "--output-prefix", "x"])
    if arguments.tokenizer_type == "GPT2BPETokenizer":
        place = Path(arguments.vocab_file).parent
        tokenizer = GPT2Tokenizer.from_pretrained(str(place))
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_model)
    special = not arguments.tokenizer_hf_no_include_special_tokens
    for key in arguments.json_keys:
        builder = indexed_dataset.IndexedDatasetBuilder(
            f"{prefix}_{key}_document.bin", dtype=indexed_dataset.DType.optimal_dtype(len(tokenizer))
        )
        for path in pairs.named(arguments.input):
            plain = folder / "rows.jsonl" if path.suffix in (".gz", ".xz", ".zst") else path
            for line in plain.read_text(encoding="utf-8").split("\n")[:-1]:
                value, ids, lengths = json.loads(line)[key], [], []
                for text in value if isinstance(value, list) else [value]:
                    some = tokenizer(text, add_special_tokens=special).input_ids
                    ids += some
                    lengths += [len(some)] if some else []
                if ids and arguments.append_eod:
                    ids.append(tokenizer.eos_token_id)
                    lengths[-1] += 1
                builder.add_document(ids, lengths)
        builder.finalize(f"{prefix}_{key}_document.idx")


@pytest.mark.parametrize("name", OPTIONS)
def test_the_files_are_those_of_megatrons_builder(folder: Path, tmp_path: Path, name: str) -> None:
    words, recorded = OPTIONS[name], SUMS[name]
    ours = sums(run(folder, words, tmp_path / "ours" / "x"))
    assert ours == recorded
    if importlib.util.find_spec("megatron"):
        (tmp_path / "megatron").mkdir()
        expected(folder, words, tmp_path / "megatron" / "x")
        assert sums(tmp_path / "megatron" / "x") == recorded


def test_other_files_are_not_overwritten_and_the_same_are_not_made_again(folder: Path, tmp_path: Path) -> None:
    words = (*GPT2, *ROW, EOD)
    prefix = run(folder, words, tmp_path / "x")
    written = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    run(folder, words, prefix)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == written
    with pytest.raises(JobError, match="exists already"):
        make(folder, words[:-1], prefix)


def make(folder: Path, words: Sequence[str], prefix: Path) -> None:
    """What main does, without its exit at an error."""
    from training.token_cache import tokenizers_of_megatron

    filled = [word.format(folder) for word in words]
    arguments = megatron_data.parser().parse_args([*filled, "--output-prefix", str(prefix)])
    megatron_data.check(arguments)
    state = tokenizers_of_megatron.load(arguments)
    paths = pairs.named(arguments.input)
    job = pairs.Job(prefix, tuple(arguments.json_keys), paths, state, arguments.partitions)
    pairs.make(job, arguments.partition, arguments.workers or 1, megatron_data.Progress(arguments))


def test_a_place_that_cannot_be_written_to_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot write .*/file/x") as caught:
        make(folder, (*GPT2, *ROW), tmp_path / "file" / "x")
    assert "file" in caught.value.why


def test_only_complete_files_are_printed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, printed in (("0", ""), ("1", f"{tmp_path}/x_text_document\n")):
        run(folder, (*GPT2, *ROW, "--partitions", "2", "--partition", part), tmp_path / "x")
        assert capsys.readouterr().out == printed


def test_tasks_of_an_array_make_the_same_bytes_and_the_last_one_joins(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = OPTIONS["partitions"]
    for part in (3, 0, 6, 1, 5, 2):
        make(folder, (*words, "--partition", str(part)), tmp_path / "x")
        assert not list(tmp_path.glob("*.idx"))
    assert "missing parts: 4\n" in capsys.readouterr().out
    make(folder, (*words, "--partition", "4"), tmp_path / "x")
    assert sums(tmp_path / "x") == SUMS["partitions"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix not in (".bin", ".idx")) == ["x.json"]


def test_without_gigatoken_the_bytes_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "back_ends", lambda wanted: ("tokenizers",))
    words, recorded = OPTIONS["two keys"], SUMS["two keys"]
    assert sums(run(folder, words, tmp_path / "x")) == recorded


def test_small_pieces_and_batches_change_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PIECE_BYTES", 700)
    words, recorded = OPTIONS["three keys, no end"], SUMS["three keys, no end"]
    assert sums(run(folder, words, tmp_path / "x")) == recorded


def test_a_model_of_sentencepiece(folder: Path, tmp_path: Path) -> None:
    """Ids and end token are those of the package sentencepiece, for both kinds of model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("".join(f"{row['text'][:3000]}\n{row['title']}\n" for row in ROWS))
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=str(tmp_path / kind), vocab_size=340, model_type=kind,
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2)  # fmt: skip
        model = str(tmp_path / f"{kind}.model")
        words = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, *ROW, EOD)
        prefix = run(folder, words, tmp_path / kind / "x")
        own = sentencepiece.SentencePieceProcessor(model_file=model)
        rows = (own.encode(row["text"]) for row in ROWS)
        ids = [each for row in rows if row for each in (*row, own.eos_id())]
        assert (prefix.parent / "x_text_document.bin").read_bytes() == b"".join(
            each.to_bytes(2, "little") for each in ids
        )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"txt": "a"}', "line 2 of {}/a.jsonl has no column 'text' (did you mean 'txt'?)"),
        ('{"text": ["a", 3]}', "line 2 of {}/a.jsonl: column 'text' is not text"),
        ('{"text": null}', "line 2 of {}/a.jsonl: column 'text' is not text"),
        ("{broken", "{}/a.jsonl: line 2 is not JSON: '{{broken'"),
        ('{"text": "\\ud83d"}', "{}/a.jsonl: line 2 is not Unicode"),
    ],
)
def test_a_line_without_text_is_named(folder: Path, tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(JobError) as caught:
        make(folder, (*GPT2, "--input", str(tmp_path / "a.jsonl")), tmp_path / "x")
    assert caught.value.what == expected.format(tmp_path)
    assert not list(tmp_path.glob("*.idx")) + list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--split-sentences",), "--split-sentences cannot be used"),
        (("--partitions", "0"), "--partitions 0 cannot be used"),
        (("--partitions", "2", "--partition", "2"), "there is no part 2"),
        (("--json-keys", "a", "a"), "--json-keys names a key twice"),
        (("--input", "nothing-*.jsonl"), "no file matches 'nothing-*.jsonl'"),
        (("--input", __file__), f"cannot read {__file__!r}"),
        (("--vocab-file", "nothing"), "--vocab-file: there is no file 'nothing'"),
        (("--vocab-file", "{}/rows.jsonl"), "cannot read '{}/rows.jsonl' and '{}/gpt2/merges.txt' as a vocabulary"),
        (("--vocab-file", "{}/a.json"), "cannot read '{}/a.json' and '{}/gpt2/merges.txt' as a vocabulary"),
        (("--tokenizer-type", "HuggingFaceTokenizer"), "--tokenizer-model is missing"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    folder: Path, tmp_path: Path, words: Sequence[str], expected: str
) -> None:
    with pytest.raises(JobError) as caught:
        make(folder, (*GPT2, *ROW, *words), tmp_path / "x")
    assert caught.value.what == expected.format(folder, folder)
    assert not list(tmp_path.iterdir())


def test_damaged_compressed_text_is_an_error(folder: Path, tmp_path: Path) -> None:
    for end in ("gz", "xz", "zst"):
        data = (folder / f"rows.jsonl.{end}").read_bytes()
        (tmp_path / f"a.jsonl.{end}").write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(JobError, match="cannot decompress"):
            make(folder, (*GPT2, "--input", str(tmp_path / f"a.jsonl.{end}")), tmp_path / "x")
    assert not list(tmp_path.glob("*.idx")) + list(tmp_path.glob("*.bin"))


def processes_with(variable: str) -> list[int]:
    """The running processes that were started with this variable."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_a_killed_parent_takes_a_worker_along_that_has_not_begun(tmp_path: Path) -> None:
    """The worker asks the kernel to be killed with its parent only when that is gone already."""
    text = f"""
import multiprocessing, os, pathlib, sys
sys.path.insert(0, {str(JOBS)!r})
import late
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=late.begin).start()
    pathlib.Path("up").touch()
    sys.stdin.read()
"""
    late = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(JOBS)!r})
from training.processes import die_with_parent
def begin():
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    die_with_parent()
    time.sleep(600)
"""
    (tmp_path / "main.py").write_text(text)
    (tmp_path / "late.py").write_text(late)
    environ = {**os.environ, "MARK": str(tmp_path)}
    parent = subprocess.Popen((sys.executable, "main.py"), cwd=tmp_path, env=environ, stdin=subprocess.PIPE)
    until((tmp_path / "begun").exists, "the worker")
    parent.kill()
    parent.communicate()
    (tmp_path / "go").touch()
    until(lambda: not processes_with(f"MARK={tmp_path}"), "the worker to be gone")


def test_a_killed_run_leaves_nothing_that_looks_complete(folder: Path, tmp_path: Path) -> None:
    """kill -9 while it writes: no .bin, no .idx; then the same command makes the same files and leaves nothing else."""
    with (tmp_path / "a.jsonl").open("wb") as file:
        for _ in range(40):
            file.write((folder / "rows.jsonl").read_bytes())
    words = [word.format(folder) for word in (*GPT2, "--input", str(tmp_path / "a.jsonl"), EOD)]
    command = (sys.executable, str(JOBS / "megatron_data.py"), *words, "--workers", "2", "--output-prefix")
    out = tmp_path / "out"
    marked = {**os.environ, "MARK": str(out)}
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    first = subprocess.Popen((*command, str(out / "x")), env=marked, **quiet)
    try:
        partial = out / "x_text_document.bin.partial"
        until(lambda: partial.exists() and partial.stat().st_size, "the first ids")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    until(lambda: not processes_with(f"MARK={out}"), "the workers to be gone")
    assert {path.suffix for path in out.iterdir()} == {".partial"}
    subprocess.run((*command, str(out / "x")), check=True, capture_output=True)
    subprocess.run((*command, str(tmp_path / "whole" / "x")), check=True, capture_output=True)
    assert sums(out / "x") == sums(tmp_path / "whole" / "x")
    assert sorted(path.name for path in out.iterdir()) == ["x.json", "x_text_document.bin", "x_text_document.idx"]


RENAMES_THEN_DIES = """
import os, pathlib, runpy, signal, sys
renames, rename = int(sys.argv[1]), pathlib.Path.replace

def replace(path, target):
    global renames
    if str(target).endswith((".bin", ".idx")):
        if not renames:
            os.kill(os.getpid(), signal.SIGKILL)
        renames -= 1
    return rename(path, target)

pathlib.Path.replace = replace
sys.argv[:] = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_index_gets_its_name_only_beside_complete_data(folder: Path, tmp_path: Path) -> None:
    """kill -9 before the first, second, third or last file has its own name: each .idx is there only with its .bin."""
    words = [*(word.format(folder) for word in OPTIONS["two keys"]), "--workers", "1"]
    whole, out = run(folder, OPTIONS["two keys"], tmp_path / "whole/x").parent, tmp_path / "out"
    for renames in range(4):  # each finds what the one before has left
        argv = (sys.executable, "-c", RENAMES_THEN_DIES, str(renames), str(JOBS / "megatron_data.py"), *words)
        done = subprocess.run((*argv, "--output-prefix", str(out / "x")), capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL and not done.stdout, done.stderr
        left = sorted(path for path in out.iterdir() if path.suffix in (".bin", ".idx"))
        assert len(left) == renames
        for path in left:
            assert path.read_bytes() == (whole / path.name).read_bytes()
            assert path.suffix == ".bin" or path.with_suffix(".bin") in left
    run(folder, OPTIONS["two keys"], out / "x")
    assert sums(out / "x") == SUMS["two keys"]
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
