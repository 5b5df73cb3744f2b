"""memory: estimate what a training run needs on each GPU."""

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import Verbs, add_verb, runs_folder
from runner.detection import find_site
from runner.errors import RunnerError
from runner.memory import megatron
from runner.memory.estimate import Estimate, Plan, Zero, estimate, read
from runner.memory.shape import (
    USABLE_GIB,
    Shape,
    count_weights,
    find_config,
    fits_on,
    make_shape,
    memory_bytes,
    parse_size,
    read_config,
)
from runner.project import find_project

SHAPE_FLAGS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# what --megatron takes into account
_OF_MEGATRON = {
    "--megatron",
    "--gpus",
    "--gpu",
    "--gpu-memory",
    "--gpu_memory",
    "--length",
    "--micro-batch",
    "--micro_batch",
    "--json",
    "--wide",
    "--site",
    "--verbose",
}
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    verb = add_verb(subparsers, common, "memory", "memory:show_memory")
    shape = verb.add_argument_group(
        "shape of the model, in place of MODEL or of values in its config"
    )
    shape.add_argument("--model_type", metavar="NAME", help="llama, gpt2, mistral, qwen2, gemma …")
    for name in SHAPE_FLAGS:
        shape.add_argument(f"--{name}", type=int, metavar="N")
    shape.add_argument("--tie_word_embeddings", action="store_const", const=True)


def show_memory(args: argparse.Namespace, console: Console) -> int:
    """`runner memory`: print a line per configuration and micro batch. Exit code 1 if none fits the given GPU."""
    for name in ("gpus", "accumulation"):
        if getattr(args, name) < 1:
            raise RunnerError(
                f"--{name} {getattr(args, name)} is too small",
                "it must be 1 or more",
                f"--{name} 1",
            )
    if args.megatron:
        return _show_megatron(args, console)
    shape = _shape(args)
    length = args.length or min(2048, shape.positions or 2048)
    if shape.positions and length > shape.positions:
        raise RunnerError(
            f"--length {length} is too long for the model",
            f"it supports at most {shape.positions} tokens per sequence",
            f"--length {shape.positions}",
        )
    plan = Plan(
        args.gpus,
        1,
        length,
        args.accumulation,
        WIDTHS[args.dtype],
        args.attention,
        args.activation_checkpointing,
        args.lora_r,
    )
    found = [
        estimate(shape, zero, replace(plan, micro_batch=micro))
        for zero in _zeros(args.deepspeed, shape)
        for micro in _micro_batches(args.micro_batch)
    ]
    gpu = _gpu_bytes(args)
    fits = _fits(found, gpu)
    weights = count_weights(shape, lora_r=args.lora_r)
    if args.json:
        head = {
            "model": shape.name,
            "parameters": weights.total,
            "trained": weights.trained,
            "gpus": plan.gpus,
            "length": length,
        }
        parts = [
            {**asdict(each), "total": each.total, "fits": fit}
            for each, fit in zip(found, fits, strict=True)
        ]
        console.answer_json({**head, "gpu_bytes": gpu, "estimates": parts})
    else:
        trained = f", {weights.lora:,} trained" if args.lora_r else ""
        console.say(
            f"{shape.name}: {weights.total:,} parameters{trained}; {_gpus(args.gpus)}, {length} tokens per sequence,"
            f" {args.dtype}, {args.attention}{', activation checkpointing' if args.activation_checkpointing else ''};"
            " GiB per GPU:"
        )
        names = ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "total")
        rows = [
            (
                each.zero,
                str(each.micro_batch),
                *(_gib(getattr(each, name)) for name in names),
                each.moment,
                FITS[fit],
            )
            for each, fit in zip(found, fits, strict=True)
        ]
        console.table(HEAD, rows)
    return _verdict(found, fits, gpu, console)


HEAD = (
    "DEEPSPEED",
    "MICRO",
    "WEIGHTS",
    "GRADIENTS",
    "OPTIMIZER",
    "ACTIVATIONS",
    "LOGITS",
    "BUFFERS",
    "TOTAL",
    "WORST AT",
    "FITS",
)
FITS = {True: "yes", False: "no", None: "?"}
MOST_ROWS = 12


