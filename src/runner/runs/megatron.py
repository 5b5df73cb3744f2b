"""The arguments of Megatron-LM's pretrain_gpt.py: complete them, and refuse those that would fail on the nodes.

Source: NVIDIA/Megatron-LM at core_v0.19.0, megatron/training/arguments.py and megatron/core/datasets.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from runner.errors import RunnerError, unknown
from runner.memory.megatron import SIZES, VOCABULARY, Layout, Work, estimate, gpt, layouts, problem
from runner.memory.shape import GIB, USABLE_GIB, Shape, fits_on, memory_bytes
from runner.project import page
from runner.runs.checks import OnHost
from runner.runs.hub import argument_values
from runner.runs.job import Job
from runner.site import Site

NAME = "megatron-gpt"
NOT_SWEPT = ("size", "benchmark")
"""arguments that Megatron does not know"""
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
"""arguments; in capitals, they are the names of the variables"""
DEFAULT_SIZE = "7.5B"
BATCH = 512
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
SAMPLES = (
    "--train-samples",
    "146484375",
    "--lr-decay-samples",
    "126953125",
    "--lr-warmup-samples",
    "183105",
)
BENCHMARK = ("--eval-iters", "0", "--split", "100,0,0", "--log-interval", "1", "--log-throughput")
RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)
NO_TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY))

Options = Mapping[str, str]


def complete(job: Job, site: Site, environ: Mapping[str, str]) -> tuple[Job, str]:
    """The job with all arguments that the program needs, and a sentence about its parallel sizes.

    Raises RunnerError for arguments that contradict each other or that Megatron would refuse.
    """
    if not job.resources.gpus_per_node:
        raise RunnerError(
            "Megatron needs GPUs", "the job requests none", "--gpus-per-node N, or another --site"
        )
    benchmark = ("--benchmark",) if "--benchmark" in job.arguments else ()
    words = _without(
        job.arguments, ("size", "save", "load", "save_interval") if benchmark else ("size",)
    )
    words += BENCHMARK if benchmark else ()
    options = argument_values((*job.arguments, *words))
    words += _length(options)
    evaluations = _number(options, "eval_iters", 100)
    if evaluations and "split" in options and not _shares(options)[1]:
        raise RunnerError(
            f"--split {options['split']} leaves no validation set for --eval-iters {evaluations}",
            "Megatron would fail at its first evaluation",
            "--eval-iters 0, or a split with validation data: --split 98,2,0",
        )
    if not {"bf16", "fp16"} & {*options}:
        words.append(
            "--fp16" if {"V100", "T4"} & {*re.split(r"[\s-]", site.gpu or "")} else "--bf16"
        )
    tokens = _number(options, "seq_length", 2048)
    numbers = _size(options, environ)
    layers, hidden, heads = numbers.values()
    if not layers * heads or (hidden % heads and "kv_channels" not in options):
        why = f"{heads} attention heads do not divide the hidden size {hidden}"
        fix = "change one of the two, or add --kv-channels N"
        if not layers * heads:
            why, fix = (
                f"it has {layers} layers and {heads} attention heads",
                "use 1 or more of each",
            )
        raise RunnerError("Megatron cannot build this model", why, fix)
    shape = gpt(layers, hidden, heads, tokens, _number(options, "vocab_size", VOCABULARY))
    layout, batch, why = _sizes(shape, job, site, options)
    numbers |= {"seq_length": tokens, "max_position_embeddings": tokens, "micro_batch_size": 1}
    numbers |= {"global_batch_size": batch, **dict(zip(PARALLEL, layout, strict=False))}
    words += [
        word
        for name, number in numbers.items()
        if name not in options
        for word in (_flag(name), str(number))
    ]
    if layout.tensor > 1 and "sequence_parallel" not in options:
        words.append("--sequence-parallel")
    words += RECOMPUTE if layout.recompute and "recompute_granularity" not in options else ()
    words += (
        NO_TOKENIZER
        if "mock_data" in options and not {"tokenizer_type", "vocab_file"} & {*options}
        else ()
    )
    return replace(job, arguments=(*benchmark, *words)), why


def check_files(job: Job, on_host: OnHost) -> None:
    """Raise RunnerError for missing vocabulary or data files, and for a set without documents."""
    options = argument_values(job.arguments)
    kind = options.get("tokenizer_type", "GPT2BPETokenizer")
    needed = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "NullTokenizer": ("vocab_size",)}
    for name in needed.get(kind, ("tokenizer_model",)):
        path = options.get(name, "")
        if not path:
            raise RunnerError(
                f"{kind} needs {_flag(name)}",
                "it is missing",
                f"{_flag(name)} …, or --tokenizer-type …",
            )
        if name != "vocab_size" and (kind != "HuggingFaceTokenizer" or path[0] in "/."):
            _need(path, _flag(name), on_host, folder=kind == "HuggingFaceTokenizer")
    prefixes = _data_paths(job.arguments)
    if not prefixes and not {
        "mock_data",
        "data_args_path",
        "train_data_path",
        "per_split_data_args_path",
    } & {*options}:
        raise RunnerError(
            "there is no training data",
            "neither --data-path nor --mock-data is given",
            "--data-path PREFIX; to make PREFIX.bin and PREFIX.idx: runner launch megatron-data -- --input FILE …",
        )
    for prefix in prefixes:
        _need(f"{prefix}.bin", "--data-path", on_host)
        index = _need(f"{prefix}.idx", "--data-path", on_host)
        if index is not None:
            _check_sets(prefix, index, options)


def _need(path: str, flag: str, on_host: OnHost, *, folder: bool = False) -> Path | None:
    """The file, or with `folder` also a folder, on this machine; None if this machine cannot see it."""
    here = on_host(path)
    if here is not None and not (here.is_file() or (folder and here.is_dir())):
        raise RunnerError(
            f"{flag}: the file {path} does not exist",
            f"on this machine, there is no file {here}; the program would fail minutes after its start",
            f"correct the path, or create the file first ({page('megatron')})",
        )
    return here


def _size(options: Options, environ: Mapping[str, str]) -> dict[str, int]:
    """Layers, hidden size and attention heads: from the arguments, or else from --size or the variables."""
    name = options.get("size")
    if name is not None and name not in SIZES:
        raise unknown(
            "size",
            name,
            SIZES,
            "--size NAME, or --num-layers, --hidden-size and --num-attention-heads",
        )
    size = dict(zip(SHAPE, SIZES[name or DEFAULT_SIZE], strict=True))
    variables = {key: environ[key.upper()] for key in SHAPE if environ.get(key.upper())}
    for key, text in variables.items():
        if name and text != str(size[key]):
            raise RunnerError(
                f"--size {name} contradicts the variable {key.upper()}={text}",
                f"{name} means {_flag(key)} {size[key]}",
                f"unset {key.upper()}, or leave out --size",
            )
    return {key: _number({**variables, **options}, key, size[key]) for key in SHAPE}


def _sizes(shape: Shape, job: Job, site: Site, options: Options) -> tuple[Layout, int, str]:
    """The parallel sizes, the global batch size, and a sentence that says why."""
    given = [_number(options, name, 0) for name in PARALLEL]
    recompute = options.get("recompute_granularity") == "full"
    asked = Layout(given[0] or 1, given[1] or 1, given[2] or 1, recompute)
    micro, batch = _number(options, "micro_batch_size", 1), _number(options, "global_batch_size", 0)
    work = Work(job.gpus, shape.positions, micro)
    if fault := problem(shape, asked, work):
        raise RunnerError("Megatron cannot split this model", fault, "change that size, or --nodes")
    fixed = all(given[:2])
    possible = [
        each
        for each in ([asked] if fixed else layouts(shape, job.resources.gpus_per_node, work))
        if all(size in (0, own) for size, own in zip(given, each[:3], strict=True))
        and (
            each.recompute == recompute
            or not {"recompute_granularity", "recompute_activations"} & {*options}
        )
    ]
    if not possible:
        raise RunnerError(
            "no parallel sizes fit those that you gave",
            "runner tries tensor parallel sizes up to the GPUs of a node, and context parallelism from 8192 tokens on",
            "give both --tensor-model-parallel-size and --pipeline-model-parallel-size",
        )
    possible = [
        each for each in possible if not batch or batch % (micro * (job.gpus // each.gpus)) == 0
    ]
    if not possible:
        raise RunnerError(
            f"no parallel sizes work with --global-batch-size {batch}",
            f"it must be a multiple of micro batch size ({micro}) x number of copies of the model on {job.gpus} GPUs",
            f"--global-batch-size {-(-batch // (micro * job.gpus)) * micro * job.gpus}",
        )
    known = memory_bytes(site.gpu or "")
    limit = known or USABLE_GIB["A100"] * GIB
    totals = {each: estimate(shape, each, work).total for each in possible}
    fitting = [each for each in possible if fits_on(totals[each], limit)]
    assumed = ""
    if known is None:
        cause = (
            f"the memory of {site.gpu} is not known"
            if site.gpu
            else f"site {site.name} does not set `gpu`"
        )
        assumed = f" (an A100 with 40 GB is assumed, because {cause})"
    if not fitting and not fixed:
        least = min(possible, key=lambda each: totals[each])
        raise RunnerError(
            f"the model needs more memory than {job.gpus} GPUs have",
            f"even the best split ({least.text}) needs {totals[least] / GIB:.0f} GiB per GPU, and some memory must "
            f"stay free; a GPU has {limit / GIB:.0f} GiB{assumed}",
            "more --nodes, or a smaller --size; to list the ways to split a model: runner memory --megatron SIZE "
            f"--gpus {job.gpus}",
        )
    chosen = fitting[0] if fitting else asked
    copies = micro * (job.gpus // chosen.gpus)
    reason = "as requested" if fixed else "the smallest sizes with which the model fits"
    why = f"{chosen.text}: {reason} (estimate: {totals[chosen] / GIB:.0f} of {limit / GIB:.0f} GiB per GPU){assumed}"
    return chosen, batch or -(-BATCH // copies) * copies, why


def _length(options: Options) -> tuple[str, ...]:
    """The arguments for the length, if none are given. Raises RunnerError for samples together with iterations."""
    units = ("samples", "iters")
    samples, iterations = (
        [name for name in options if re.fullmatch(f"(train|lr_.*)_{unit}", name)] for unit in units
    )
    if samples and iterations:
        raise RunnerError(
            f"{_flag(samples[0])} and {_flag(iterations[0])} exclude each other",
            "Megatron counts the length of a training run either in samples or in iterations",
            "use --train-samples, --lr-decay-samples and --lr-warmup-samples, or the same three with -iters",
        )
    if samples or iterations:
        return ()
    return ("--train-iters", "50") if "benchmark" in options else SAMPLES


def _check_sets(prefix: str, index: Path, options: Options) -> None:
    """Raise RunnerError for a set without documents: Megatron 0.19 would search it for samples forever."""
    with index.open("rb") as file:
        header = file.read(26)  # magic, version, type of the tokens, number of sequences
    if header[:9] != b"MMIDIDX\0\0" or len(header) < 26:
        raise RunnerError(
            f"{prefix}.idx is not a Megatron index",
            "its header is wrong",
            "runner launch megatron-data -- --input FILE --output-prefix PREFIX …; "
            "its log shows the value for --data-path",
        )
    (count,) = struct.unpack_from("<Q", header, 18)
    shares, end = _shares(options), 0
    for place, name in enumerate(("training", "validation", "test")):
        begin, end = end, round(sum(shares[: place + 1]) / sum(shares) * count)
        if shares[place] and begin == end:
            raise RunnerError(
                f"the {name} set of {prefix} is empty",
                f"the file has {count} documents, too few for the split {','.join(f'{each:g}' for each in shares)}",
                f"use more data, or another --split with a larger share (or 0) for the {name} set",
            )


def _shares(options: Options) -> list[float]:
    """The shares of the three sets. The default is Megatron's."""
    found = [
        float(text) for text in re.findall(r"\d+\.?\d*|\.\d+", options.get("split", "969,30,1"))
    ]
    return ([*found, 0.0, 0.0] if sum(found) else [1.0, 0.0, 0.0])[:3]


def _data_paths(words: Sequence[str]) -> list[str]:
    """The prefixes after --data-path, without the weights between them."""
    apart = [
        part
        for word in words
        for part in (word.split("=", 1) if word.startswith("--data-path=") else (word,))
    ]
    rest = apart[len(apart) - apart[::-1].index("--data-path") :] if "--data-path" in apart else ()
    paths = takewhile(lambda word: not word.startswith("--"), rest)
    return [path for path in paths if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", path)]


def _without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words without --benchmark, and without these arguments and their values."""
    flags = {_flag(name) for name in names}
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if before not in flags and word.partition("=")[0] not in {*flags, "--benchmark"}
    ]


def _number(options: Options, name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdigit():
        raise RunnerError(
            f"{_flag(name)} {text!r} is not a number",
            "it must be 0 or more",
            f"{_flag(name)} {default}" if default else f"give a number, or leave out {_flag(name)}",
        )
    return int(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
