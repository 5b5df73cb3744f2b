"""`./nox -s bench -- engines`: seconds until a program in an image prints its first line, by each engine that is here.

cold    the kernel's caches are empty: neither the image nor the engine's programs are in memory. Needs root
warm    right after that

enroot and pyxis are measured where this machine has them; `RUNNER_LAB_PYXIS` names a pyxis that is not installed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bench.importing.measure import drop_caches
from tests.environments.inside import environment_of, prepared
from tests.figures import machine, table
from tests.lab.images import import_python, python_squashfs
from tests.lab.plugins import real_pyxis
from tests.lab.podman import Podman
from tests.lab.slurm import SlurmLab

from runner.expansion import expand

PROGRAM = ("python3", "-c", "print('first line', flush=True)")


@dataclass(frozen=True)
class Way:
    """One engine, with the words and variables that start PROGRAM."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


def way(name: str, engine: str, image: str, folder: Path, environ: Mapping[str, str], start: Sequence[str] = ()) -> Way:
    """The engine as a batch script would start it."""
    home = folder / name.replace(" ", "-")
    home.mkdir()
    attachment = prepared(environment_of(home, f'image = "{image}"\n'), engine, home)
    variables = {**environ, "RUNNER_RUN": str(home)}
    variables |= {key: expand(value, variables, key) for key, value in attachment.exports.items()}
    words = [expand(word, variables, "a word") for word in (*attachment.flags, *attachment.prefix)]
    return Way(name, (*start, *words, *PROGRAM), variables)


def first_line(each: Way) -> float:
    """Seconds until the first line."""
    start = time.perf_counter()
    with subprocess.Popen(each.argv, env=dict(each.environ), stdout=subprocess.PIPE, cwd="/") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"first line\n", each.name
        return time.perf_counter() - start


def main() -> None:
    """Measure the engines in turn, so that a change of the machine's speed meets all alike."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    image, here = str(python_squashfs()), dict(os.environ)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        podman, slurm = stack.enter_context(Podman()), stack.enter_context(SlurmLab(plugins=()))
        stored = import_python(podman)
        ways = [
            way("host", "host", "", folder, here),
            way("sandbox", "sandbox", image, folder, here),
            way("sandbox, unpacked", "sandbox", image, folder, {**here, "RUNNER_SANDBOX_UNPACK": "1"}),
            way("podman, squashfs", "podman", image, folder, podman.environ),
            way("podman, storage", "podman", stored, folder, podman.environ),
            way("srun, host", "host", "", folder, slurm.environ, ("srun",)),
            way("srun, sandbox", "sandbox", image, folder, slurm.environ, ("srun",)),
        ]
        if shutil.which("enroot"):
            ways.append(way("enroot", "enroot", image, folder, here))
        for name, option in (("srun, pyxis", ""), ("srun, pyxis, use_squashfuse=1", " use_squashfuse=1")):
            if plugin := real_pyxis():
                lab = stack.enter_context(SlurmLab(nodes=1, plugins=(f"{plugin}{option}",)))
                ways.append(way(name, "pyxis", image, folder, lab.environ, ("srun",)))
        cold: dict[str, list[float]] = {each.name: [] for each in ways}
        warm: dict[str, list[float]] = {each.name: [] for each in ways}
        for each in ways * runs:
            drop_caches()
            cold[each.name].append(first_line(each))
            warm[each.name] += [first_line(each), first_line(each)]
        print(date.today().isoformat(), machine(folder), f"load {os.getloadavg()[0]:.1f}", f"{runs} rounds")
    rows = [
        (name, *(f"{statistics.median(values):.2f} ({max(values):.2f})" for values in (cold[name], warm[name])))
        for name in cold
    ]
    print("\n".join(table(("engine", "cold: median (maximum)", "warm: median (maximum)"), rows)))


if __name__ == "__main__":
    main()
