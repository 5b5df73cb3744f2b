"""sft beside TRL's stock script: same model, data, order, seed, precision; real tokens per CPU second at equal loss."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.training import ways
from bench.training.table import table

WARM = 2  # steps at the start that are not counted
TITLES = {
    "wrapped": "packing wrapped",
    "default": "no packing (default)",
    "bfd": "packing bfd",
    "assistant": "no packing, assistant only",
}


def measure(work: Path, quick: bool) -> dict[str, Any]:
    """Return, by model and mode, what each way measured: rounds in turn, so that a change of speed meets both."""
    found: dict[str, Any] = {}
    plan = {"tiny": (tuple(ways.MODES), 12 if quick else 50), "large": (("wrapped", "default"), 4 if quick else 6)}
    for name, (modes, steps) in plan.items():
        model, data = ways.prepare(work, name)
        for mode in modes:
            for round_ in range(1 if quick else 3):
                # Losses of 50 steps once; the other rounds are for the clock.
                count = steps if round_ == 0 else min(steps, 12)
                for way in ("trl", "ours"):
                    result = once(way, mode, model, data, work / "run", count, ways.SHAPES[name].sequences)
                    found.setdefault(name, {}).setdefault(mode, {}).setdefault(way, []).append(result)
                    print(name, mode, way, f"{_ms(result):.0f} ms a step", flush=True)
    for name in plan:
        model, data = ways.prepare(work, name)
        for way in ("trl", "ours"):
            result = once(way, "wrapped", model, data, work / "run", 4, ways.SHAPES[name].sequences, "--profile")
            found[name].setdefault("profile", {})[way] = result["profile"]
    return found


def once(
    way: str, mode: str, model: Path, data: Path, run: Path, steps: int, sequences: int, *more: str
) -> dict[str, Any]:
    """Return one run's figures, by a process of its own with one thread."""
    import json

    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    command = (
        *(sys.executable, "-m", "bench.training.ways", way, mode, f"--model={model}", f"--data={data}", f"--run={run}"),
        *(f"--steps={steps}", f"--sequences={sequences}", *more),
    )
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("RUNNER_", "SLURM_"))}
    one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(run / "datasets")}
    done = subprocess.run(command, env={**keep, **one}, cwd=ways.ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def _ms(run: Mapping[str, Any]) -> float:
    return statistics.median(run["cpu"][WARM:]) * 1000


def rate(run: Mapping[str, Any]) -> float:
    """Real tokens per CPU second over the steps that count."""
    return float(sum(run["tokens"][WARM:]) / sum(run["cpu"][WARM:]))


def differences(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def render(found: Mapping[str, Any]) -> list[str]:
    """Ratios by model and mode, then where the time goes."""
    rows = []
    for name, modes in found.items():
        for mode, both in modes.items():
            if mode == "profile":
                continue
            trl, ours = both["trl"], both["ours"]
            ratios = [rate(mine) / rate(theirs) for mine, theirs in zip(ours, trl, strict=True)]
            far = max(differences(a["losses"], b["losses"]) for a, b in zip(trl, ours, strict=True))
            same = all(a["tokens"] == b["tokens"] for a, b in zip(trl, ours, strict=True))
            tokens = sum(ours[0]["tokens"]) / len(ours[0]["tokens"])
            theirs_ms, ours_ms = (statistics.median(map(_ms, runs)) for runs in (trl, ours))
            equal = f"{far:.1e} over {len(ours[0]['losses'])}" if same else "NOT THE SAME TOKENS"
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells = (f"{tokens:.0f}", f"{theirs_ms:.0f}", f"{ours_ms:.0f}", f"**{spread}**", equal)
            rows.append((name, TITLES[mode], *cells))
    head = ("model", "batches", "real tokens a step", "TRL ms", "sft ms", "times TRL", "largest difference of losses")
    lines = table(head, rows)
    for name, modes in found.items():
        if "profile" in modes:
            lines += ["", *_profile(name, modes["profile"])]
    return lines


def _profile(name: str, both: Mapping[str, Mapping[str, float]]) -> list[str]:
    groups = sorted({*both["trl"], *both["ours"]}, key=lambda group: -both["trl"].get(group, 0.0))
    rows = [(group, *(f"{both[way].get(group, 0.0):.0f}" for way in ("trl", "ours"))) for group in groups]
    rows.append(("sum", *(f"{sum(both[way].values()):.0f}" for way in ("trl", "ours"))))
    return table((f"CPU ms a step, {name}, packing wrapped", "TRL", "sft"), rows)
