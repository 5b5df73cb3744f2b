"""A start looks at no package that its command line does not use, and at every one that it may use."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training import imports  # noqa: E402

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SCRATCH = ("--config_name", "m", "--tokenizer_name", "m")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), set()),
        (("--config", "a.yaml", "--train_file", "a.txt"), set()),
        (("--dataset_name", "org/d", "--model_name_or_path", "org/m"), set()),
        (("--train_file=a.txt", *SCRATCH), {"datasets", "peft", "bitsandbytes", "deepspeed", "sklearn"}),
        (("--train_file", "a.txt", "--model_name_or_path", "m"), {"datasets", "deepspeed", "sklearn"}),
        (("--train_file", "a.txt", *SCRATCH, "--deepspeed", "zero2"), {"datasets", "peft", "bitsandbytes", "sklearn"}),
        (("--train_file", "a.txt", *SCRATCH, "--streaming"), {"peft", "bitsandbytes", "deepspeed", "sklearn"}),
        (("--dataset-name", "d", *SCRATCH), {"peft", "bitsandbytes", "deepspeed", "sklearn"}),
    ],
)
def test_only_what_is_certainly_unused_is_left_out(argv: tuple[str, ...], expected: set[str]) -> None:
    assert set(imports.unused_by_clm(argv)) == expected


CODE = """
import sys, types
sys.path.insert(0, {jobs!r})
from training import imports
imports.prepare(("datasets", "peft", "pandas"))
from transformers import Trainer
from transformers.utils import is_datasets_available, is_peft_available
assert not is_datasets_available() and not is_peft_available()
try:
    exec("import datasets", {{"__name__": "library"}})
except ImportError as error:
    print(error)
print(sorted({{"datasets", "peft", "pandas"}} & set(sys.modules)))
import gc
print(gc.isenabled())
exec("import datasets", {{"__name__": "training.data.reading"}})
print(sys.modules["datasets"].Dataset.from_dict({{"a": [1]}})["a"][0])
"""


def test_what_is_left_out_is_not_there_for_libraries_and_there_for_the_scripts() -> None:
    done = subprocess.run((sys.executable, "-c", CODE.format(jobs=str(JOBS))), capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines == ["datasets is left out: this command line does not use it", "[]", "True", "1"], done.stderr
