"""Builds the documentation as a web site, and makes the reference pages from the tables of the source.

python -m bench.docs                     the site, in build/docs/site; the index of docs/ sets its order
python -m bench.docs --write-reference   docs/keys.md, docs/lint-codes.md, docs/causes.md, and stops.awk and
                                         trainers.txt in src/runner/runs/payload
python -m bench.docs --write-pictures    docs/terminal-*.svg, from runs on this machine; needs the jobs' packages
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.environments import edf, environment
from runner.environments.lint.codes import CODES, SEVERITIES
from runner.runs import job, trainer
from runner.runs.why.cause import KINDS, all_causes, stops
from runner.site import Site
from runner.site_files import VALUES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STOPS = "../src/runner/runs/payload/stops.awk"
TRAINERS = f"../src/runner/runs/payload/{trainer.SHIPPED}"
MADE = "<!-- Made by `python -m bench.docs --write-reference` from the tables of the source. Do not edit. -->"

# the type of a field in the source -> that of the key
KINDS_OF = {
    **dict.fromkeys(("str", "str | None"), "text"),
    **dict.fromkeys(("int", "int | None"), "integer"),
    **dict.fromkeys(("bool", "bool | None"), "`true` or `false`"),
    **dict.fromkeys(("tuple[str, ...]", "tuple[Mount, ...]"), "array of text"),
    "Mapping[str, str]": "table of text",
}

SETTINGS = """\
[project]
site_name = "runner"
site_description = "From a Containerfile to a running, restartable Slurm job"
site_dir = "site"
use_directory_urls = false  # the pages open from a disk
nav = {nav}

