"""A launch finds the signal on which a trainer saves in its script, and says when the program would not save."""

from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.project import Project
from runner.runs import resolve
from runner.runs.job import Job, command_line, load_job_file
from runner.runs.program import Program
from runner.runs.save_signal import with_save_signal
from tests.runs.scripts import BARE, LOCAL, SLURM, overrides, script

HF = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments(out))\n"
LIGHTNING = "import lightning as L\nL.Trainer().fit(model)\n"
MEGATRON = "from megatron.training import pretrain\npretrain()\n"


def launched(folder: Path, text: str, *arguments: str, site: object = SLURM, **settings: object) -> Job:
    """The job of a script, as a launch completes it."""
    (folder / "train.py").write_text(text)
    project = Project(folder, folder, folder)
    given = {"launcher": "torchrun", **settings}
    layer = command_line({"script": "train.py", "arguments": arguments, **given})
    job = resolve.resolve((layer,), BARE, SLURM)
    return with_save_signal(job, Program("train.py", (), folder), project, LOCAL if site is LOCAL else SLURM)


def warning(job: Job) -> str:
    return next((note for note in job.notes if "may not save" in note), "")


@pytest.mark.parametrize(
    ("text", "arguments", "launcher", "signals", "missing"),
    [
        (HF, (), "torchrun", ("TERM",), "enable_jit_checkpoint=True"),
        (HF, ("--enable_jit_checkpoint",), "torchrun", ("TERM",), ""),
        (HF.replace("(out)", "(out, enable_jit_checkpoint=True)"), (), "none", ("TERM",), ""),
        (MEGATRON, (), "torchrun", ("TERM",), "--exit-signal-handler"),
        (MEGATRON, ("--exit-signal-handler",), "torchrun", ("TERM",), ""),
        (MEGATRON, ("--exit-signal-handler", "--exit-signal", "SIGUSR2"), "torchrun", (), ""),
        (LIGHTNING, (), "srun", ("USR1",), ""),
        (LIGHTNING, (), "torchrun", ("USR1",), "--launcher srun"),
        ("import nemo_automodel\n", (), "torchrun", ("TERM",), ""),
        ("print('step 1 loss 2')\n", (), "torchrun", (), ""),
        (HF + "from training import save_and_exit\n", (), "torchrun", (), ""),
        (HF + "os.environ['RUNNER_SAVE_AND_EXIT']\n", (), "torchrun", (), ""),
    ],
)
def test_the_script_shows_the_trainer(
    tmp_path: Path, text: str, arguments: tuple[str, ...], launcher: str, signals: tuple[str, ...], missing: str
) -> None:
    job = launched(tmp_path, text, *arguments, launcher=launcher)
    assert job.save_signal == signals
    assert missing in warning(job) and bool(missing) == bool(warning(job))
    shown = script(job, site=SLURM)
    assert ("RUNNER_SAVE_SIGNAL" in shown) == bool(signals)


def test_the_job_file_and_the_command_line_decide(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for value, expected in (('"USR1"', ("USR1",)), ('["TERM", "USR1"]', ("TERM", "USR1")), ('"none"', ("none",))):
        path.write_text(f"script = 'train.py'\nsave_signal = {value}\n")
        assert resolve.resolve((load_job_file(path),), BARE, SLURM).save_signal == expected
    assert launched(tmp_path, HF, save_signal=("none",)).save_signal == ("none",)
    assert launched(tmp_path, HF, trainer="lightning").save_signal == ("USR1",)
    assert launched(tmp_path, HF, trainer="none").save_signal == ()
    assert launched(tmp_path, HF, save_seconds=0).save_signal == ()


def test_without_a_time_limit_there_is_no_warning(tmp_path: Path) -> None:
    assert not warning(launched(tmp_path, HF, site=LOCAL))


def test_a_wrong_signal(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for wrong, fix in (("TREM", "did you mean 'TERM'?"), ("HUP", "use one of the known names")):
        path.write_text(f"command = ['true']\nsave_signal = '{wrong}'\n")
        with pytest.raises(RunnerError, match=f"there is no save_signal '{wrong}'") as caught:
            resolve.resolve((load_job_file(path),), BARE, SLURM)
        assert f"{path}:2" in caught.value.what and caught.value.fix == fix


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--signal=USR1@60", "use --save-signal USR1 --save-seconds 60, or save_signal and save_seconds in a job file"),
        ("--signal=B:SIGTERM@300", "use --save-signal TERM --save-seconds 300, or save_signal and save_seconds"),
        ("--signal=10@90", "use --save-signal USR1 --save-seconds 90"),
        ("--signal=USR2@600", "use --save-seconds 600: every program that handles USR2 gets it"),
        ("--signal=HUP@60", "use --save-signal TERM or USR1, and --save-seconds 60"),
    ],
)
def test_a_flag_of_sbatch_for_the_signal_names_the_setting(flag: str, fix: str) -> None:
    job = resolve.resolve((overrides(sbatch=(flag,)),), BARE, SLURM)
    with pytest.raises(RunnerError) as caught:
        script(job, site=SLURM)
    assert caught.value.fix.startswith(fix)
