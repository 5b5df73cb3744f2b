"""Keep the torch of a base image: `record` once at the start of a build, `check` after every step that installs.

NGC's torch is NVIDIA's own build, compiled with the image's CUDA, NCCL and cuDNN. A wheel from the package index in its
place still imports, and is slower, or fails on the cluster's fabric, weeks later. So a build must stop at once.
Nothing but the standard library is needed; it runs on Python 3.10 and newer.
"""

# ruff: noqa: T201 (what it prints is the build's log)

import argparse
import json
import re
import sys
from importlib import metadata
from pathlib import Path

RECORD = Path("/opt/runner/torch.json")
# what is compiled against torch or belongs to it; by the names under which NGC and PyPI know them
KEPT = (
    *("torch", "torchvision", "torchaudio", "torch-tensorrt", "torchao", "pytorch-triton", "triton"),
    *("flash-attn", "transformer-engine", "apex", "nvidia-modelopt"),
)
# the same importable package under another name: pip would not notice that it overwrites the one that is there
TWINS = {"pytorch-triton": "triton", "triton": "pytorch-triton"}


def main() -> None:
    """Run `record --expect VERSION --pins FILE --constraint FILE`, or `check`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("record", "check"))
    parser.add_argument("--expect", default="", help="the version that torch must have; empty: any")
    parser.add_argument("--pins", type=Path, help="requirements that may replace packages of the base")
    parser.add_argument("--constraint", type=Path, help="pip's constraint file, to be edited in place")
    wanted = parser.parse_args()
    if wanted.verb == "check":
        check()
    else:
        record(wanted.expect)
        edit_constraint(wanted.constraint, wanted.pins)


def installed() -> dict[str, str]:
    """Version by normal name of every package that pip knows here; of two records Python takes the first."""
    found = [(normal(str(package.metadata["Name"])), package.version) for package in metadata.distributions()]
    return dict(reversed(found))


def normal(name: str) -> str:
    """A package name as package indexes compare it. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def record(expected: str) -> None:
    """Write down the versions of what must stay. Ends the build when torch is missing or not the expected one."""
    kept = {name: version for name, version in installed().items() if name in KEPT}
    if "torch" not in kept:
        sys.exit("this base has no torch that pip knows: choose an image with PyTorch in it")
    if expected and kept["torch"] != expected:
        sys.exit(f"this base has torch {kept['torch']}, the pins are for {expected}: choose the pin set of this base")
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    print("kept as they are:", ", ".join(f"{name} {version}" for name, version in kept.items()))


def check() -> None:
    """End the build when one of the recorded packages is gone or has another version, or a twin came in beside it."""
    before, now = json.loads(RECORD.read_text()), installed()
    changed = [f"{name} was {old}, is {now.get(name, 'gone')}" for name, old in before.items() if now.get(name) != old]
    twins = [(name, twin) for name, twin in TWINS.items() if name in before and twin not in before and twin in now]
    changed += [f"{twin} {now[twin]} lies over {name}" for name, twin in twins]
    if changed:
        sys.exit("a step replaced what must stay as NVIDIA built it:\n" + "\n".join(f"  {line}" for line in changed))
    print("torch", before["torch"], "is still in place")


def edit_constraint(path: Path, pins: Path) -> None:
    """Take what our pins fix with `==` out of the constraint file, and put in what must stay, to the letter."""
    kept = json.loads(RECORD.read_text())
    fixed = [line for line in pins.read_text().splitlines() if "==" in line]
    lines = path.read_text().splitlines() if path.is_file() else []
    ours = {*map(requirement_name, fixed), *kept} - {""}
    dropped = [line for line in lines if requirement_name(line) in ours]
    exact = [f"{name}=={version}" for name, version in kept.items()]
    # a version that does not exist: whatever asks for the twin fails to resolve, and pip says who asked
    exact += [f"{twin}==0" for name, twin in TWINS.items() if name in kept and twin not in kept]
    rest = [line for line in lines if line not in dropped]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*rest, "# by /opt/runner/keep_torch.py:", *exact]) + "\n")
    print(f"{path}: {len(rest)} lines of the base kept; ours instead of: {', '.join(dropped) or 'none'}")


def requirement_name(line: str) -> str:
    """The normal name of the package that a requirement line is about; empty for comments, options and blank lines."""
    found = re.match(r"\s*([A-Za-z0-9][\w.-]*)", line)
    return normal(found[1]) if found else ""


if __name__ == "__main__":
    main()