[project.theme]
font = false  # nothing is loaded from the network
features = ["navigation.sections", "navigation.footer", "navigation.top", "content.code.copy", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle = {{ icon = "lucide/sun", name = "Use dark colours" }}

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle = {{ icon = "lucide/moon", name = "Use light colours" }}
"""


def main(words: list[str]) -> int:
    if words == ["--write-reference"]:
        for name, text in reference().items():
            (DOCS / name).write_text(text)
            print(DOCS / name)
        return 0
    if words == ["--write-pictures"]:
        pictures()
        return 0
    code = build(DOCS, ROOT / "build/docs")
    if code == 0:
        print(f"{ROOT}/build/docs/site; to read it: python -m http.server -d build/docs/site")
    return code


def build(docs: Path, work: Path) -> int:
    """Build the site in WORK/site. Returns the exit code: a broken link or anchor is an error."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(docs, work / "docs")
    (work / "zensical.toml").write_text(SETTINGS.format(nav=order((docs / "README.md").read_text())))
    argv = (sys.executable, "-c", "from zensical.main import cli; cli()", "build", "--strict")
    done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        print(re.sub(r"\x1b\[[0-9;]*m|(?s:Traceback .*)", "", done.stdout + done.stderr), file=sys.stderr)
    return done.returncode


def order(index: str) -> str:
    """The navigation, as TOML: the sections of the index with their pages; those of a table below its rows' names."""
    sections = ['{ "Start" = "README.md" }']
    for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", index, re.M):
        parts: list[str] = []
        for line in text.splitlines():
            found = re.findall(r"\[([^\]]+)\]\(([\w-]+\.md)\)", line)
            pages = [f"{{ {json.dumps(title_of(name))} = {json.dumps(page)} }}" for name, page in found]
            row = re.match(r"\| (\w[^|]*) \| \[", line)
            parts += [f"{{ {json.dumps(row[1].capitalize())} = [{', '.join(pages)}] }}"] if row else pages
        sections.append(f"{{ {json.dumps(title)} = [{', '.join(parts)}] }}")
    return f"[{', '.join(sections)}]"


def title_of(text: str) -> str:
    plain = text.replace("`", "")
    return plain if text[0] == "`" else plain[0].upper() + plain[1:]


def pictures() -> None:
    """Pictures of a terminal after real runs: a training, and a run that failed."""
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        project = Path(folder)
        (project / "edf").mkdir()
        (project / "runner.toml").write_text("")
        (project / "edf/cpu.toml").write_text('image = ""\n')
        (project / "broken.py").write_text("import torchh\n")
        launch = ("launch", "--engine", "host", "--env", "cpu", "--wait")
        terminal(project, *launch, "--script", "sft")
        picture(project, "training", ("status",), ("plot", "sft-0001"))
        terminal(project, *launch, "--script", "./broken.py")
        picture(project, "failure", ("why",))


def terminal(project: Path, *words: str) -> str:
    """What a command of runner shows in a terminal of 116 columns."""
    command = shlex.join((sys.executable, "-m", "runner", *words))
    environ = {**os.environ, "RUNNER_SITE": "local", "COLUMNS": "116", "PYTHONPATH": str(ROOT / "src")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    argv = ("script", "-qec", f"stty cols 116 rows 40; {command}", "/dev/null")
    shown = subprocess.run(argv, cwd=project, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return shown.stdout.replace("\r\n", "\n").replace(str(project.resolve()), "~/project")


def picture(project: Path, name: str, *commands: tuple[str, ...]) -> None:
    """Write docs/terminal-NAME.svg. It loads no font from the network."""
    console = Console(record=True, width=116, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    for words in commands:
        console.print(f"[bold green]$[/] runner {shlex.join(words)}", highlight=False)
        console.print(Text.from_ansi(terminal(project, *words).rstrip()))
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="runner", unique_id=name), flags=re.S)
    target = DOCS / f"terminal-{name}.svg"
    target.write_text(svg.replace("Fira Code", "ui-monospace"))
    print(target)


def reference() -> dict[str, str]:
    """File name, relative to docs/ -> text of each file that is made from the source."""
    return {"keys.md": _keys(), "lint-codes.md": _lint_codes(), "causes.md": _causes(), STOPS: stops(),
            TRAINERS: trainer.shipped_text()}  # fmt: skip


def _keys() -> str:
    kinds = {int: "integer", str: "text", bool: "`true` or `false`", tuple: "array of text", dict: "table of text",
             job.Restart: "table", object: "integer or text"}  # fmt: skip
    rows = [
        (
            code(".".join(key.place(name))),
            "text, or array of text" if key.is_one_or_more else kinds[key.kind],
            code(key.flag or {"script": "--script", "environment": "--env"}.get(name, "")),
            "yes" if key.site else "",
        )
        for name, key in job.KEYS.items()
        if key.in_file
    ]
    rows.append((code("summary"), "text", "", ""))
    rows += [(code(f"restart.{each.name}"), KINDS_OF[str(each.type)], "", "") for each in fields(job.Restart)]
    only = [(code(key.flag), kinds[key.kind]) for key in job.KEYS.values() if not key.in_file]
    types = {each.name: KINDS_OF[str(each.type)] for each in fields(environment.Environment) if each.name in edf.KEYS}
    edfs = [(code(name), types.get(name, "text, or array of text")) for name in edf.KEYS]
    sites = [(code(name), "text") for name in ("name", "summary", "base")]
    sites += [(code(f"detect.{name}"), "array of text") for name in ("clusters", "paths", "partitions")]
    sites += [(code(f"sources.NAME.{name}"), "text") for name in ("title", "url", "date")]
    sites += [(code(f"values.{each.name}"), KINDS_OF[str(each.type)]) for each in fields(Site) if each.name in VALUES]
    return page(
        "Keys",
        "The keys of job files, EDFs and site files, with their types. Other keys in these files are errors.",
        ("Job files", "[Job files](job-file.md) explains the keys. An option of `runner launch` overrides a job file,"
         " and a job file overrides a site.", ("key", "type", "option", "a site can set the default"), rows),
        ("Settings without a key", "", ("option", "type"), only),
        ("EDFs", "[Environments](env.md) explains the keys.", ("key", "type"), edfs),
        ("Site files", "[site](site.md) explains the keys.", ("key", "type"), sites),
    )  # fmt: skip


def _lint_codes() -> str:
    rows = [(code(name), " or ".join(sorted(each.severities, key=SEVERITIES.index)), each.title, each.fix)
            for name, each in sorted(CODES.items())]  # fmt: skip
    intro = (
        f"The {len(rows)} mistakes that [`runner env check`](lint.md) finds, as `runner env check --list` prints them."
    )
    return page("Lint codes", intro, ("", "", ("code", "severity", "meaning", "fix"), rows))


def _causes() -> str:
    titles = {"cause": "Failures", "exception": "Python exceptions", "symptom": "Symptoms of a failure elsewhere",
              "summary": "Causes only if the log shows no other failure", "slow": "Slow runs",
              "pending": "Reasons for waiting", "exit": "Exit codes"}  # fmt: skip
    causes = all_causes()
    tables = [
        (titles[kind], "", ("cause", "meaning", "explanation", "fix"),
         [(code(each.code), each.says, each.explanation, each.fix)
          for each in sorted(causes, key=lambda each: each.code) if each.kind == kind])
        for kind in KINDS
    ]  # fmt: skip
    intro = (
        f"The {len(causes)} causes that [`runner why`](why.md) knows, as `runner why --list` prints them. In a fix,"
        " replace placeholders, such as NAME, PATH, NODE and ENV (your environment)."
    )
    return page("Causes", intro, *(table for table in tables if table[3]))


def page(title: str, intro: str, *tables: tuple[str, str, tuple[str, ...], list[tuple[str, ...]]]) -> str:
    """A page of tables: heading, text, names of the columns, rows."""
    lines = [f"# {title}", "", MADE, "", intro]
    for heading, text, columns, rows in tables:
        lines += ["", f"## {heading}"] if heading else []
        lines += ["", text] if text else []
        lines += ["", row(columns), row(["---"] * len(columns)), *(row(map(cell, each)) for each in rows)]
    return "\n".join(lines) + "\n"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Text in a table: what is not in backticks has no effect as Markdown or HTML."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    shown = (part if part[:1] == "`" else re.sub(r"([*_\[\]])", r"\\\1", part.replace("<", "&lt;")) for part in parts)
    return "".join(shown).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
