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


NAMES = """
import sys
opened = [0]
sys.addaudithook(lambda event, args: event == "open" and "transformers/models/" in str(args[0]) and opened.append(1))
sys.path.insert(0, {jobs!r})
from pathlib import Path
from training import imports, transformers_names
imports.hide(("torch", "datasets"))
transformers_names.remember(Path({cache!r}))
import transformers
from transformers import AutoConfig
print(len(opened) > 1000, AutoConfig.__module__, len(dir(transformers)), len(dir(transformers.models)))
"""


def test_the_names_of_transformers_are_read_once_and_a_broken_note_is_made_anew(tmp_path: Path) -> None:
    """The first start reads the files of all models; a later one has the same names without them."""
    code = NAMES.format(jobs=str(JOBS), cache=str(tmp_path))

    def start() -> list[str]:
        done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = start()
    assert first[0] == "True"
    for note in (tmp_path / "imports").iterdir():
        note.write_text('[["torch"]')
    assert start() == first
    assert start() == ["False", *first[1:]]
