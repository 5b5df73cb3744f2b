"""The set-ups that come along give, each on its site, a batch script to be read whole; bash and shellcheck agree."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.machine.report import Quiet
from runner.project import find_project
from runner.runs.launch import prepare
from runner.runs.plan import Request
from tests.runs.scripts import given

ROOT = Path(__file__).parents[2]
ENVIRON = {"HOME": "/home/me", "USER": "me", "SCRATCH": "/scratch/me", "RUNNER_IMAGES": "/images", "PATH": "/nowhere"}

# site, engine where the site leaves the choice to the machine, words of the user's own
SET_UPS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "gpt2-openwebtext": ("gcp-g2", "pyxis", ()),
    "clm-gpt2-2x8": ("twcc", None, ("--train_file", "/data/corpus.jsonl")),
    "llama31-8b-sft": ("aws-parallelcluster", None, ()),
    "alps-zero3-llama2-7b": ("alps-clariden", None, ()),
    "megatron-gpt": ("alps-clariden", None, ("--size", "3.6B", "--mock-data", "--benchmark")),
}


def dry_run(name: str) -> str:
    site, engine, words = SET_UPS[name]
    request = Request(job=name, site=site, engine=engine, words=words, given=given(account="a-g1"), dry_run=True)
    return prepare(request, find_project(ROOT), ENVIRON, Quiet()).script


@pytest.mark.parametrize("name", SET_UPS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    """`runner launch NAME --dry-run`."""
    golden(f"jobs/{name}.sbatch", dry_run(name))


@pytest.mark.uses("shellcheck")
def test_clean_for_bash_and_shellcheck(tmp_path: Path) -> None:
    for name in SET_UPS:
        path = tmp_path / f"{name}.sbatch"
        path.write_text(dry_run(name))
        subprocess.run(("bash", "-n", str(path)), check=True)
        # SC2016: `$` in single quotes is meant as text. SC1091: the payload is checked by itself.
        done = subprocess.run(
            ("shellcheck", "--exclude=SC2016,SC1091", str(path)), capture_output=True, text=True, check=False
        )
        assert done.stdout == "", name


def test_gpt2_has_the_defaults_of_the_set_up_on_google_cloud() -> None:
    """10 epochs over 10 % of the text, on eight nodes with one L4 each."""
    text = " ".join(dry_run("gpt2-openwebtext").replace("\\\n", " ").split())
    for words in ("--nodes=8", "--gpus-per-node=1", "--data_percentage 10", "--num_train_epochs 10"):
        assert f"{words} " in text


def test_what_one_submission_says_reaches_the_script() -> None:
    """Nothing in the batch script sets EPOCHS and the like, so that tasks see `sbatch --export=ALL,EPOCHS=3`."""
    text = dry_run("gpt2-openwebtext")
    for word in ("EPOCHS=num_train_epochs", "CHECKPOINT_DIR=output_dir", "DATA_PERCENTAGE=data_percentage"):
        assert word in text.split()
    assert "--export=ALL" in text
    assert "inside EPOCHS" not in text