def _show_megatron(args: argparse.Namespace, console: Console) -> int:
    """Print a line per way to split Megatron's GPT, in the order in which `launch` tries them."""
    given = [word.partition("=")[0] for word in args.typed if word.startswith("--")]
    ignored = [*filter(None, [args.model]), *(name for name in given if name not in _OF_MEGATRON)]
    if ignored:
        raise RunnerError(
            f"{ignored[0]} has no effect with --megatron",
            "SIZE is the model, and the estimate is for Megatron's usual settings",
            f"leave out {', '.join(ignored)}",
            exit_code=2,
        )
    own = args.megatron.split(",")
    size = (
        tuple(map(int, own))
        if len(own) == 3 and all(map(str.isdigit, own))
        else megatron.SIZES.get(args.megatron)
    )
    length, gpu = args.length or 2048, _gpu_bytes(args)
    per_node = find_site(args.site, os.environ)[0].gpus_per_node or 8
    micro, *more = _micro_batches(args.micro_batch)
    if more and {"--micro-batch", "--micro_batch"} & {*given}:
        raise RunnerError(
            f"--micro-batch {args.micro_batch} cannot be used with --megatron",
            "each row of its table is one layout of the model, for a single micro batch size",
            f"--micro-batch {micro}",
            exit_code=2,
        )
    work = megatron.Work(args.gpus, length, micro)
    found = []
    if size and all(size) and size[1] % size[2] == 0:
        shape = megatron.gpt(size[0], size[1], size[2], length)
        found = [
            megatron.estimate(shape, each, work)
            for each in megatron.layouts(shape, min(args.gpus, per_node), work)
        ]
    if not found:
        raise RunnerError(
            f"--megatron {args.megatron} is not a size",
            f"a size is {', '.join(megatron.SIZES)} or LAYERS,HIDDEN,HEADS, where HEADS divides HIDDEN",
            "--megatron 7.5B",
        )
    fits = _fits(found, gpu)
    start = max(0, min(fits.index(True) - 3 if True in fits else 0, len(found) - MOST_ROWS))
    shown = list(zip(found, fits, strict=True))[start : start + MOST_ROWS]
    parameters = count_weights(shape).total
    if args.json:
        parts = [
            {**asdict(each), "layout": each.layout._asdict(), "total": each.total, "fits": fit}
            for each, fit in shown
        ]
        console.answer_json({"parameters": parameters, "gpu_bytes": gpu, "estimates": parts})
    else:
        console.say(f"{parameters:,} parameters; {_gpus(args.gpus)}; GiB per GPU:")
        names = ("weights", "gradients", "optimizer", "activations", "logits", "total")
        rows = [
            (
                *map(str, each.layout[:3]),
                "full" if each.layout.recompute else "no",
                *(_gib(getattr(each, name)) for name in names),
                FITS[fit],
            )
            for each, fit in shown
        ]
        console.table(
            (
                "TENSOR",
                "PIPELINE",
                "CONTEXT",
                "RECOMPUTE",
                *(name.upper() for name in names),
                "FITS",
            ),
            rows,
        )
    return int(gpu is not None and True not in fits)


def _fits(
    found: Sequence[Estimate] | Sequence[megatron.Estimate], gpu: int | None
) -> list[bool | None]:
    """Whether each estimate fits on the GPU; None if its memory is not known."""
    return [fits_on(each.total, gpu) if gpu else None for each in found]


def _shape(args: argparse.Namespace) -> Shape:
    given = {
        name: value
        for name in (*SHAPE_FLAGS, "model_type", "tie_word_embeddings")
        if (value := getattr(args, name)) is not None
    }
    if args.model is None:
        if not given:
            raise RunnerError(
                "no model is given",
                "the estimate depends on the model's shape",
                "runner memory MODEL, or give the shape: --hidden_size N … (flags: runner memory --help)",
                exit_code=2,
            )
        return make_shape(given, "the options")
    config = find_config(args.model, os.environ, _prefetched(args.site))
    return make_shape({**read_config(config), **given}, args.model)


def _prefetched(site: str | None) -> Path | None:
    """The folder into which `runner prefetch` downloads models."""
    from runner.runs import hub

    with suppress(
        RunnerError
    ):  # the site's folder may contain a variable that is not set on this machine
        given = {**hub.hub_variables(os.environ), **find_site(site, os.environ)[0].env}
        return hub.hub_home(given, runs_folder(site), os.environ) / "hub"
    return None


def _zeros(text: str, shape: Shape) -> list[Zero]:
    project = find_project()
    presets = project.names("jobs/deepspeed")
    found = [(name, Path(name)) for name in text.split(",") if name]
    paths = [
        path if path.is_file() and name not in presets else project.find("jobs/deepspeed", name)
        for name, path in found
    ]
    return [read(path, shape.hidden) for path in paths]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _micro_batches(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise RunnerError(
            f"--micro-batch {text!r} is not a list of numbers",
            "each number must be 1 or more",
            "--micro-batch 1,2,4",
        )
    return [int(word) for word in words]


def _gpu_bytes(args: argparse.Namespace) -> int | None:
    if args.gpu_memory:
        return parse_size(args.gpu_memory)
    if args.gpu:
        found = memory_bytes(args.gpu)
        if found is None:
            raise RunnerError(
                f"runner does not know the memory size of GPU {args.gpu!r}",
                f"known GPUs: {', '.join(USABLE_GIB)}",
                "give the size, for example --gpu-memory 80GiB",
            )
        return found
    site, _ = find_site(args.site, os.environ)
    return memory_bytes(site.gpu) if site.gpu else None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f}"


def _verdict(
    found: list[Estimate], fits: list[bool | None], gpu: int | None, console: Console
) -> int:
    if host := max(each.host for each in found):
        console.say(f"offload needs up to {_gib(host)} GiB of host memory per GPU")
    if gpu is None:
        console.say("to see which settings fit: --gpu NAME or --gpu-memory SIZE")
        return 0
    console.say(
        f"FITS is yes if 1.05 x TOTAL + 1.5 GiB is at most the GPU's memory of {_gib(gpu)} GiB"
    )
    if True in fits:
        return 0
    console.say(
        "nothing fits: try --activation-checkpointing, a shorter --length, --deepspeed zero3-offload, or more --gpus"
    )
    return 1
