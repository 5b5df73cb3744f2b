"""The documentation: every link leads somewhere, every page is listed, the example script does what its page says."""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from bench import docs

from runner.cli import VERBS, make_parser
from runner.environments import edf
from runner.runs import job
from runner.site_files import VALUES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"(?s:```.*?```)|^    .*$|`[^`\n]*`", "", page.read_text(), flags=re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs/README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_reference_is_made_from_the_source():
    for name, text in docs.reference().items():
        assert (ROOT / "docs" / name).read_text() == text, "python -m bench.docs --write-reference"


def test_each_key_is_explained():
    """The page of the keys has types only; what a key means stands on the page of its file."""
    for page, names in (
        ("job-file.md", {key.key or name for name, key in job.KEYS.items() if key.in_file}),
        ("restart.md", {each.name for each in fields(job.Restart)}),
        ("env.md", edf.KEYS),
        ("site.md", VALUES),
    ):
        text = (ROOT / "docs" / page).read_text()
        assert [name for name in names if not re.search(rf"`(\[?)({name})\b|^    {name}\b", text, re.M)] == [], page


PAGES_OF_VERBS = {"connect": "on", "env check": "lint", "skill": "budget"}


def options(parser: argparse.ArgumentParser, verb: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """(verb, option) of a parser and of those below it, but not what all verbs have."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{verb} {name}".strip())
        elif verb and action.help != argparse.SUPPRESS and not {"-h", "-v", "--site"} & {*action.option_strings}:
            yield verb, action


def test_each_option_has_a_help_and_is_on_the_page_of_its_verb():
    for verb, action in options(make_parser(list(VERBS))):
        page = PAGES_OF_VERBS.get(verb, verb.split()[0])
        text = (ROOT / f"docs/{page}.md").read_text()
        known = [name for name in action.option_strings if re.search(rf"{re.escape(name)}(?![\w-])", text)]
        assert known or not action.option_strings, (verb, action.option_strings, page)
        # a number of a model has the name that its config.json gives it
        assert action.help or "_" in action.option_strings[0], (verb, action.option_strings)


@pytest.fixture
def copy(tmp_path):
    pytest.importorskip("zensical", reason="./nox -s tests installs it")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_site_builds(copy):
    """Every page, in the order of the index; nothing is loaded from the network."""
    assert docs.build(copy / "docs", copy / "build") == 0
    made = copy / "build/site"
    pages = {path.name.removesuffix(".md") for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {path.stem for path in made.glob("*.html")} == {*pages, "index", "404"}
    index = (made / "index.html").read_text()
    places = [index.index(f'href="{name}.html"') for name in ("first-run", "setup-alps", "restart", "build", "causes")]
    assert places == sorted(places)
    for path in made.glob("*.html"):
        loads = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?([^\"' >]+)", path.read_text())
        assert [each for each in loads if "//" in each] == [], path.name
    assert "lint-codes" in (made / "search.json").read_text()


@pytest.mark.parametrize("link", ["(none.md)", "(launch.md#none)"])
def test_a_broken_link_or_anchor_fails_the_build(copy, capsys, link):
    with (copy / "docs/status.md").open("a") as file:
        file.write(f"\n[broken]{link}\n")
    assert docs.build(copy / "docs", copy / "build") != 0
    assert "does not exist" in capsys.readouterr().err


# What the authors of the set-ups type, in the words of the pages' tables.
TYPED = {
    "alps": ("podman build -t ngc-pytorch-deepspeed:24.06 .", "enroot import -x mount", "~/.edf/", "MODEL_ID",
             "sbatch deepspeed.sbatch", "squeue -u $USER", "tail -f slurm-<jobid>.out", "scancel <jobid>", "df -h .",
             "cat slurm-<jobid>.out", "podman --version", "podman images", "nvidia-smi topo -m", "NCCL_TIMEOUT=1800",
             "ls -la /capstor /iopsstor", "mkdir -p $OUTPUT_DIR && touch $OUTPUT_DIR/test", "ls -la $(dirname $PWD)",
             "edit `deepspeed_config.json`"),
    "aws": ('pip install "aws-parallelcluster"', "pcluster configure --config config.yaml", "pcluster create-cluster",
            "list-clusters", "delete-cluster", "sinfo", "ssh NODE", "enroot import -o llm.sqsh docker://", "wget ",
            "pip install 'huggingface_hub[cli]' wandb", "huggingface-cli login", "wandb login", "sbatch task.sbatch",
            '--task-prolog="setup.sh"', "--task-epilog", "squeue", "*.out"),
    "google-cloud": ("./manage_cluster.sh create NAME", "destroy NAME", "export PROJECT_ID=", "chmod +x", "sudo dnf",
                     "pip3 install --user -r requirements.txt", "sbatch run_llm.slurm", "squeue -u $USER",
                     "sbatch --export=ALL,EPOCHS=5 run_llm.slurm", "--gpus-per-node", "cat slurm-<job_id>.out",
                     "python3 inference.py", "nvidia-smi", "deepspeed_config.json", "./ghpc deploy"),
    "twcc": ("startDocker.sh", "startJupyterLabOnly.sh", "pip3 install --upgrade pip", "pip3 install transformers",
             "sbatch run_clm_DDP.sh", "module purge", "module load", "conda activate gpt2", "MASTER_ADDR", "RDZV_ID",
             "OUTPUT_DIR", "torchrun", "python run_clm.py", "--train_file", "python run_clm_no_trainer.py",
             "--streaming", "--low_cpu_mem_usage", "--deepspeed", "--config_overrides"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_the_page_of_a_set_up_has_an_equivalent_of_each_command(name):
    text = (ROOT / f"docs/setup-{name}.md").read_text()
    assert len(text.split()) <= 700
    table = text.split("## What you type\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    assert all(len(row) == 2 and len(row[1]) > 7 for row in rows)
    assert [words for words in TYPED[name] if not any(words in row[0] for row in rows)] == []


@pytest.mark.training
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the example needs torch")
def test_the_example_script_saves_when_asked_and_resumes(tmp_path):
    text = (ROOT / "docs/your-own-training.md").read_text()
    script = tmp_path / "train.py"
    example = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    body = [line for line in example.splitlines() if line and not line.startswith(("import", "from", '"""'))]
    assert len(body) <= 30
    script.write_text(example.replace("time.sleep(0.1)", "pass"))
    attempt = tmp_path / "attempts/1"
    attempt.mkdir(parents=True)
    variables = {"RUNNER_RUN": tmp_path, "RUNNER_ATTEMPT": attempt, "RUNNER_SAVE_AND_EXIT": attempt / "save-and-exit"}
    environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run((sys.executable, script), env=environ, capture_output=True, text=True)

    (attempt / "save-and-exit").touch()
    assert start().returncode == 75
    (attempt / "save-and-exit").unlink()
    again = start()
    assert (again.returncode, again.stdout) == (0, "resuming from step-000001.pt\n"), again.stderr
    assert (tmp_path / "checkpoints/step-000300.pt").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 300
