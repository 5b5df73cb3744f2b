"""A trainer is one TOML file: ours, or the user's in jobs/trainers/. A wrong one is refused with its line and key."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.located_toml import Document, read_toml
from runner.project import Project
from runner.runs import trainer
from tests.runs.trainers.test_logs import read


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "jobs/trainers").mkdir(parents=True)
    return Project(tmp_path, tmp_path, tmp_path)


def write(project: Project, text: str, name: str = "mine") -> None:
    assert project.root
    (project.root / f"jobs/trainers/{name}.toml").write_text(text)


def test_a_trainer_of_the_user(project: Project) -> None:
    """It comes before ours, and wins over one of the same name."""
    write(project, "[[lines]]\nmatch = 'round [0-9]+'\nstep = 'round '\nloss = 'cost '\n")
    write(project, "[[lines]]\nmatch = 'mine'\nstep = 'x'\n", "nanogpt")
    text = trainer.render(None, project)
    names = [line.removeprefix("trainer ") for line in text.splitlines() if line.startswith("trainer ")]
    assert set(names[:2]) == {"mine", "nanogpt"} and names[-2:] == ["generic", "bars"] and len(names) == len(set(names))
    assert trainer.render("mine", project).splitlines() == [
        "chosen mine", "trainer mine", "own yes", "line round [0-9]+", "find step round ", "find loss cost ",
    ]  # fmt: skip


def test_the_page_describes_each_trainer_and_its_examples_work(project: Project) -> None:
    page = (Path(__file__).parents[3] / "docs/trainers.md").read_text()
    for path in Path(trainer.__file__).with_name("trainers").glob("*.toml"):
        assert f"| `{path.stem}` |" in page
    _, lines, script, checkpoints = re.findall(r"```toml\n(.*?)```", page, re.S)
    write(project, lines + script + checkpoints)
    log = b"round 30 of 900: cost 2.5, 1200 words/s\n"
    name, [entry] = read(log, trainer.render(None, project))
    expected = {"step": 30, "total_steps": 900, "loss": 2.5, "tokens_per_second": 1200}
    assert name == "mine" and entry.items() >= expected.items()


def test_a_launch_reads_none_of_our_files(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """But payload/trainers.txt, which is made from them."""
    read = []

    def noted(path: Path) -> Document:
        read.append(path.stem)
        return read_toml(path)

    monkeypatch.setattr(trainer, "read_toml", noted)
    write(project, "like = 'huggingface'\n[script]\nmatch = 'mytrainer'\n")
    assert trainer.render("megatron-lm", project, ["--save", "out"]).splitlines() == [
        "chosen megatron-lm", "trainer megatron-lm", "save_signal TERM",
        r"recognize  iteration +[0-9]+/ *[0-9]+ \| consumed samples:",
        "checkpoint_name iter_*/", "checkpoint_tracker latest_checkpointed_iteration.txt", "checkpoint_folder out",
        "line successfully saved checkpoint from iteration +[0-9]+ to ",
        "find step successfully saved checkpoint from iteration +",
        "find saved successfully saved checkpoint from iteration +[0-9]+ to ",
    ]  # fmt: skip
    found = trainer.saving("megatron-lm", project, "")
    assert found and (found.signals, found.add) == (("TERM",), "--exit-signal-handler") and not read
    found = trainer.saving(None, project, "from mytrainer")
    assert found and (found.trainer, found.signals, found.saves) == ("mine", ("TERM",), "")
    assert read == ["mine", "huggingface"]


def test_the_file_of_a_run_can_be_completed(project: Project) -> None:
    """For what reads the steps of a log: with all patterns of ours; the user's are complete already."""
    write(project, "[[lines]]\nmatch = 'a'\nstep = 'x'\n", "nanogpt")
    text = trainer.render(None, project)
    assert "find loss" not in text
    complete = trainer.readable(text)
    assert complete.splitlines()[:4] == ["trainer nanogpt", "own yes", "line a", "find step x"]
    names = re.findall(r"^trainer .*", text, re.M)
    assert re.findall(r"^trainer .*", complete, re.M) == names
    assert complete.count("\nfind loss ") > 20 and "find loss : loss " not in complete
    assert trainer.readable(complete) == complete
    assert trainer.readable("trainer gone\nline a\n") == "trainer gone\nline a\n"
    generic = trainer.readable(trainer.render("generic", project))
    assert re.findall(r"^trainer (.*)", generic, re.M) == ["generic", "bars"] and generic.count("\nline ") > 10


