"""`runner launch megatron-gpt`: the arguments are complete; what Megatron would refuse is refused before submission.

bench/megatron_arguments.py gives the same arguments to Megatron's own parser, which needs Python 3.12.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runner.cli import run
from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.memory.megatron import SIZES, Layout, Work, estimate, gpt, layouts, problem
from runner.memory.shape import GIB, count_weights
from runner.project import find_project
from runner.runs.hub import argument_values
from runner.runs.launch import prepare
from runner.runs.plan import Request, RunPlan
from runner.runs.run import Run, save
from runner.runs.sweep import parse, submit_sweep, with_values
from tests.runs.scripts import given
from tests.schemas import check

ROOT = Path(__file__).parents[2]
BARE = {"HOME": "/home/me", "USER": "me", "RUNNER_IMAGES": "/images", "PATH": "/nowhere"}
MOCK = ("--mock-data",)
ONE_GPU_EACH = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")


def planned(
    *words: str, nodes: int = 2, gpus: int = 8, report: Quiet | None = None, environ: Mapping[str, str] | None = None,
    site: str = "aws-parallelcluster",
) -> RunPlan:  # fmt: skip
    request = Request(
        job="megatron-gpt", site=site, engine="pyxis", words=words, dry_run=True,
        given=given(nodes=nodes, gpus_per_node=gpus, account="a"),
    )  # fmt: skip
    return prepare(request, find_project(ROOT), {**BARE, **(environ or {})}, report or Quiet())


def options(*words: str, **more: object) -> dict[str, str]:
    return argument_values(planned(*words, **more).job.arguments)  # type: ignore[arg-type]


def refused(*words: str, **more: object) -> str:
    with pytest.raises(RunnerError) as caught:
        planned(*words, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_its_parameters_and_the_sizes_divide(size: str) -> None:
    found = options("--size", size, *MOCK, nodes=240)
    layers, hidden, heads = SIZES[size]
    assert [found[name] for name in ("num_layers", "hidden_size", "num_attention_heads")] == [
        str(layers), str(hidden), str(heads),
    ]  # fmt: skip
    tensor, pipeline, context = (
        int(found[f"{name}_parallel_size"]) for name in ("tensor_model", "pipeline_model", "context")
    )
    assert not problem(gpt(layers, hidden, heads, 2048), Layout(tensor, pipeline, context), Work(1920))
    copies = 1920 // (tensor * pipeline * context)
    assert int(found["global_batch_size"]) % copies == 0
    assert "size" not in found
    billions = count_weights(gpt(layers, hidden, heads, 2048)).total / 1e9
    assert billions == pytest.approx(float(size[:-1]), rel=0.04)


@pytest.mark.training
@pytest.mark.parametrize("size", SIZES)
def test_the_parameter_count_is_that_of_a_model_on_the_meta_device(size: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    layers, hidden, heads = SIZES[size]
    config = transformers.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=2048, vocab_size=50304)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    own = sum(each.numel() for each in model.parameters())
    assert count_weights(gpt(layers, hidden, heads, 2048)).total == own


def test_variables_describe_the_model_as_in_the_batch_script_of_aws() -> None:
    variables = {"NUM_LAYERS": "64", "HIDDEN_SIZE": "8192", "NUM_ATTENTION_HEADS": "48"}
    why = refused(*MOCK, environ=variables)
    assert "48 attention heads do not divide the hidden size 8192" in why
    found = options(*MOCK, nodes=16, environ={**variables, "NUM_ATTENTION_HEADS": "64"})
    assert (found["num_layers"], found["num_attention_heads"]) == ("64", "64")
    found = options("--num-layers", "32", *MOCK, nodes=16, environ={**variables, "NUM_ATTENTION_HEADS": "64"})
    assert found["num_layers"] == "32", "an argument counts more than a variable"
    assert "--size 1.7B contradicts the variable NUM_LAYERS=64" in refused("--size", "1.7B", environ=variables)
    assert options(*MOCK)["hidden_size"] == "4096", "without a size: 7.5B"
    assert options("--kv-channels", "128", *MOCK, nodes=16, environ={**variables, "NUM_ATTENTION_HEADS": "48"})


def test_the_reason_for_the_sizes_is_shown() -> None:
    report = Quiet()
    found = planned("--size", "18.4B", *MOCK, report=report).job.arguments
    text = "\n".join(report.lines)
    assert "tensor parallel 8, pipeline parallel 1, context parallel 1: the smallest sizes" in text
    assert "because site aws-parallelcluster does not set `gpu`" in text
    assert "--sequence-parallel" in found
    larger = Quiet()
    assert argument_values(
        planned("--size", "18.4B", *MOCK, report=larger, site="alps-clariden", gpus=4).job.arguments
    )["tensor_model_parallel_size"] == "2"  # fmt: skip
    assert "of 94 GiB per GPU" in "\n".join(larger.lines)


def test_sizes_of_the_user_s_own_stay() -> None:
    own = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=4")
    found = planned("--size", "7.5B", *own, *MOCK).job.arguments
    assert found.count("--tensor-model-parallel-size") == 1 and "--pipeline-model-parallel-size" not in found
    found_options = options("--size", "7.5B", "--pipeline-model-parallel-size", "4", *MOCK)
    assert found_options["pipeline_model_parallel_size"] == "4"
    assert options("--recompute-granularity", "full", *MOCK)["recompute_granularity"] == "full"
    assert options("--seq-length", "32768", *MOCK, nodes=8)["max_position_embeddings"] == "32768"
    assert "fp16" in options("--fp16", *MOCK) and "bf16" not in options("--fp16", *MOCK)
    assert "fp16" in options("--size", "1.7B", *MOCK, site="twcc")


def test_a_benchmark_trains_only_and_saves_nothing() -> None:
    arguments = planned("--benchmark", "--size", "1.7B", *MOCK).job.arguments
    assert arguments[:2] == ("--benchmark", "pretrain_gpt.py")
    found = argument_values(arguments)
    assert (found["eval_iters"], found["split"], found["train_iters"]) == ("0", "100,0,0", "50")
    assert "log_throughput" in found and not {"save", "load", "train_samples"} & found.keys()
    assert options("--benchmark", "--train-samples", "5120", *MOCK)["train_samples"] == "5120"
    assert options(*MOCK)["save"] == "{run}/checkpoints"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "7.6B"), "there is no size '7.6B'"),
        (("--size", "many"), "the known names are 1.7B, 145.6B"),
        (("--train-samples", "9", "--train-iters", "9"), "--train-samples and --train-iters exclude each other"),
        (("--train-iters", "9", "--lr-warmup-samples", "9"), "--lr-warmup-samples and --train-iters exclude"),
        (("--split", "100,0,0"), "--split 100,0,0 leaves no validation set for --eval-iters 40"),
        (("--split", "98", "--eval-iters", "5"), "leaves no validation set for --eval-iters 5"),
        (("--tensor-model-parallel-size", "3"), "tensor parallel size 3 does not divide the 32 attention heads"),
        (("--pipeline-model-parallel-size", "5"), "pipeline parallel size 5 does not divide the 36 layers"),
        (("--tensor-model-parallel-size", "32"), "takes 32 x 1 x 1 GPUs, and 16 GPUs is not a multiple"),
        (("--context-parallel-size", "3"), "twice the context parallel size 3 does not divide the 2048 tokens"),
        ((*ONE_GPU_EACH, "--global-batch-size", "3"), "no parallel sizes work with --global-batch-size 3"),
        (("--tensor-model-parallel-size", "16", "--global-batch-size", "512"), "no parallel sizes fit those that"),
        (("--size", "310.1B"), "the model needs more memory than 16 GPUs have"),
        (("--micro-batch-size", "x"), "--micro-batch-size 'x' is not a number"),
    ],
)  # fmt: skip
def test_refused_before_submission(words: tuple[str, ...], message: str) -> None:
    assert message in refused(*words, *MOCK)


def test_without_gpus_it_is_refused() -> None:
    assert "Megatron needs GPUs" in refused(*MOCK, gpus=0)


def test_all_that_fits_is_tried_and_recomputation_comes_last() -> None:
    found = layouts(gpt(*SIZES["39.1B"], 2048), 8, Work(32))
    assert found[0] == Layout() and found[-1].recompute
    assert all(each.tensor in (1, 2, 4, 8) and each.context == 1 for each in found)
    assert any(each.context == 4 for each in layouts(gpt(*SIZES["39.1B"], 8192), 8, Work(32, 8192)))


@pytest.mark.parametrize(
    ("size", "tensor", "pipeline", "gpus"),
    [("1.7B", 1, 1, 32), ("7.5B", 4, 1, 128), ("39.1B", 8, 2, 512), ("310.1B", 8, 16, 1920)],
)
def test_the_layouts_of_the_paper_fit_on_its_gpus(size: str, tensor: int, pipeline: int, gpus: int) -> None:
    """Table 1 of the paper: A100 with 80 GB, all layers recomputed."""
    layout = Layout(tensor, pipeline, 1, recompute=True)
    assert estimate(gpt(*SIZES[size], 2048), layout, Work(gpus)).total < 40 * GIB


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with vocabulary files and data of 40 documents."""
    for name in ("vocab.json", "merges.txt", "text_document.bin"):
        (tmp_path / name).write_text("{}")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 40, 41)
    (tmp_path / "text_document.idx").write_bytes(header)
    return tmp_path


