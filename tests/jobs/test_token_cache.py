"""Text is tokenized once: ids are those of the tokenizer, the files are Megatron's, nothing half is ever seen."""

import gzip
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.jobs.conftest import free_port  # noqa: E402
from tests.waiting import until  # noqa: E402
from training import demo, text  # noqa: E402
from training.blocks import Stream  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.processes import Processes  # noqa: E402
from training.token_cache import blocks, building, cache, documents, encoding, identity, layout  # noqa: E402

ALONE = Processes(0, 0, 1, 1, "alone")
JOBS = Path(__file__).resolve().parents[2] / "jobs"
TEXTS = [
    "Hello world.\n",
    "",
    "Grüße, 世界 🎉 don't",
    "a <|end|> b",
    "x" * 500,
    "  \n\n tabs\t",
    "12345 67.8",
    "Ünï\u0301 ﬁ",
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """Three of the kinds that models have: byte-level, with tokens around each text, and SentencePiece's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = [str(path.read_text(encoding="utf-8")) for path in sorted((JOBS / "training").rglob("*.py"))]
    around = demo.train_tokenizer(corpus, 600)
    around.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>",
        special_tokens=[("<|user|>", around.convert_tokens_to_ids("<|user|>")), ("<|end|>", around.eos_token_id)],
    )
    pieces = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.decoder = decoders.Metaspace()
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    metaspace = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>", eos_token="</s>")
    return {"bytes": demo.train_tokenizer(corpus, 600), "around": around, "metaspace": metaspace}


@pytest.fixture
def plain(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["bytes"]


def lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def opened(path: Path, tokenizer: Any, folder: Path, **options: Any) -> blocks.Tokens:
    return cache.open_tokens(cache.Corpus((path,)), tokenizer, folder, ALONE, **options)


def rows(tokens: blocks.Tokens) -> list[list[int]]:
    return [tokens.document(number).tolist() for number in range(len(tokens))]


def megatron(prefix: Path) -> tuple[int, list[int], list[list[int]]]:
    """Read both files by the format's description alone: code of the type, document table, sequences."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    at = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    places = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
    table = struct.unpack_from(f"<{entries}q", index, at + 12 * sequences)
    assert len(index) == at + 12 * sequences + 8 * entries
    letter, size_bytes = {8: ("H", 2), 4: ("i", 4)}[code]
    data = prefix.with_suffix(".bin").read_bytes()
    found = [list(struct.unpack_from(f"<{n}{letter}", data, at)) for n, at in zip(lengths, places, strict=True)]
    assert len(data) == size_bytes * sum(lengths)
    return code, list(table), found


def test_the_files_are_megatrons(tmp_path: Path, plain: Any) -> None:
    """Header, types, sequences, their places and the document table, read back with nothing of ours."""
    tokens = opened(lines(tmp_path / "a.jsonl"), plain, tmp_path, end_of_document=True)
    code, table, sequences = megatron(tokens.file.prefix)
    assert code == 8
    assert sequences == [[*plain(text)["input_ids"], plain.eos_token_id] for text in TEXTS if text]
    assert table == [0, 1, 1, 2, 3, 4, 5, 6, 7]  # the second document is empty: no sequence, but an entry
    assert rows(tokens)[1] == []


def test_a_large_vocabulary_has_four_bytes(tmp_path: Path) -> None:
    """From 65,500 tokens on Megatron's type is int32, code 4."""
    assert [layout.dtype_code(size) for size in (50257, 65499, 65500, 128256)] == [8, 8, 4, 4]
    (tmp_path / "x.bin").write_bytes(np.asarray([70000, 1, 2], "<i4").tobytes())
    layout.write_index(tmp_path / "x.idx", 4, np.asarray([1, 0, 2], "<i4"))
    assert megatron(tmp_path / "x") == (4, [0, 1, 1, 2], [[70000], [1, 2]])
    assert layout.read(tmp_path / "x").document_ends.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("kind", ["bytes", "around", "metaspace"])
@pytest.mark.parametrize("end", [False, True])
def test_ids_are_those_of_the_tokenizer(tmp_path: Path, tokenizers: dict[str, Any], kind: str, end: bool) -> None:
    tokenizer = tokenizers[kind]
    texts = [*TEXTS, *(str(text) for text in encoding.HARD)]
    tokens = opened(lines(tmp_path / "a.jsonl", texts), tokenizer, tmp_path, end_of_document=end)
    expected = [tokenizer(text)["input_ids"] for text in texts]
    assert rows(tokens) == [[*ids, tokenizer.eos_token_id] if end and ids else ids for ids in expected]


@pytest.mark.parametrize("kind", ["bytes", "around", "metaspace"])
def test_every_back_end_gives_the_same_ids(tmp_path: Path, tokenizers: dict[str, Any], kind: str) -> None:
    """gigatoken, where it takes the tokenizer at all, is indistinguishable over many pieces and processes."""
    pytest.importorskip("gigatoken")
    corpus = source_texts()
    made = {}
    for back_end in ("tokenizers", "auto"):
        folder = tmp_path / back_end
        made[back_end] = opened(lines(tmp_path / "a.jsonl", corpus), tokenizers[kind], folder, back_end=back_end)
    assert np.array_equal(made["auto"].file.ids, made["tokenizers"].file.ids)
    assert np.array_equal(made["auto"].file.document_ends, made["tokenizers"].file.document_ends)


def test_a_back_end_with_other_ids_is_found_out(plain: Any, tokenizers: dict[str, Any]) -> None:
    """Both ways are compared id by id on a part of each list of texts."""
    pytest.importorskip("gigatoken")
    fast = encoding.Gigatoken(identity.state_of(plain, False))
    fast.encode(["same ids"])
    fast.reference = encoding.HuggingFace(identity.state_of(tokenizers["around"], False))
    with pytest.raises(encoding.Differs):
        fast.encode(["other ids"])


def source_texts() -> list[str]:
    """A few megabytes: several pieces."""
    found = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    return [text for text in found if text][:100]


def test_pieces_are_joined_in_order(tmp_path: Path, plain: Any) -> None:
    """Several processes, one order: that of the files and of the lines in them."""
    texts = source_texts()
    first, second = lines(tmp_path / "a.jsonl", texts[:60]), lines(tmp_path / "b.jsonl", texts[60:])
    corpus = cache.Corpus((first, second))
    assert len(documents.plan(corpus.files, "text", True, 1 << 20)) > 3
    tokens = cache.open_tokens(corpus, plain, tmp_path, ALONE)
    assert rows(tokens) == plain(texts)["input_ids"]


def test_each_kind_of_file_holds_the_same_documents(tmp_path: Path, plain: Any) -> None:
    """JSON lines, a JSON array, CSV, Parquet, Arrow of `datasets`, and the first three compressed."""
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS})
    made = [lines(tmp_path / "a.jsonl"), tmp_path / "a.json", tmp_path / "a.csv", tmp_path / "a.parquet"]
    made[1].write_text(json.dumps([{"text": text} for text in TEXTS]))
    table.to_csv(str(made[2]), index=False)
    table.to_parquet(str(made[3]))
    for path in made[:3]:
        made.append(path.with_name(f"{path.name}.gz"))
        made[-1].write_bytes(gzip.compress(path.read_bytes()))
    expected = plain(TEXTS)["input_ids"]
    for path in made:
        assert rows(opened(path, plain, tmp_path)) == expected, path.name
    table.save_to_disk(str(tmp_path / "saved"))
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    for dataset in (saved, saved.select([0, 2, 4]), table):
        tokens = cache.open_tokens(cache.of_rows(dataset, "text", tmp_path), plain, tmp_path, ALONE)
        assert rows(tokens) == plain(dataset["text"][:])["input_ids"]


