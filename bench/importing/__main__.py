"""`./nox -s bench -- import [options]`: the ways from an image to a squashfs file, side by side, in turn.

Needs root (mounts, dropped caches) and the Debian packages that the session names. The image is made once and kept
in the work folder, which wants 30 GB. Results: a table on stdout and JSON in the work folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.importing import check, floor, layout, reading, sizes, table
from bench.importing.content import Content
from bench.importing.measure import Cost, measured
from bench.importing.ways import WAYS, Setting
from tests.figures import machine

PARTS = ("check", "floor", "ways", "scaling", "reading", "memory")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-bench"
    parser = argparse.ArgumentParser(prog="nox -s bench -- import", description=__doc__)
    parser.add_argument("--work", type=Path, default=cache, help=f"folder for images and results (default: {cache})")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {','.join(WAYS)}")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, in turn (default: 3)")
    parser.add_argument("--reads", type=int, default=10, help="cold imports of torch per file and mount (default: 10)")
    parser.add_argument("--images", default="", help="of the memory part, parted by semicolons (default: all)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run the parts that were asked for; write results.json and print the tables."""
    options = arguments(argv)
    if os.geteuid() != 0:
        raise SystemExit("the bench mounts and drops caches: run it as root")
    content = Content(options.work.resolve())
    content.work.mkdir(parents=True, exist_ok=True)
    image, twin = content.images()
    base = content.work / "run"
    setting = Setting(image, twin, base / "scratch", base / "cache", base / "previous/image.sqsh")
    results = earlier(content.work, {"machine": machine(content.work), "image": describe(image)})
    chosen = options.parts.split(",")
    rounds = [name for name in options.ways.split(",") if "ways" in chosen]
    if "floor" in chosen:
        results["floor"] = []
    for number in range(options.repeats if rounds else 1):
        if "floor" in chosen:  # again in each round: this machine's speed may change from minute to minute
            results["floor"].append(asdict(floor.measure(layout.layers_of(image))))
            print(results["floor"][-1], flush=True)
        if rounds:
            results["ways"] = run_round(rounds, setting, results["ways"] if number else {})
    if "check" in chosen:
        results["check"] = same_tree(setting)
    if "scaling" in chosen:
        results["scaling"] = scaling(setting, options.repeats)
    if "reading" in chosen:
        results["reading"] = read_cold(setting, options.reads)
    if "memory" in chosen:
        empty(setting.scratch)
        names = tuple(filter(None, options.images.split(";")))
        results["memory"] = [asdict(seen) for seen in sizes.measure_all(content, setting.scratch, names)]
    shutil.rmtree(setting.scratch, ignore_errors=True)
    (content.work / "results.json").write_text(json.dumps(results, indent=2))
    print(table.render(results))


def earlier(work: Path, told: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs found for other parts, of the same image on the same machine."""
    file = work / "results.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return found if all(found.get(key) == value for key, value in told.items()) else told


def describe(image: Path) -> dict[str, Any]:
    """The image's layers as the layout stores them, bottom first, in MB."""
    layers = layout.layers_of(image)
    return {"layers": len(layers), "gzip_mb": [round(layer.stat().st_size / 1e6) for layer in layers]}


def run_round(names: Iterable[str], setting: Setting, found: dict[str, Any]) -> dict[str, Any]:
    """Each way once more, in turn, added to what earlier rounds found."""
    for name in names:
        cost = one(name, setting)
        print(f"{name:<14}", {key: round(value, 1) for key, value in asdict(cost).items()}, flush=True)
        found.setdefault(name, []).append(asdict(cost))
    return found


def one(name: str, setting: Setting) -> Cost:
    """Run one way in an empty folder, its input in the page cache."""
    empty(setting.scratch)
    WAYS[name].prepare(setting)
    for layer in {*layout.layers_of(setting.image), *layout.layers_of(setting.twin)}:
        with layer.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    return measured(lambda: WAYS[name].run(setting))


def empty(folder: Path) -> None:
    """Empty the bench's own scratch folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def scaling(setting: Setting, repeats: int) -> dict[str, float]:
    """Median wall seconds of our import on 1, 2, 4, … cores of this machine, and on all."""
    cores = sorted(os.sched_getaffinity(0))
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count < len(cores)] + [len(cores)]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with suppress(KeyboardInterrupt):
        for _ in range(repeats):
            for count in counts:
                os.sched_setaffinity(0, cores[:count])
                try:
                    seconds[count].append(one("ours", setting).wall_s)
                finally:
                    os.sched_setaffinity(0, cores)
    medians = {str(count): statistics.median(values) for count, values in seconds.items() if values}
    print("cores -> seconds", medians, flush=True)
    return medians


def read_cold(setting: Setting, repeats: int) -> dict[str, dict[str, float]]:
    """Cold imports from enroot's default output and from ours, both made here."""
    kept = setting.previous.parent / "enroot.sqsh"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        empty(setting.scratch)
        WAYS["enroot-cached"].run(setting).rename(kept)
    empty(setting.scratch)
    WAYS["copy"].prepare(setting)
    small = setting.previous.parent / "zstd.sqsh"
    if not small.exists():
        WAYS["ours-zstd"].run(setting).rename(small)
    files = {"enroot": kept, "runner": setting.previous, "runner, zstd:1": small}
    return reading.compare(files, setting.scratch / "mount", repeats)


def same_tree(setting: Setting) -> dict[str, Any]:
    """Whether our file holds what umoci unpacks."""
    empty(setting.scratch)
    WAYS["copy"].prepare(setting)
    entries, wrong = check.against_umoci(setting.image, setting.previous, setting.scratch)
    print(f"{entries:,} entries beside umoci's, {len(wrong)} differences", *wrong[:20], sep="\n  ", flush=True)
    return {"entries": entries, "differences": wrong[:100]}


if __name__ == "__main__":
    main(sys.argv[1:])