def on_host(folder: Path, *words: str) -> str:
    """The warning of a dry run without a container; empty if there is none."""
    request = Request(
        job="megatron-gpt", site="local", engine="host", words=words, dry_run=True, given=given(gpus_per_node=8),
    )  # fmt: skip
    notes = prepare(request, find_project(ROOT), {**BARE, "RUNNER_RUNS": str(folder / "runs")}, Quiet()).notes
    return "\n".join(note for note in notes if "--" in note or "set of" in note or "data" in note or "index" in note)


def test_missing_files_and_empty_sets(data: Path) -> None:
    vocabulary = ("--vocab-file", f"{data}/vocab.json", "--merge-file", f"{data}/merges.txt")
    corpus = ("--data-path", f"{data}/text_document")
    assert on_host(data, *vocabulary, *corpus) == ""
    assert on_host(data, *vocabulary, "--data-path", "0.3", corpus[1], "7e-1", corpus[1]) == ""
    assert f"--vocab-file: the file {data}/v" in on_host(data, "--vocab-file", f"{data}/v", *vocabulary[2:], *corpus)
    assert "GPT2BPETokenizer needs --merge-file" in on_host(data, *vocabulary[:2], *corpus)
    assert f"--merge-file: the file {data}/m.txt" in on_host(data, *vocabulary[:3], f"{data}/m.txt", *corpus)
    assert f"--data-path: the file {data}/other.bin" in on_host(data, *vocabulary, "--data-path", f"{data}/other")
    assert "there is no training data" in on_host(data, *vocabulary)
    assert on_host(data, *vocabulary, "--data-path", "/absent", f"--data-path={corpus[1]}") == "", "the last one counts"
    assert "the test set of" in on_host(data, *vocabulary, *corpus, "--split", "98,1.9,0.1")
    assert "the validation set of" in on_host(data, *vocabulary, *corpus, "--split", "99.9,0.1,0")
    (data / "text_document.idx").write_bytes(b"x" * 40)
    assert "text_document.idx is not a Megatron index" in on_host(data, *vocabulary, *corpus)
    model = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model")
    assert on_host(data, *model, "openai-community/gpt2", *MOCK) == ""
    assert on_host(data, *model, f"{data}", *MOCK) == "", "a folder that save_pretrained wrote"
    assert "--tokenizer-model: the file" in on_host(
        data, "--tokenizer-type", "Llama2Tokenizer", model[2], f"{data}", *MOCK
    )
    assert "--tokenizer-model: the file" in on_host(data, *model, f"{data}/absent", *MOCK)