def test_a_line_of_a_text_file_is_a_document_with_its_end(tmp_path: Path, plain: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\nthree")
    expected = {True: ["one\n", "\n", "two\n", "three"], False: ["one", "", "two", "three"]}
    for line_ends, texts in expected.items():
        corpus = cache.Corpus((tmp_path / "a.txt",), line_ends=line_ends)
        assert rows(cache.open_tokens(corpus, plain, tmp_path, ALONE)) == plain(texts)["input_ids"]


@given(texts=st.lists(st.text(max_size=30), max_size=40), piece_bytes=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_hold_each_document_once(tmp_path_factory: Any, texts: list[str], piece_bytes: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a.jsonl"
    path.write_text("\n\n" + "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    pieces = documents.plan((path,), "text", True, piece_bytes)
    assert [text for piece in pieces for batch in documents.read(piece) for text in batch] == texts


def test_another_text_tokenizer_or_option_has_another_cache(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    """And the same ones find it again, without writing."""
    plain, path = tokenizers["bytes"], lines(tmp_path / "a.jsonl")
    first = opened(path, plain, tmp_path).file.prefix
    written = first.with_suffix(".bin").stat().st_mtime_ns
    assert opened(lines(tmp_path / "b.jsonl"), plain, tmp_path).file.prefix == first, "the path is no part of the key"
    assert first.with_suffix(".bin").stat().st_mtime_ns == written
    others = {
        opened(path, plain, tmp_path, end_of_document=True).file.prefix,
        opened(path, tokenizers["around"], tmp_path).file.prefix,
        opened(lines(path, [*TEXTS[:-1], "other"]), plain, tmp_path).file.prefix,
    }
    assert len(others | {first}) == 4


def test_a_file_changed_to_the_same_size_is_noticed(tmp_path: Path, plain: Any) -> None:
    """What is remembered of a file goes with its times, and a young file is read again."""
    path = lines(tmp_path / "a.jsonl", ["aaaa"])
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))
    first = opened(path, plain, tmp_path)
    assert list((tmp_path / "identities").iterdir()), "the digest of a settled file is kept"
    lines(path, ["bbbb"])
    os.utime(path, (long_ago, long_ago))
    assert rows(opened(path, plain, tmp_path)) == [plain("bbbb")["input_ids"]] != rows(first)


def test_truncation_of_the_tokenizer_is_left_out_and_left_alone(tmp_path: Path, plain: Any) -> None:
    path = lines(tmp_path / "a.jsonl", ["word " * 100])
    first = opened(path, plain, tmp_path)
    plain.backend_tokenizer.enable_truncation(7)
    try:
        second = opened(path, plain, tmp_path)
        assert plain.backend_tokenizer.truncation["max_length"] == 7
    finally:
        plain.backend_tokenizer.no_truncation()
    assert first.file.prefix == second.file.prefix
    assert second.tokens > 90


@pytest.mark.parametrize("damage", ["truncated", "without index"])
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, plain: Any, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "a.jsonl")
    first = opened(path, plain, tmp_path)
    expected, prefix = rows(first), first.file.prefix
    if damage == "truncated":
        os.truncate(prefix.with_suffix(".bin"), 11)
    else:
        prefix.with_suffix(".idx").unlink()
    assert rows(opened(path, plain, tmp_path)) == expected
    assert "is damaged" in capsys.readouterr().out
    assert not list(tmp_path.glob(".tokens-*.partial"))


BUILDER = """
import sys
from pathlib import Path
sys.path.insert(0, {jobs!r})
from tokenizers import Tokenizer
from training.token_cache import cache
from training.processes import Processes

class Fast:  # what the cache asks of a tokenizer of transformers, without importing it
    eos_token_id = 0
    def __init__(self, path):
        self.backend_tokenizer = Tokenizer.from_file(path)
    def __len__(self):
        return self.backend_tokenizer.get_vocab_size()
    def __call__(self, texts, **_):
        return {{"input_ids": [row.ids for row in self.backend_tokenizer.encode_batch(texts)]}}

folder, data = Path(sys.argv[1]), Path(sys.argv[2])
tokens = cache.open_tokens(cache.Corpus((data,)), Fast(sys.argv[3]), folder, Processes(0, 0, 1, 1, "alone"),
                           back_end="tokenizers")
print(tokens.tokens)
"""


@pytest.fixture
def builder(tmp_path: Path, plain: Any) -> Iterator[Any]:
    """Starts processes that build a cache of some megabytes."""
    lines(tmp_path / "a.jsonl", source_texts())
    plain.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    script = BUILDER.format(jobs=str(JOBS))
    words = (sys.executable, "-c", script, str(tmp_path), str(tmp_path / "a.jsonl"), str(tmp_path / "tokenizer.json"))
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_build_that_is_killed_leaves_nothing_half(tmp_path: Path, builder: Any, plain: Any) -> None:
    """kill -9 while pieces are joined: no cache is seen, its processes end, and the next build is whole."""
    first = builder()
    until(lambda: any(path.stat().st_size for path in tmp_path.glob(".tokens-*.partial/text.bin")))
    children = children_of(first.pid)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not list(tmp_path.glob("tokens-*"))
    assert children
    until(lambda: not any(running(child) for child in children), "the processes that encode to end with their parent")
    left = next(iter(tmp_path.glob(".tokens-*.partial")))
    for path in (*left.iterdir(), left):
        os.utime(path, (0, 0))
    second = builder()
    assert second.communicate()[0] and second.returncode == 0
    assert rows(opened(tmp_path / "a.jsonl", plain, tmp_path)) == plain(source_texts())["input_ids"]
    assert not list(tmp_path.glob(".tokens-*.partial")), "what the killed one has left is gone once it is old"


def children_of(pid: int) -> list[int]:
    """Those of all its threads."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_builders_at_once_do_the_work_once(tmp_path: Path, builder: Any) -> None:
    both = [builder(), builder()]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("tokenized " in output for output in outputs) == [False, True]
    assert len(list(tmp_path.glob("tokens-*"))) == 1
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]


def test_blocks_are_the_tokens_one_after_the_other(tmp_path: Path, plain: Any) -> None:
    """Every token once, in order, in blocks of one length; only what is behind the last whole one is left out."""
    texts = source_texts()[:50]
    tokens = opened(lines(tmp_path / "a.jsonl", texts), plain, tmp_path)
    stream = [token for text in texts for token in plain(text)["input_ids"]]
    found = tokens.blocks(64)
    assert len(found) == len(stream) // 64
    for number in (0, 1, len(found) // 2, len(found) - 1, -1):
        start = (number % len(found)) * 64
        assert found[number]["input_ids"].tolist() == stream[start : start + 64]
        assert found[number]["labels"].dtype == np.int64
    with pytest.raises(IndexError):
        found[len(found)]
    first, second = tokens.split(30)
    assert (len(first), len(second)) == (15, 35)
    assert first.blocks(64)[0]["input_ids"].tolist() == stream[:64]
    assert second.blocks(64)[0]["input_ids"].tolist() == stream[first.tokens : first.tokens + 64]


@pytest.mark.parametrize("kind", ["bytes", "around"])
@pytest.mark.parametrize("end", [False, True])
def test_a_stream_has_the_same_tokens_of_empty_documents(
    tmp_path: Path, tokenizers: dict[str, Any], kind: str, end: bool
) -> None:
    """Some tokenizers put a token around nothing too, as those that begin each text with one."""
    import datasets

    documents = ["one", "", "two", "", "", "three"] * 5
    tokenizer = tokenizers[kind]
    tokens = opened(lines(tmp_path / "a.jsonl", documents), tokenizer, tmp_path, end_of_document=end).blocks(4)
    rows = datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset()
    stream = Stream(text.Text("numbers", "text", rows=rows), tokenizer, 4, end, None)
    assert [block["input_ids"].tolist() for block in stream] == [block["input_ids"].tolist() for block in tokens]


def test_a_block_is_read_where_it_lies(tmp_path: Path, plain: Any) -> None:
    """The ids are a map of the file, and another process is told its name, not its bytes."""
    tokens = opened(lines(tmp_path / "a.jsonl", source_texts()), plain, tmp_path)
    assert isinstance(tokens.file.ids, np.memmap)
    found = tokens.blocks(32)
    sent = pickle.dumps(found)
    assert len(sent) < 2000 < tokens.file.ids.nbytes
    assert pickle.loads(sent)[5]["input_ids"].tolist() == found[5]["input_ids"].tolist()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"txt": "one"}\n', "has no column 'text' (did you mean 'txt'?)"),
        ("a.jsonl", '{"text": 3}\n', "is not text"),
        ("a.jsonl", '{"text": "a"}\n{broken\n', "line 2 is not JSON: '{broken'"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.csv", "txt\none\n", "has no column 'text'"),
        ("a.json", '[{"txt": "one"}]', "has no column 'text'"),
        ("a.txt", "", "is empty"),
        ("a.docx", "x", "cannot read"),
        ("b.jsonl", None, "cannot read"),
    ],
)
def test_text_that_cannot_be_read_is_refused(
    tmp_path: Path, plain: Any, name: str, text: str | None, expected: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(JobError) as caught:
        opened(tmp_path / name, plain, tmp_path)
    assert expected in caught.value.what
    assert not [path for path in tmp_path.glob("*tokens-*") if path.suffix != ".lock"]


LINES = "text\n" + "a line of text\n" * 5000


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", LINES.encode() + "Gr\xfc\xdfe\n".encode("latin-1"), "is not UTF-8"),
        ("a.json", b'[{"text": "' + "Gr\xfc\xdfe".encode("latin-1") + b'"}]', "is not UTF-8"),
        ("a.csv.gz", gzip.compress(LINES.encode())[:-12], "cannot decompress"),
        ("a.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 20, "cannot read"),
        ("a.parquet", b"PAR1" + bytes(100), "cannot read"),
        ("a.arrow", bytes(100), "cannot read"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_a_damaged_file_is_one_clear_error(
    tmp_path: Path, plain: Any, name: str, content: bytes, expected: str
) -> None:
    """The damage can lie far behind the first row, which decides the column."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        text.first_row(path)
        opened(path, plain, tmp_path)
    assert expected in caught.value.what
    with pytest.raises(JobError):
        opened(path, plain, tmp_path)


def end_this_process(*_: Any) -> None:
    os._exit(1)


def test_an_error_in_another_process_is_the_same_error_here(tmp_path: Path, plain: Any) -> None:
    path = lines(tmp_path / "a.jsonl", source_texts())
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(JobError, match=r"line 101 is not JSON: '{broken'"):
        opened(path, plain, tmp_path)


def test_a_process_that_ends_is_an_error_that_says_so(
    tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_encode", end_this_process)
    pieces = documents.plan((lines(tmp_path / "a.jsonl", source_texts()),), "text", True, 1 << 20)
    with pytest.raises(JobError, match="a process that tokenizes text has died"):
        building.build(tmp_path / "made", pieces, identity.state_of(plain, False), "tokenizers", 2, {"files": []})
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_in_python_is_refused(tmp_path: Path) -> None:
    class Slow:
        eos_token_id = 0

    with pytest.raises(JobError, match=r"is not a fast tokenizer"):
        opened(lines(tmp_path / "a.jsonl"), Slow(), tmp_path)


RANK = """
import sys
sys.path.insert(0, {jobs!r})
import os
from datetime import timedelta
from pathlib import Path
import torch.distributed
from training import errors, processes
from training.token_cache import cache
from transformers import PreTrainedTokenizerFast

def main():
    with errors.reported("rank", Path(sys.argv[1])):
        peers = processes.from_environment(os.environ)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
        cache.BEAT_SECONDS = 0.2
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[3])
        tokens = cache.open_tokens(cache.Corpus((Path(sys.argv[2]),)), tokenizer, Path(sys.argv[1]), peers)
        sys.stdout.write(f"rank {{peers.rank}}: {{tokens.tokens}} {{tokens.file.prefix}}\\n")
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("good", [True, False])
def test_all_ranks_have_the_file_that_one_has_made(tmp_path: Path, plain: Any, launcher: Any, good: bool) -> None:
    """The error of rank 0 is the error of all: nobody waits."""
    path = lines(tmp_path / "a.jsonl", source_texts() if good else [])
    (tmp_path / "rank.py").write_text(RANK.format(jobs=str(JOBS)))
    plain.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"),
        *(str(tmp_path / "rank.py"), str(tmp_path), str(path), str(tmp_path / "tokenizer.json")),
    )
    environment = launcher.environment(tmp_path / "run")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if good:
        said = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank ")}
        assert done.returncode == 0 and len(said) == 1, done.stdout + done.stderr
        assert done.stdout.count("tokenized ") == 1
    else:
        assert done.returncode != 0
        assert "is empty" in done.stderr


def test_a_job_before_makes_the_cache_that_clm_would_make(tmp_path: Path, plain: Any, launcher: Any) -> None:
    """On CPUs alone, by the same names of arguments; a second start finds it."""
    path = lines(tmp_path / "a.jsonl")
    plain.save_pretrained(str(tmp_path / "tokenizer"))
    words = (sys.executable, str(JOBS / "tokenize_data.py"), f"--train_file={path}", "--append_eos")
    command = (*words, f"--tokenizer_name={tmp_path / 'tokenizer'}")
    environment = {**launcher.environment(tmp_path / "run"), "RUNNER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    tokens = opened(
        path, type(plain).from_pretrained(str(tmp_path / "tokenizer")), tmp_path / "cache", end_of_document=True
    )
    assert done.stdout == f"{tokens.file.prefix.parent}\n"
