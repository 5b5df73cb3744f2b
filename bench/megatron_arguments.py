"""Check the arguments of megatron-gpt with Megatron's own parser, and the parameter counts with its own model. No GPU.

    python3.13 -m venv /tmp/megatron && /tmp/megatron/bin/pip install megatron-core==0.19.2 torch==2.13.0 jinja2
    PYTHONPATH=src:. /tmp/megatron/bin/python bench/megatron_arguments.py

Needs Python 3.12 or newer. For each size, number of nodes and form, the arguments of `runner launch megatron-gpt` go
through megatron/training/arguments.py, as on an H100. So do those of the example jobs for T5, BERT and ICT.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path

import torch

from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.memory.megatron import SIZES, gpt
from runner.memory.shape import count_weights
from runner.project import find_project
from runner.runs.job import command_line
from runner.runs.launch import prepare
from runner.runs.plan import Request

ROOT = Path(__file__).parents[1]
ENVIRON = {"HOME": "/home/me", "USER": "me", "RUNNER_IMAGES": "/images", "PATH": "/nowhere"}
NODES = (1, 2, 3, 4, 16, 64, 240)
GPUS = 8
MORE = ("--eval-interval", "100", "--vocab-file", "/v.json", "--merge-file", "/m.txt")
FORMS: dict[str, tuple[str, ...]] = {
    "default": ("--data-path", "0.3", "/data/a", "0.7", "/data/b", *MORE),
    "benchmark": ("--benchmark", "--mock-data"),
    "iterations": ("--train-iters", "1000", "--lr-warmup-iters", "10", "--data-path", "/data/a", *MORE),
    "long": ("--seq-length", "16384", "--mock-data"),
    "fp16": ("--fp16", "--mock-data", "--recompute-activations"),
    "given": ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--mock-data"),
}


def words(job: str, nodes: int, more: tuple[str, ...]) -> tuple[str, ...]:
    """The words for Megatron's program, as the batch script would pass them."""
    given = command_line({"nodes": nodes, "gpus_per_node": GPUS})
    request = Request(job=job, site="aws-parallelcluster", engine="pyxis", words=more, given=given, dry_run=True)
    arguments = prepare(request, find_project(ROOT), ENVIRON, Quiet()).job.arguments
    return tuple(word.replace("{run}", "/runs/1") for word in arguments if word != "--benchmark")[1:]


EXAMPLES = {"megatron-t5": (), "megatron-bert": (), "megatron-ict": ("--titles-data-path", "/t", "--bert-load", "/b")}


def parsed(argv: tuple[str, ...], world_size: int) -> types.SimpleNamespace:
    """Megatron's arguments. Raises what Megatron raises."""
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = ["pretrain_gpt.py", *argv]
    os.environ["WORLD_SIZE"] = str(world_size)
    with contextlib.redirect_stdout(io.StringIO()):
        found = parse_args()
        validate_args(found, {"tokenizer_type": "GPT2BPETokenizer"})
    return found


def parameters(size: str) -> int:
    """The number of parameters of Megatron's own model, built on the meta device."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers, hidden, heads = SIZES[size]
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, use_cpu_initialization=True,
        perform_initialization=False, params_dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(
            config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=50304,
            max_sequence_length=2048, share_embeddings_and_output_weights=True,
        )  # fmt: skip
    return sum(each.numel() for each in model.parameters())


def check_arguments() -> tuple[int, int]:
    """(accepted, refused by runner) over all sizes, nodes and forms."""
    accepted = refused = 0
    for size, nodes, form in itertools.product(SIZES, NODES, FORMS):
        try:
            argv = words("megatron-gpt", nodes, ("--size", size, *FORMS[form]))
        except RunnerError:
            refused += 1
            continue
        found = parsed(argv, nodes * GPUS)
        assert found.exit_signal_handler and found.exit_signal.name == "SIGUSR2"
        assert (found.num_layers, found.hidden_size, found.num_attention_heads) == SIZES[size]
        assert (found.eval_iters == 0) == (form == "benchmark")
        accepted += 1
    return accepted, refused


def check_examples() -> None:
    for job, more in EXAMPLES.items():
        parsed(words(job, 1, ("--data-path", "/data/a", "--vocab-file", "/v.txt", *more)), GPUS)
        print(f"{job}: Megatron's parser accepts the command line")


def check_parameters() -> None:
    """Compare the parameter counts of all sizes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/meet")
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        for size in SIZES:
            own, estimated = parameters(size), count_weights(gpt(*SIZES[size], 2048)).total
            print(f"{size:>7}: Megatron {own:>15,}, runner {estimated:>15,}")
            assert own == estimated
        torch.distributed.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    torch.cuda.current_device = lambda: torch.device("meta")
    accepted, refused = check_arguments()
    print(f"megatron-gpt: Megatron's parser accepts all {accepted} command lines; runner refused {refused} before")
    check_examples()
    check_parameters()


if __name__ == "__main__":
    main()