def test_a_launch_is_refused_where_a_dry_run_only_warns(data: Path) -> None:
    words = ("--vocab-file", f"{data}/v.json", "--merge-file", f"{data}/merges.txt", *MOCK)
    request = Request(job="megatron-gpt", site="local", engine="host", words=words, given=given(gpus_per_node=8))
    environ = {**BARE, "RUNNER_RUNS": str(data / "runs")}
    with pytest.raises(RunnerError, match=r"--vocab-file: the file .*v\.json does not exist"):
        prepare(request, find_project(ROOT), environ, Quiet())
    earlier = data / "runs/megatron-data-0001"  # this run may create the file
    earlier.mkdir(parents=True)
    save(Run(earlier.name, earlier, "megatron-data", "local", "local", "2026-11-23T00:00:00Z"))
    plan = prepare(replace(request, after=(earlier.name,)), find_project(ROOT), environ, Quiet())
    assert any("v.json does not exist" in note for note in plan.notes)


def test_a_sweep_over_sizes_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    plan = planned("--size", "1.7B", *MOCK)
    assert with_values(plan, {"lr": "1e-4"}).job.arguments[-2:] == ("--lr", "1e-4")
    with pytest.raises(RunnerError, match="--sweep does not work with size"):
        submit_sweep(plan, parse(["size=1.7B,3.6B"], None), tmp_path, (), Quiet())
    assert list(tmp_path.glob("megatron*")) == []


