"""`./nox -s bench -- scripts --mirrors FOLDER`: public batch scripts, submitted and run with and without `runner`.

submit    `scontrol show job` of plain sbatch and of `runner launch PATH`, field by field
run       in a sandbox, with stand-ins in place of the programs that a script calls: the calls, side by side

The verdicts go to `bench/scripts/corpus.tsv`. `bench/scripts/corpus.py` says where the texts of the scripts come from.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.scripts import corpus, recorded, submitted

PARTS = ("submit", "run")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s bench -- scripts", description=__doc__)
    parser.add_argument("--mirrors", type=Path, required=True, help="folder with git directories OWNER+NAME")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--list", type=Path, default=corpus.LIST, help="a part of the list, as a file")
    parser.add_argument("--only", default="", help="only scripts whose repository or path contains this text")
    parser.add_argument("--against", choices=("runner", "plain"), default="runner", help="plain: shows what varies")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with the package runner (default: src)")
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this folder")
    parser.add_argument("--jobs", type=int, default=2, help="sandboxes side by side (default: 2)")
    parser.add_argument("--write", action="store_true", help="write the verdicts to the list")
    return parser.parse_args(argv)


def submit(options: argparse.Namespace, scripts: list[corpus.Script], work: Path) -> dict[str, dict[str, str]]:
    """SHA-256 -> the verdict of the part submit."""
    submitted.site(work / "home")
    placed = [(script, corpus.extract(script, options.mirrors, work / "read" / script.sha256)) for script in scripts]
    slurm = submitted.start(placed, work)
    verdicts: dict[str, dict[str, str]] = {}
    try:
        lab = submitted.Lab(slurm, work / "home", options.source.resolve())
        for script in scripts:
            verdicts[script.sha256] = verdict = submitted.check(script, lab, options.mirrors, work, options.against)
            if verdict["submitted"] not in ("same", "wrapper", "refused by both"):
                print(f"{script.name}\n    {verdict['submitted']}", flush=True)
    finally:
        slurm.stop()
    accepted = [found for found in verdicts.values() if found["test_only"] == "accepted"]
    print(f"{len(scripts)} scripts; plain sbatch --test-only accepts {len(accepted)}; of these:")
    for what, count in Counter(found["submitted"].split(":")[0] for found in accepted).most_common():
        print(f"  {count:4} {what}")
    return verdicts


def run(options: argparse.Namespace, scripts: list[corpus.Script], work: Path) -> dict[str, dict[str, str]]:
    """SHA-256 -> the verdict of the part run."""
    verdicts = recorded.play(scripts, options, work)
    print(f"{len(scripts)} scripts; of these:")
    for what, count in Counter(found["calls"].split(":")[0] for found in verdicts.values()).most_common():
        print(f"  {count:4} {what}")
    return verdicts


def main(argv: list[str]) -> None:
    options = arguments(argv)
    every = corpus.read_list()
    scripts = [script for script in corpus.read_list(options.list) if options.only in script.name]
    with tempfile.TemporaryDirectory(prefix="scripts-") as temporary:
        work = (options.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for part in options.parts.split(","):
            found = {"submit": submit, "run": run}[part](options, scripts, work)
            (work / f"{part}.json").write_text(json.dumps(found, indent=1))
            every = corpus.with_verdicts(every, found)
    if options.write:
        corpus.write_list(every)


if __name__ == "__main__":
    main(sys.argv[1:])
