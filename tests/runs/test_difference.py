"""Two launches are compared by what they were made of; equal ones give no line, and each change gives its own."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import diff, submit
from runner.runs.diff import Difference, Side, compare, run_side, side_now
from runner.runs.launch import prepare
from runner.runs.plan import Request
from runner.runs.run import SUBMITTED, Run, save
from runner.runs.secrets import HIDDEN
from runner.runs.sweep import with_values

ROOT = Path(__file__).resolve().parents[2]

LOCK = """\
[run]
name = "NAME"
created = "2026-11-20T10:00:00+00:00"
runner = "0.1.0"
script_sha256 = "NAME"

[image]
reference = "/images/a.sqsh"
link = "/images/NAME.sqsh"
sha256 = "aa"

[environment]
name = "ngc-ds"
path = "/NAME"
engine = "ce"

[environment.env]
NCCL_DEBUG = "WARN"

[code]
commit = "c0"
files = 2

[job]
name = "NAME"
script = "jobs/sft.py"
arguments = ["--lr", "1"]

[job.resources]
nodes = 2

[site.values]
name = "alps-clariden"

[site.sources]
name = "NAME"
"""
NOTED = 'driver = "580.95"\npython = "3.12.3"\n\n[packages]\n"numpy" = "2.3.1"\n"torch" = "2.8.0"\n'
EDF = '# NAME\nimage = "/images/NAME.sqsh"\nmounts = ["/a:/a", "/b:/b"]\nwritable = true\n[env]\nX = "NAME"\n'


def make(folder: Path, name: str, changes: Mapping[str, str] | None = None, edf: str = EDF) -> Run:
    run = Run(name, folder / name, "sft", "alps-clariden", "slurm", "2026-11-20T10:00:00+00:00", SUBMITTED, ("17",))
    (run.code / "jobs").mkdir(parents=True)
    save(run)
    lock = LOCK.replace("NAME", name)
    for old, new in (changes or {}).items():
        assert old in lock
        lock = lock.replace(old, new)
    (run.folder / "lock.toml").write_text(lock)
    (run.folder / "environment.toml").write_text(edf.replace("NAME", name))
    for file, text in {"jobs/sft.py": "print(1)\n", "README.md": "x\n"}.items():
        (run.code / file).write_text(text)
        os.utime(run.code / file, (0, 0))
    return run


def between(left: Run, right: Run) -> tuple[Difference, ...]:
    return compare(run_side(left), run_side(right)).differences


def test_names_places_and_times_of_a_launch_are_no_difference(tmp_path: Path) -> None:
    assert between(make(tmp_path, "sft-0001"), make(tmp_path, "sft-0002")) == ()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"--lr", "1"', '"--lr", "2"', ("arguments", "arguments", ["--lr", "1"], ["--lr", "2"])),
        ('script = "jobs/sft.py"', 'command = ["x"]', ("arguments", "script", "jobs/sft.py", None)),
        ("nodes = 2", "nodes = 4", ("resources", "nodes", 2, 4)),
        ('sha256 = "aa"', 'sha256 = "bb"', ("image", "sha256", "aa", "bb")),
        ('engine = "ce"', 'engine = "pyxis"', ("environment", "engine", "ce", "pyxis")),
        ('NCCL_DEBUG = "WARN"', 'NCCL_DEBUG = "INFO"', ("variables", "NCCL_DEBUG", "WARN", "INFO")),
        ('name = "alps-clariden"', 'name = "twcc"', ("site", "name", "alps-clariden", "twcc")),
        ('runner = "0.1.0"', 'runner = "0.2.0"', ("run", "runner", "0.1.0", "0.2.0")),
    ],
)
def test_each_change_of_the_lock_is_one_line_of_its_kind(
    tmp_path: Path, old: str, new: str, expected: tuple[object, ...]
) -> None:
    found = between(make(tmp_path, "a-1"), make(tmp_path, "a-2", {old: new}))
    assert expected in [(each.kind, each.name, each.left, each.right) for each in found]
    assert len(found) == (2 if "command" in new else 1)


def test_an_image_without_a_sum_is_compared_by_its_name_alone(tmp_path: Path) -> None:
    left, right = make(tmp_path, "a-1"), make(tmp_path, "a-2", {'sha256 = "aa"\n': ""})
    assert between(left, right) == ()
    other = make(tmp_path, "a-3", {'sha256 = "aa"\n': "", "/images/a.sqsh": "/images/b.sqsh"})
    assert [each.name for each in between(left, other)] == ["reference"]


def test_of_the_edf_each_mount_and_key_counts_comments_do_not(tmp_path: Path) -> None:
    left = make(tmp_path, "a-1")
    changed = EDF.replace('"/b:/b"', '"/c:/c"').replace("writable = true", "writable = false")
    assert [(each.name, each.left, each.right) for each in between(left, make(tmp_path, "a-2", edf=changed))] == [
        ("mounts", "/b:/b", None),
        ("mounts", None, "/c:/c"),
        ("writable", True, False),
    ]
    turned = make(tmp_path, "a-3", edf=EDF.replace('"/a:/a", "/b:/b"', '"/b:/b", "/a:/a"'))
    assert [each.left for each in between(left, turned)] == ["/a:/a /b:/b"]


def test_of_the_code_every_file_is_compared_by_its_bytes(tmp_path: Path) -> None:
    left, right = make(tmp_path, "a-1"), make(tmp_path, "a-2")
    (right.code / "jobs/sft.py").write_text("print(2)\n")
    (right.code / "README.md").chmod(0o755)
    (right.code / "jobs/new.py").symlink_to("sft.py")
    os.utime(right.code / "jobs/new.py", (0, 0), follow_symlinks=False)
    assert [(each.kind, each.name, each.left, each.right) for each in between(left, right)] == [
        ("code", "README.md", "not executable", "executable"),
        ("code", "jobs/new.py", None, "there"),
        ("code", "jobs/sft.py", "other text", "other text"),
    ]


def test_what_a_job_wrote_among_its_code_is_not_its_code(tmp_path: Path) -> None:
    left, right = make(tmp_path, "a-1"), make(tmp_path, "a-2")
    (right.code / "result.txt").write_text("42")
    found = compare(run_side(left), run_side(right))
    assert found.differences == () and found.left_out == ("code: 1 files that a-2 wrote into its snapshot",)


def test_what_their_containers_held_is_compared_where_both_have_noted_it(tmp_path: Path) -> None:
    """Of each run the newest attempt that got so far counts."""
    left, right = make(tmp_path, "a-1"), make(tmp_path, "a-2")
    for attempt, text in ((left.folder / "attempts/1", NOTED), (right.folder / "attempts/1", "broken off")):
        attempt.mkdir(parents=True)
        (attempt / "inside.toml").write_text(text)
    found = compare(run_side(left), run_side(right))
    assert found.differences == ()
    assert found.left_out == tuple(
        f"{it}: a-2 did not record what its container contains" for it in ("packages", "inside")
    )
    (right.folder / "attempts/2").mkdir()
    (right.folder / "attempts/2/inside.toml").write_text(NOTED.replace("580.95", "570.1").replace('"2.8', '"2.9'))
    (right.folder / "attempts/3").mkdir()
    assert [(each.kind, each.name, each.left, each.right) for each in between(left, right)] == [
        ("packages", "torch", "2.8.0", "2.9.0"),
        ("inside", "driver", "580.95", "570.1"),
    ]


def test_without_a_snapshot_the_commit_is_compared_and_that_is_said(tmp_path: Path) -> None:
    left, right = make(tmp_path, "a-1"), make(tmp_path, "a-2", {'"c0"': '"c1"'})
    assert between(left, right) == ()  # the files themselves are the same
    right.code.rename(tmp_path / "away")
    found = compare(run_side(left), run_side(right))
    assert [(each.name, each.right) for each in found.differences] == [("commit", "c1")]
    assert "a-2 is gone" in found.left_out[0]


def test_a_run_of_a_sweep_is_compared_with_a_launch_with_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_RUNS", str(tmp_path / "runs"))
    request = Request(words=("true",), env="host", site="local", engine="host")
    project = Project(None, ROOT, tmp_path)
    plan = prepare(request, project, os.environ, Quiet())
    (tmp_path / "runs").mkdir()
    words = ("launch", "--sweep", "lr=1,2", "--", "true")
    run = submit.made(with_values(plan, {"lr": "1"}), tmp_path / "runs", words, Quiet(), parameters={"lr": "1"})
    for each in (run, replace(run, parameters={}, sweep="")):
        assert compare(run_side(each), side_now(each, lambda words: request, project)).differences == ()


def test_hidden_values_are_said_to_be_left_out() -> None:
    side = Side("a", {"environment.env": {"HF_TOKEN": HIDDEN}}, "", diff.Tree("a", {}))
    found = compare(side, replace(side, name="b"))
    assert found.differences == () and "secrets" in found.left_out[0]