# The last lines of real tracebacks: arguments.py and pretrain_gpt.py at core_v0.19.0; an older core.
LOGS = {
    "megatron-length": (
        '  File "/opt/megatron/megatron/training/arguments.py", line 1239, in validate_args\n'
        "    assert args.train_samples is None, \\\n"
        "AssertionError: expected iteration-based training\n"
    ),
    "megatron-empty-set": (
        '  File "/workspace/Megatron-LM/megatron/core/datasets/megatron_dataset.py", line 42, in __init__\n'
        "    assert num_samples > 0\nAssertionError\n"
    ),
    "parallel-sizes": (
        '  File "/opt/megatron/megatron/training/arguments.py", line 430, in validate_args\n'
        "    assert args.world_size % total_model_size == 0, (\n"
        "AssertionError: world size (16) is not divisible by total_model_size (total_model_size=12)\n"
    ),
    "nan-gradient": (
        '  File "/opt/megatron/megatron/core/rerun_state_machine.py", line 534, in validate_result\n'
        "    raise RuntimeError(full_message)\n"
        "RuntimeError: Rank 3, node nid001, device 3, iteration 12: Unexpected result nan "
        "(message='found NaN in local forward loss calculation')\n"
    ),
    "data-missing": (
        '  File "/opt/megatron/megatron/core/datasets/indexed_dataset.py", line 698, in initialize\n'
        "    assert os.path.exists(idx_path) and os.path.exists(bin_path), (\n"
        "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /data/x\n"
    ),
}


@pytest.mark.parametrize("code", LOGS)
def test_why_explains_errors_of_megatron(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = (
        '  File "/opt/megatron/megatron/training/training.py", line 4288, in evaluate\n    loss_dicts = forward(\n'
        '  File "/opt/megatron/pretrain_gpt.py", line 104, in get_batch\n    batch = next(data_iterator)\n'
        "TypeError: 'NoneType' object is not an iterator\n"
    )
    for text in (LOGS[code], evaluation) if code == "megatron-empty-set" else (LOGS[code],):
        (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{text}")
        run(["why", "--log", str(tmp_path / "log")])
        assert f"cause:    {code}: " in capsys.readouterr().out


def test_memory_shows_the_ways_to_split_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["memory", "--megatron", "18.4B", "--gpus", "16", "--gpu", "H100", "--json"]) == 0
    found = check("memory", capsys.readouterr().out)
    assert found["parameters"] == 18_444_251_136
    first = next(each for each in found["estimates"] if each["fits"])
    assert first["layout"] == {"tensor": 2, "pipeline": 1, "context": 1, "recompute": False}
    assert run(["memory", "--megatron", "30,3072,32", "--gpus", "8", "--gpu", "L4"]) == 0
    assert run(["memory", "--megatron", "310.1B", "--gpus", "8", "--gpu", "L4"]) == 1
    assert "TENSOR  PIPELINE  CONTEXT  RECOMPUTE  WEIGHTS" in capsys.readouterr().out
    for wrong in ("7.6B", "30,3072", "30,3072,7", "0,0,0"):
        assert run(["memory", "--megatron", wrong, "--gpus", "8"]) == 1
        assert f"--megatron {wrong} is not a size" in capsys.readouterr().err
    assert run(["memory", "--megatron", "7.5B", "--gpus", "0"]) == 1
    assert "--gpus 0 is too small" in capsys.readouterr().err
    assert run(["memory", "--megatron", "1.7B", "--micro_batch", "2,4"]) == 2
    assert "--micro-batch 2,4 cannot be used with --megatron" in capsys.readouterr().err
    assert run(["memory", "--megatron", "1.7B", "--micro-batch", "2", "--gpu", "H100", "--gpus", "1"]) == 0
    assert "parameters; 1 GPU; GiB" in capsys.readouterr().err
