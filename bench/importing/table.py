"""The results as Markdown, as docs/benchmarks.md has them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.importing.ways import WAYS

COLUMNS = ("wall_s", "cpu_s", "memory_mib", "written_mib", "output_mib")


def render(results: Mapping[str, Any]) -> str:
    """All the parts that were measured."""
    return "\n\n".join("\n".join(part) for part in _parts(results))


def _parts(results: Mapping[str, Any]) -> Iterator[list[str]]:
    told = results["machine"]
    yield [
        f"{told['processor']}, {told['cores']} cores, {told['memory']}, Linux {told['kernel']}, {told['disk']};"
        f" gzip layers of {', '.join(map(str, results['image']['gzip_mb']))} MB"
    ]
    if "check" in results:
        wrong = results["check"]["differences"]
        yield [f"{results['check']['entries']:,} entries beside what umoci unpacks: {len(wrong)} differences"]
    if "ways" in results:
        yield _ways(results["ways"])
        if "floor" in results:
            yield _floor(results)
        yield _ratios(results["ways"], floors_s(results))
    if "scaling" in results:
        rows = [(cores, f"{seconds:.1f}") for cores, seconds in results["scaling"].items()]
        yield table(("cores", "wall s"), rows)
    if "reading" in results:
        yield _reading(results["reading"])
    if "memory" in results:
        yield _memory(results["memory"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown lines."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def medians(ways: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Way -> figure -> median of its runs."""
    return {
        name: {column: statistics.median(run[column] for run in runs) for column in COLUMNS}
        for name, runs in ways.items()
    }


def floors_s(results: Mapping[str, Any]) -> list[float]:
    """Wall seconds of the floor on this machine, of each round."""
    cores = int(results["machine"]["cores"])
    return [(found["inflate_s"] + found["compress_s"]) / cores for found in results.get("floor", ())]


def _ways(ways: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    head = ("way", "wall s", "min", "max", "CPU s", "memory MiB", "written MiB", "output MiB")
    rows = []
    for name, figures in medians(ways).items():
        walls = [run["wall_s"] for run in ways[name]]
        spread = (f"{figures['wall_s']:.1f}", f"{min(walls):.1f}", f"{max(walls):.1f}", f"{figures['cpu_s']:.0f}")
        rows.append((WAYS[name].title, *spread, *(f"{figures[column]:,.0f}" for column in COLUMNS[2:])))
    return table(head, rows)


def _floor(results: Mapping[str, Any]) -> list[str]:
    found = results["floor"][0]
    inflate, compress = (
        statistics.median(each[key] for each in results["floor"]) for key in ("inflate_s", "compress_s")
    )
    return [
        f"The floor: igzip of {found['plain_bytes'] / 1e9:.1f} GB {inflate:.1f} CPU s, zstd 1 of "
        f"{found['shown_bytes'] / 1e9:.1f} GB ({found['files']:,} entries) {compress:.1f} CPU s; on "
        f"{results['machine']['cores']} cores {statistics.median(floors_s(results)):.1f} s."
    ]


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The median of the rounds' ratios, and in brackets the least and the largest where there are several."""
    found = sorted(one / other for one, other in zip(above, below, strict=False))
    spread = f" ({found[0]:.2f} to {found[-1]:.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}{spread}"


def _ratios(ways: Mapping[str, Sequence[Mapping[str, float]]], floors: Sequence[float]) -> list[str]:
    """The goals, each with what was measured for the ways that ran, within each round."""
    found = medians(ways)
    wall = {name: [run["wall_s"] for run in runs] for name, runs in ways.items()}
    ours = [name for name in ("ours", "ours-digest", "ours-zstd") if name in found]
    rows: list[tuple[str, ...]] = []
    for text, other in (("faster than enroot's defaults (at least 6.5)", "enroot"),
                        ("faster than enroot with zstd 1 (at least 3.5)", "enroot-zstd")):  # fmt: skip
        if other in wall:
            rows.append((text, *(ratio(wall[other], wall[name]) for name in ours)))
    if floors:
        rows.append(("times the floor (at most 1.5)", *(ratio(wall[name], floors) for name in ours)))
    if "enroot" in found:
        theirs = found["enroot"]["output_mib"]
        rows.append(("output over enroot's (at most 0.6)", *(f"{found[n]['output_mib'] / theirs:.2f}" for n in ours)))
    shares = (f"{found[name]['written_mib'] / found[name]['output_mib']:.3f}" for name in ours)
    rows.append(("written over output (1)", *shares))
    lines = table(("goal", *(f"`{name}`" for name in ours)), rows)
    pairs = (
        ("last layer changed: faster than enroot, cache warm (at least 12)", "enroot-twin", "ours-twin"),
        ("last layer changed: times a plain copy (at most 2)", "ours-twin", "copy"),
    )
    more = [(text, ratio(wall[one], wall[other])) for text, one, other in pairs if {one, other} <= wall.keys()]
    return [*lines, "", *table(("goal", "measured"), more)]


def _reading(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Seconds, and in brackets their ratio to enroot's output."""
    names = list(next(iter(found.values())))
    rows = [
        (way, *(f"{seconds[name]:.2f} ({seconds[name] / seconds['enroot']:.2f})" for name in names))
        for way, seconds in found.items()
    ]
    return table(("cold `import torch`, s (ratio)", *names), rows)


def _memory(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            seen["image"],
            f"{seen['plain_gb']:.1f}",
            f"{seen['files']:,}",
            f"{seen['wall_s']:.1f}",
            f"{seen['memory_mib']:.0f}",
        )
        for seen in found
    ]
    lines = table(("image", "plain GB", "entries", "wall s", "memory MiB"), rows)
    by_name = {seen["image"]: seen for seen in found}
    few, many = by_name.get("100,000 small files"), by_name.get("500,000 small files")
    if few and many:
        more = (many["memory_mib"] - few["memory_mib"]) * 2**20 / (many["files"] - few["files"])
        lines += ["", f"Each further file: {more:.0f} bytes (at most 400)."]
    return lines