def test_an_unknown_trainer(project: Project) -> None:
    with pytest.raises(RunnerError) as caught:
        trainer.render("megatronlm", project)
    assert caught.value.what == "there is no trainer 'megatronlm'"
    assert caught.value.fix == "did you mean 'megatron-lm'?"
    with pytest.raises(RunnerError) as caught:
        trainer.render("keras", project)
    assert "jobs/trainers/NAME.toml" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("[[lines]]\nmatch = 'a'\nstep = 'step ('\n", 3, "step is not a pattern: 'step ('"),
        ("[[lines]]\nmatch = 'a['\n", 2, "match is not a pattern: 'a['"),
        ("[[lines]]\nmatch = 'a'\n[[lines]]\nmatch = 'b'\nloss = 'loss \\d'\n", 5, "loss uses \\d"),
        ("[[lines]]\nmatch = '(?:a)'\n", 2, "match uses (?"),
        ("[[lines]]\nmatch = 'a{2}'\n", 2, "match uses {2}"),
        ("[[lines]]\nmatch = 3\n", 2, "match must be a pattern"),
        ("detect = ''\n", 1, "detect must be a pattern"),
        ("[[lines]]\nstep = 'a'\n", 1, "there is no `match` in [[lines]]"),
        ("[[lines]]\nmatch = 'a'\nTotal-Steps = 'a'\n", 3, "'Total-Steps' cannot be a key"),
        ("[[lines]]\nmatch = 'a'\ntotal_steps = 'a'\n", 3, "'total_steps' cannot be a key"),
        ("like = 'hugingface'\n", 1, "there is no trainer 'hugingface'"),
        ("line = 'a'\n", 1, "unknown key 'line'"),
        ("", 1, "the trainer has no patterns"),
        ("summary = 'a'\ndetect = 'b'\n[checkpoints]\n", 1, "the trainer has no patterns"),
        ("[[lines]]\nmatch = 'a'\n", 1, "the trainer has no patterns"),
        ("[checkpoints]\nname = 'a'\nneed = ['b']\n", 3, "unknown key 'need' in [checkpoints]"),
        ("[checkpoints]\nneeds = ['a']\n", 1, "there is no `name` in [checkpoints]"),
        ("[checkpoints]\nname = 'a'\nneeds = [3]\n", 3, "checkpoints.needs must be text, or an array of texts"),
    ],
)
def test_a_file_with_an_error(project: Project, text: str, line: int, what: str) -> None:
    write(project, text)
    with pytest.raises(RunnerError) as caught:
        trainer.render(None, project)
    assert caught.value.what.endswith(what), caught.value.what
    assert f"jobs/trainers/mine.toml:{line}: " in caught.value.what
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "end", ["$(x)", "^^", "a$b", "()", "*", "x**", "[[:alpha:]", "[a-", "[z-a]", "\\", "/", '"', "%"]
)
def test_a_pattern_works_or_is_refused(project: Project, end: str) -> None:
    """By Python, which reads the steps, and by the programs of a compute node."""
    write(project, f"[[lines]]\nmatch = '''step [0-9]+|{end}'''\nstep = 'step '\nloss = 'loss '\n")
    with suppress(RunnerError):
        _, entries = read(b"step 1 loss 2\n", trainer.render("mine", project))
        assert [(entry["step"], entry["loss"]) for entry in entries] == [(1, 2)]


def test_a_file_of_another_user_that_is_no_trainer(project: Project, tmp_path: Path) -> None:
    """In a shared folder. It never blocks a launch; what it links to is not copied into a run."""
    mine = tmp_path / "jobs/trainers/mine.toml"
    os.mkfifo(mine)
    with pytest.raises(RunnerError, match="cannot read the trainer") as caught:
        trainer.render(None, project)
    assert str(mine) in caught.value.what and caught.value.fix
    assert trainer.render("nanogpt", project)  # only the chosen trainer is read
    mine.unlink()
    with mine.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunnerError, match="cannot read the trainer"):
        trainer.render(None, project)
    mine.unlink()
    mine.mkdir()
    with pytest.raises(RunnerError, match="cannot read the trainer"):
        trainer.render(None, project)
    mine.rmdir()
    (tmp_path / "secret").write_text('token = "correct-horse-battery"\n')
    mine.symlink_to(tmp_path / "secret")
    with pytest.raises(RunnerError, match="unknown key 'token'") as caught:
        trainer.render(None, project)
    assert "correct-horse" not in f"{caught.value.what} {caught.value.why} {caught.value.fix}"
    mine.unlink()
    mine.symlink_to(tmp_path / "nothing")
    with pytest.raises(RunnerError, match="cannot read"):
        trainer.render(None, project)


def test_our_own_patterns_compile() -> None:
    """A launch does not check them again."""
    for path in sorted(Path(trainer.__file__).with_name("trainers").glob("*.toml")):
        project = Project(path.parents[1], path.parents[1], path.parents[1])
        assert trainer.render(path.stem, project)


def test_the_folder_of_the_checkpoints_is_an_argument(project: Project) -> None:
    def folders(*words: str) -> list[str]:
        lines = trainer.render("huggingface", project, words).splitlines()
        return [line.removeprefix("checkpoint_folder ") for line in lines if line.startswith("checkpoint_folder ")]

    assert folders("train.py", "--output_dir", "/data/out") == ["/data/out"]
    assert folders("--output_dir={run}/checkpoints") == ["{run}/checkpoints"]
    assert folders("--output_dir=out", "--x") == ["out"]
    assert folders("--output_dir", "--x") == folders("--out", "x") == folders("--output_dir", "$OUT") == []
