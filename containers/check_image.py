"""The import smoke test that ends every image build: python /opt/runner/check_image.py --torch VERSION --ops … MODULE…

It fails the build when torch is not the one that the image was made for, when a module does not import, or when a
compiled DeepSpeed op is missing or does not fit this torch. Run it again in a job when something looks off.
Nothing but the standard library is needed; it runs on Python 3.10 and newer.
"""

# ruff: noqa: T201 (what it prints is the build's log)

import argparse
import importlib
import json
import sys
from importlib import metadata, util
from pathlib import Path

RECORD = Path("/opt/runner/torch.json")


def main() -> None:
    """Check all; the exit message names everything that is wrong at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="the version it must have, or: recorded")
    parser.add_argument("--ops", default="", help="comma list of DeepSpeed ops that must be compiled in")
    parser.add_argument("modules", nargs="*", help="what must import")
    wanted = parser.parse_args()
    if wanted.torch == "recorded":
        wanted.torch = json.loads(RECORD.read_text())["torch"]
    problems = [*check_torch(wanted.torch), *check_modules(wanted.modules)]
    if wanted.ops:
        problems += check_ops(wanted.ops.split(","))
    if problems:
        sys.exit("this image must not be used:\n" + "\n".join(f"  {problem}" for problem in problems))
    print(f"python {sys.version.split()[0]}, torch {wanted.torch}, ops: {wanted.ops or 'none'}: as it should be")


def check_torch(version: str) -> list[str]:
    """What is wrong with torch: both what pip believes and what really imports are looked at.

    A version without +LOCAL (+cpu, +cu130) is that of any build, as pip has it.
    """
    import torch

    found = {"torch.__version__": str(torch.__version__), "pip's record of torch": metadata.version("torch")}
    return [
        f"{what} is {has}, not {version}" for what, has in found.items() if version not in (has, has.partition("+")[0])
    ]


def check_modules(names: list[str]) -> list[str]:
    """What does not import, each with its reason. MODULE.Name imports MODULE and takes Name from it."""
    problems = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
        except Exception as error:  # whatever a package raises at import is the answer here
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        print(f"{name} {getattr(imported, '__version__', '')}".rstrip())
    return problems


def check_ops(names: list[str]) -> list[str]:
    """Which DeepSpeed ops were not compiled in, and which do not load with this torch."""
    from deepspeed.git_version_info import installed_ops

    missing = [f"DeepSpeed op {name} is not compiled in" for name in names if not installed_ops.get(name)]
    # Not OpBuilder.load(): on a build machine without a GPU it would look for the CPU's ops
    return missing + check_modules(compiled_ops())


def compiled_ops() -> list[str]:
    """The extension modules below deepspeed/ops, found without importing them."""
    spec = util.find_spec("deepspeed")
    root = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path()
    found = [path.relative_to(root) for path in sorted(root.glob("ops/**/*.so"))]
    return [".".join(("deepspeed", *path.parent.parts, path.name.split(".")[0])) for path in found]


if __name__ == "__main__":
    main()
