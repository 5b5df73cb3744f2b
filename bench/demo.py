"""The main job on this machine, as the commands a user would type; ends with a table of what was made.

`python bench/demo.py` (what `nox -s demo` runs). Each command is printed before it runs, with an excerpt of
its messages. Without podman and docker the same job runs without a container.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections import deque
from pathlib import Path
from typing import IO

from runner.environments.engines import why_no_sandbox
from runner.machine import probe

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "containers" / "pins" / "cpu.txt"
# where the pinned build of torch is found when pip's own indexes lack it
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
SECONDS: dict[str, float] = {}
PROMPT = "What does `sorted` do?"
CLOSING = """
The answer above is nonsense, as expected: the model has 2.9 million parameters and has trained for 100 steps.
The loss shows that it learns. Next, after `. {activate}; export RUNNER_SITE=local`:
  runner plot {run}
  runner logs {run}
  runner shell cpu"""


def command(title: str, *argv: str, lines: int = 3) -> str:
    """Run `runner …` as printed, with the first `lines` lines of its stderr and its progress; returns its stdout.

    A failure prints the last lines in full and ends the demo.
    """
    print(f"\n$ runner {shlex.join(argv)}", flush=True)
    start = time.monotonic()
    on_terminal = title in ("build", "import") and sys.stderr.isatty()  # their progress needs one line
    argv = (sys.executable, "-m", "runner", *argv)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=None if on_terminal else subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        last = excerpt(process.stderr, lines) if process.stderr else ()
        assert process.stdout is not None
        answer = process.stdout.read()
    SECONDS[title] = time.monotonic() - start
    if process.returncode != 0:
        print(*last, sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    if answer.strip():
        print(answer.rstrip(), flush=True)
    return answer.strip()


def excerpt(stream: IO[str], lines: int) -> tuple[str, ...]:
    """Print the first lines, then a line of the training's progress now and then; returns the last 30, for an error."""
    last: deque[str] = deque(maxlen=30)
    printed, next_tenths = 0, 0
    for line in stream:
        last.append(line.rstrip())
        progress = re.search(r"step +(\d+)/(\d+) loss.*", line)
        if progress and int(progress[1]) * 10 >= next_tenths * int(progress[2]):
            print(f"  {progress[0]}", flush=True)
            next_tenths = int(progress[1]) * 10 // int(progress[2]) + 2
        elif line.strip() and not progress and printed < lines:
            print(f"  {line.strip()}"[:160], flush=True)
            printed += 1
    return tuple(last)


def torch_arguments() -> tuple[str, ...]:
    """The build argument that takes PyPI's torch, where the CPU build is not available."""
    version = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))[len("torch==") :]
    pip = (sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check")
    listed = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    if version in listed:
        return ()
    try:
        with urllib.request.urlopen(f"{TORCH_FOR_CPU}/torch/", timeout=15) as page:
            if version.encode().replace(b"+", b"%2B") in page.read():
                return ()
        why = "does not have it"
    except OSError as error:
        why = f"cannot be reached ({getattr(error, 'reason', error)})"
    plain = version.partition("+")[0]
    print(f"pip does not find torch {version} and {TORCH_FOR_CPU} {why}: using PyPI's torch {plain}.")
    print("  It brings CUDA libraries, about 3 GB more. With a mirror of PyTorch's index: PIP_EXTRA_INDEX_URL=URL")
    return (f"--build-arg=TORCH={plain}",)


def container_engine() -> str | None:
    """The program that can build an image here, or None."""
    return next((name for name in ("podman", "docker") if shutil.which(name)), None)


def install_without_container() -> Path:
    """A folder with a Python that holds the job's packages: used instead of the image where none can be built."""
    folder = ROOT / ".nox" / "demo-host"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"\n$ python -m venv {folder} && {python} -m pip install -r {PINS.relative_to(ROOT)}", flush=True)
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)
        pins = PINS.read_text().splitlines()
        torch = next(line for line in pins if line.startswith("torch=="))
        pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check")  # the pins are all
        if subprocess.run((*pip, torch), stderr=subprocess.DEVNULL).returncode != 0:
            subprocess.run((*pip, torch, "--extra-index-url", TORCH_FOR_CPU), check=True)
        subprocess.run((*pip, "-r", PINS), check=True)
        (folder / "complete").touch()
    return folder


def can_enter_squashfs() -> bool:
    """Whether an engine is here that enters squashfs files: bubblewrap and a reader, or podman and squashfuse."""
    with_podman = shutil.which("podman") and shutil.which("squashfuse") and probe.fuse_usable()
    return bool(with_podman) or why_no_sandbox() is None


def prepare() -> tuple[str, ...]:
    """Make the image and the squashfs; returns the options of the launch. Prints what cannot be done here."""
    engine = container_engine()
    if engine is None:
        print("neither podman nor docker is here: the demo runs the same job WITHOUT a container (--engine host)")
        print("  to see it in one: apt-get install podman mmdebstrap squashfs-tools-ng squashfuse bubblewrap")
        folder = install_without_container()
        os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return ("--env", "cpu", "--engine", "host")
    image = command("build", "build", "cpu", *torch_arguments(), lines=8).splitlines()[-1]
    if not can_enter_squashfs():
        print(f"nothing here enters squashfs files: the demo runs in {engine}'s own image, without the import")
        print("  to see the whole line: apt-get install squashfs-tools-ng squashfuse bubblewrap")
        path = ROOT / ".nox" / "demo.toml"
        path.write_text((ROOT / "edf/cpu.toml").read_text().replace('"${RUNNER_IMAGES}/cpu.sqsh"', f'"{image}"'))
        command("check", "env", "check", str(path), "--engine", engine)
        return ("--env", str(path), "--engine", engine)
    command("import", "import", "cpu")
    command("check", "env", "check", "cpu")
    return ("--env", "cpu")


def report(run: str) -> None:
    """Print the closing table: seconds of each step, the loss, where things are, and what to try next."""
    status = json.loads(subprocess.check_output((sys.executable, "-m", "runner", "status", run, "--json"), cwd=ROOT))
    folder = Path(status[0]["folder"])
    summary = json.loads((folder / "summary.json").read_text())
    image = tomllib.loads((folder / "lock.toml").read_text()).get("image", {})
    squashfs = image.get("reference", "")
    size = f" ({Path(squashfs).stat().st_size / 1e6:,.0f} MB)" if squashfs and Path(squashfs).is_file() else ""
    rows = [
        ("seconds", ", ".join(f"{title} {seconds:.0f}" for title, seconds in SECONDS.items())),
        (
            "loss, first -> last",
            f"{summary['first_loss']:.3f} -> {summary['last_loss']:.3f} in {summary['steps']} steps",
        ),
        ("squashfs", f"{squashfs or 'none'}{size}"),
        ("run folder", str(folder)),
        ("loss picture", str(folder / "loss.png")),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    activate = Path(sys.prefix, "bin/activate")
    activate = activate.relative_to(ROOT) if activate.is_relative_to(ROOT) else activate
    print(CLOSING.format(run=run, activate=activate))


def main() -> None:
    """Build, import, check, launch, generate, report."""
    print("$ export RUNNER_SITE=local", flush=True)
    os.environ["RUNNER_SITE"] = "local"
    options = prepare()
    run = command("launch", "launch", *options, "--script", "sft", "--wait", lines=4)
    words = (f"--prompt={PROMPT}", "--max_new_tokens=40")
    command("generate", "shell", run, "--", "python", "jobs/generate.py", *words, lines=3)
    report(run)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; the same command repeats no finished step", file=sys.stderr)
        sys.exit(130)
