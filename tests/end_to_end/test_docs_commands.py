"""What the documentation shows below a marked command is what the command prints: each block runs on the lab's Slurm.

A block is marked by `<!-- run -->` above it, or by `<!-- run local -->` if it needs a machine without Slurm. Lines that
begin with `$` are commands; the lines below a command are its output. `…` stands for any text, and as a line of its own
for any lines. Numbers of four and more digits, such as job ids, stand for any number.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, write

DOCS = Path(__file__).parents[2] / "docs"
MARK = re.compile(r"<!-- run( local)? -->\n\n")
# what the reader of the page has: name -> text
FILES = {
    "edf/cpu.toml": 'image = ""\n',
    "jobs/broken.py": "import torchh\n",
    "train.sbatch": '#!/bin/bash\n#SBATCH --nodes=1 --time=5\necho "training with $*"\n',
}


def blocks(page: Path) -> list[tuple[bool, list[tuple[str, str]]]]:
    """The marked blocks of a page: whether it runs without Slurm, and (command, expected output) of each command."""
    text, found = page.read_text(), []
    for mark in MARK.finditer(text):
        lines = re.match(r"(?:    .*\n|\n(?=    ))+", text[mark.end() :])
        assert lines, f"{page.name}: there is no block below {mark[0].strip()}"
        pieces = re.split(r"^\$ ", re.sub(r"^    ", "", lines[0], flags=re.M), flags=re.M)[1:]
        commands = [piece.partition("\n") for piece in pieces]
        found.append((bool(mark[1]), [(command, output) for command, _, output in commands]))
    return found


def pattern(expected: str) -> str:
    """A regular expression for the output that a page shows."""
    lines = []
    for line in expected.strip().splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        parts = (re.escape(part) for part in re.split(r"…", line.strip()))
        text = ".*".join(re.sub(r"\d{4,}", r"\\d+", part) for part in parts)
        lines.append("[ ]*" + re.sub(r"(?:\\ )+", r"[ ]+", text) + r"[ ]*\n")
    return "".join(lines)


PAGES = [page for page in sorted(DOCS.glob("*.md")) if MARK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_marked_commands_print_what_the_page_shows(cluster: Runner, page: Path, tmp_path: Path) -> None:
    write(tmp_path, {"bin/runner": f'#!/bin/sh\nexec {sys.executable} -m runner "$@"\n', "home/train.py": "print(1)\n"})
    (tmp_path / "bin/runner").chmod(0o755)
    path = os.pathsep.join((str(tmp_path / "bin"), str(Path(sys.executable).parent), cluster.environ["PATH"]))
    environ = {**cluster.environ, "PATH": path, "RUNNER_SITE": cluster.site, "COLUMNS": "120"}
    environ["PYTHONUNBUFFERED"] = "1"  # the order in which a terminal shows stdout and stderr
    for number, (local, commands) in enumerate(blocks(page)):
        folder = tmp_path / f"block-{number}"
        folder.mkdir()
        if local:
            environ = {**environ, "RUNNER_SITE": "local"}
        else:
            write(folder, {"runner.toml": "", **FILES})
        # one shell for a block, since a command may set a variable or change the folder
        script = "".join(f'{command}\necho "--- $?"\n' for command, _ in commands)
        argv = ("bash", "-c", f"exec 2>&1\n{script}")
        done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)
        pieces = re.split(r"^--- (\d+)\n", done.stdout, flags=re.M)[:-1]
        assert len(pieces) == 2 * len(commands), done.stdout
        for (command, expected), output, code in zip(commands, pieces[::2], pieces[1::2], strict=True):
            fails = "because:" in expected or "FAILED" in expected or command == "runner why"
            assert (code != "0") <= fails, f"{page.name}: {command}\n{output}"
            if expected.strip():
                assert re.fullmatch(pattern(expected), output), f"{page.name}, block {number + 1}: {command}\n{output}"
