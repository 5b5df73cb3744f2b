"""The main job on this machine, as the commands a user would type; ends with a table of what was made.

`python bench/demo.py` (what `nox -s demo` runs). Each command is printed before it runs. Where no image can be built
here (neither podman nor docker), the same job runs without a container, and that is said.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from runner.environments.engines import why_no_sandbox
from runner.machine import probe

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "containers" / "pins" / "cpu.txt"
# where the pinned build of torch is found when pip's own indexes lack it
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
SECONDS: dict[str, float] = {}


def command(title: str, *argv: str) -> str:
    """Run `runner …` as printed, its stderr on ours; returns its stdout. Ends the demo where it fails."""
    print(f"\n$ runner {shlex.join(argv)}", flush=True)
    start = time.monotonic()
    done = subprocess.run((sys.executable, "-m", "runner", *argv), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    SECONDS[title] = time.monotonic() - start
    if done.stdout.strip():
        print(done.stdout.rstrip(), flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.strip()


def container_engine() -> str | None:
    """The program that can build an image here, or None."""
    return next((name for name in ("podman", "docker") if shutil.which(name)), None)


def install_without_container() -> Path:
    """A folder with a Python that holds the job's packages: what stands in for the image where none can be built."""
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
    """Make the image and the squashfs; returns the options of the launch. What cannot be done here is said."""
    engine = container_engine()
    if engine is None:
        print("neither podman nor docker is here: the demo runs the same job WITHOUT a container (--engine host)")
        print("  to see it in one: apt-get install podman mmdebstrap squashfs-tools-ng squashfuse bubblewrap")
        folder = install_without_container()
        os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return ("--env", "cpu", "--engine", "host")
    image = command("build", "build", "cpu").splitlines()[-1]
    if not can_enter_squashfs():
        print(f"nothing here enters squashfs files: the demo runs in {engine}'s own image, without the import")
        print("  to see the whole line: apt-get install squashfs-tools-ng squashfuse bubblewrap")
        path = ROOT / ".nox" / "demo.toml"
        path.write_text((ROOT / "edf/cpu.toml").read_text().replace('"${RUNNER_IMAGES}/cpu.sqsh"', f'"{image}"'))
        command("check", "env", "check", str(path), "--engine", engine)
        return ("--env", str(path), "--engine", engine)
    squashfs = command("import", "import", "cpu")
    print(f"  {Path(squashfs).resolve()}  {Path(squashfs).stat().st_size / 1e6:,.0f} MB")
    command("check", "env", "check", "cpu")
    return ("--env", "cpu")


def report(run: str) -> None:
    """Print the closing table: seconds of each step, the training's figures, and where things lie."""
    status = json.loads(subprocess.check_output((sys.executable, "-m", "runner", "status", run, "--json"), cwd=ROOT))
    folder = Path(status[0]["folder"])
    summary = json.loads((folder / "summary.json").read_text())
    image = tomllib.loads((folder / "lock.toml").read_text()).get("image", {})
    rows = [(f"{title} (s)", f"{seconds:.1f}") for title, seconds in SECONDS.items()]
    rows += [
        ("all (s)", f"{sum(SECONDS.values()):.1f}"),
        ("training steps", f"{summary['steps']}"),
        ("loss, first -> last", f"{summary['first_loss']:.3f} -> {summary['last_loss']:.3f}"),
        ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
        ("image", image.get("digest", "none")),
        ("squashfs", image.get("reference") or "none"),
        ("run folder", str(folder)),
        ("loss picture", str(folder / "loss.png")),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def main() -> None:
    """Build, import, check, launch, generate, report."""
    os.environ["RUNNER_SITE"] = "local"
    print("$ export RUNNER_SITE=local", flush=True)
    options = prepare()
    run = command("launch", "launch", *options, "--script", "sft", "--wait")
    command("generate", "shell", run, "--", "python", "jobs/generate.py")
    report(run)


if __name__ == "__main__":
    main()
