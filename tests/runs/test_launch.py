"""A launch is decided before anything is made: what cannot run is refused here, with the way to mend it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.commands.launch import explain
from runner.environments.edf import Mount
from runner.errors import RunnerError, unknown
from runner.images.squashfs_file import Squashfs, as_json, sidecar
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs.checks import lacks_account, path_on_host
from runner.runs.launch import prepare
from runner.runs.plan import Request, RunPlan
from runner.runs.run import Dependencies, Run
from runner.runs.schedulers import directives, slurm
from runner.runs.schedulers.slurm import refused
from runner.runs.sweep import with_values
from tests.runs.scripts import given

HOME = {"HOME": "/nowhere", "PATH": "/nonexistent"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    shipped, root = tmp_path / "shipped", tmp_path / "project"
    texts = {
        shipped / "jobs/sft.py": "",
        shipped / "edf/cpu.toml": 'image = "${RUNNER_IMAGES}/cpu.sqsh"\n',
        root / "runner.toml": "",
        root / "jobs/own.py": "",
        root
        / "jobs/own.toml": 'script = "jobs/own.py"\narguments = ["--from-file"]\n[resources]\ntasks_per_node = 2\n',
        root / "jobs/only.toml": 'script = "jobs/own.py"\n',
        root / "jobs/tool.toml": 'command = ["hostname", "-f"]\n',
        root / "edf/plain.toml": 'image = ""\n',
        root / "edf/mounting.toml": 'mounts = ["${DATA}/set:/set"]\n',
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Project(root, shipped, root)


def plan(project: Project, request: Request, **variables: str) -> RunPlan:
    return prepare(request, project, {**HOME, **variables}, Quiet())


def request(**changes: object) -> Request:
    return Request(**{"env": "plain", "site": "local", "engine": "host", **changes})  # type: ignore[arg-type]


def import_file(images: Path, name: str, architecture: str = "amd64", **more: Any) -> Path:
    """A squashfs file as `runner import` leaves it: named by content, with sidecar and symlink."""
    images.mkdir(parents=True, exist_ok=True)
    path = images / f"{name}-0123456789ab.sqsh"
    path.write_bytes(b"hsqs" + b"\0" * 92)
    known = Squashfs(path, images / f"{name}.sqsh", "sha256:1234", "5678", 96, architecture, **more)
    sidecar(path).write_text(as_json(known))
    (images / f"{name}.sqsh").symlink_to(path.name)
    return path


def test_a_named_script_brings_its_job_file(project: Project) -> None:
    """Resources and arguments of jobs/own.toml, then the words of the command line."""
    job = plan(project, request(script="own", words=("--more",))).job
    assert (job.name, job.script, job.arguments) == ("own", "jobs/own.py", ("--from-file", "--more"))
    assert job.resources.tasks_per_node == 2


def test_a_script_by_path_stands_alone(project: Project) -> None:
    job = plan(project, request(script="./jobs/own.py")).job
    assert (job.script, job.arguments, job.resources.tasks_per_node) == ("jobs/own.py", (), 1)


def test_a_job_file_names_a_script_as_the_command_line_does(project: Project) -> None:
    (project.start / "jobs/named.toml").write_text('script = "own"\n')
    assert plan(project, request(job="named")).job.script == "jobs/own.py"


def test_a_job_keeps_its_own_name(project: Project) -> None:
    assert plan(project, request(job="only")).job.name == "only"
    assert plan(project, request(script="only")).job.script == "jobs/own.py"
    assert plan(project, request(job="tool")).job.command == ("hostname", "-f")


def test_the_command_line_wins(project: Project) -> None:
    changed = request(job="own", given=given(tasks_per_node=3, name="other", time_minutes="90"))
    job = plan(project, changed).job
    assert (job.name, job.resources.tasks_per_node, job.resources.time_minutes) == ("other", 3, 90)


def test_nothing_to_launch_is_a_usage_error(project: Project) -> None:
    with pytest.raises(RunnerError, match="nothing to launch") as caught:
        plan(project, request())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message", "advice"),
    [
        ({"env": "plian", "words": ("true",)}, "no environment 'plian'", "'plain'"),
        ({"script": "sfft"}, "no script 'sfft'", "'sft'"),
        ({"job": "onw"}, "no job 'onw'", "'own'"),
        ({"site": "lokal", "words": ("true",)}, "no site 'lokal'", "'local'"),
        ({"engine": "podmann", "words": ("true",)}, "no engine 'podmann'", "'podman'"),
    ],
)
def test_a_near_miss_is_suggested(project: Project, changes: dict[str, object], message: str, advice: str) -> None:
    with pytest.raises(RunnerError, match=message) as caught:
        plan(project, request(**changes))
    assert advice in caught.value.fix


def test_a_missing_image_gives_the_two_commands(project: Project, tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="does not exist") as caught:
        plan(project, request(env="cpu", engine="sandbox", words=("true",)), RUNNER_IMAGES=str(tmp_path / "images"))
    assert caught.value.fix.startswith("runner build cpu\nrunner import cpu\n")
    assert "--build" in caught.value.fix


def test_a_command_without_dashes_is_told_what_to_write(project: Project) -> None:
    with pytest.raises(RunnerError, match="there is no job 'true'") as caught:
        plan(project, request(job="true"))
    assert "-- true" in caught.value.fix


def test_a_job_that_does_not_exist_is_told_what_to_write(project: Project) -> None:
    (project.start / "jobs/mine.py").touch()
    fixes = {"mine": "--script mine", "train.sbatch": f"{project.start}/train.sbatch is not a file"}
    for name, fix in fixes.items():
        with pytest.raises(RunnerError, match=f"there is no job '{name}'") as caught:
            plan(project, request(job=name))
        assert fix in caught.value.fix
    with pytest.raises(RunnerError) as caught:
        plan(project, request(job="."))
    assert caught.value.why == f"{project.start} is not a file"


def test_an_unknown_trainer_is_refused_with_its_line(project: Project) -> None:
    (project.start / "jobs/mine.toml").write_text('command = ["true"]\n\ntrainer = "nope"\n')
    with pytest.raises(RunnerError, match=r"jobs/mine\.toml:3: there is no trainer 'nope'"):
        plan(project, request(job="mine"))


def test_nothing_far_off_is_suggested() -> None:
    for name, known in (("sft-0001", "true-0001"), ("mpirun", "srun"), ("./nope.py", "noxfile.py")):
        assert "did you mean" not in unknown("x", name, [known]).fix
    for name, known in (("stf", "sft"), ("lanch", "launch"), ("ngc-sd", "ngc-ds")):
        assert known in unknown("x", name, [known]).fix
    sites = ["alps-clariden", "alps-daint"]
    assert "did you mean 'alps-clariden'?" in unknown("x", "clariden", sites).fix
    assert "did you mean" not in unknown("x", "alps", sites).fix


def test_a_missing_image_that_another_site_has_is_named(project: Project, tmp_path: Path) -> None:
    """What the demo built is on site local; the lab looks elsewhere."""
    import_file(tmp_path / "home/.local/share/runner/images", "cpu")
    with pytest.raises(RunnerError, match="does not exist") as caught:
        plan(project, request(env="cpu", engine="sandbox", words=("true",)), HOME=str(tmp_path / "home"),
             RUNNER_IMAGES=str(tmp_path / "none"))  # fmt: skip
    assert "the image is in the image folder of site local" in caught.value.why
    assert f"export RUNNER_IMAGES={tmp_path}/home/.local/share/runner/images" in caught.value.fix
    assert "runner import cpu" in caught.value.fix


def test_a_missing_image_is_sought_where_the_users_own_site_file_says(project: Project, tmp_path: Path) -> None:
    """The user's own file counts before the shipped one; a damaged file of another site is passed over."""
    sites = tmp_path / "config/runner/sites"
    sites.mkdir(parents=True)
    (sites / "alps.toml").write_text("[values]\nimage_folder = [")
    (sites / "local.toml").write_text(f'[values]\nimage_folder = "{tmp_path}/mine"\n')
    import_file(tmp_path / "mine", "cpu")
    with pytest.raises(RunnerError, match="does not exist") as caught:
        plan(project, request(env="cpu", engine="sandbox", words=("true",)), HOME=str(tmp_path / "home"),
             XDG_CONFIG_HOME=str(tmp_path / "config"), RUNNER_IMAGES=str(tmp_path / "none"))  # fmt: skip
    assert f"the image is in the image folder of site local: {tmp_path}/mine/cpu.sqsh" in caught.value.why


def test_a_dry_run_needs_no_account(project: Project) -> None:
    asked = request(site="alps-clariden", engine=None, dry_run=True, words=("true",))
    made = plan(project, asked, SCRATCH="/scratch/me")
    assert "#SBATCH --account=ACCOUNT\n" in made.script
    assert any("runner init --site alps-clariden --account NAME" in note for note in made.notes)
    named = plan(project, replace(asked, given=given(account="a01")), SCRATCH="/scratch/me")
    assert "#SBATCH --account=a01\n" in named.script and not any("account" in note for note in named.notes)


def test_build_makes_a_missing_image_first_and_only_then(project: Project, tmp_path: Path) -> None:
    images = tmp_path / "images"
    made: list[str] = []

    def make(environment: object, image: object, site: object) -> None:
        made.append("cpu")
        import_file(images, "cpu")

    for _ in range(2):
        wanted = request(env="cpu", engine="sandbox", words=("true",))
        prepare(wanted, project, {**HOME, "RUNNER_IMAGES": str(images)}, Quiet(), make)
    assert made == ["cpu"]
    refused = request(env="cpu", engine="sandbox", words=("true",), given=given(nodes=0))
    with pytest.raises(RunnerError, match="nodes cannot be 0"):  # and not after an hour
        prepare(refused, project, {**HOME, "RUNNER_IMAGES": str(tmp_path / "none")}, Quiet(), make)
    assert made == ["cpu"]


def test_the_symlink_is_resolved_once(project: Project, tmp_path: Path) -> None:
    """The emitted EDF names the file by content, so that a later import changes nothing for this run."""
    path = import_file(tmp_path / "images", "cpu")
    made = plan(project, request(env="cpu", engine="ce", words=("true",)), RUNNER_IMAGES=str(tmp_path / "images"))
    assert f'image = "{path}"' in made.files["environment.toml"]
    assert made.image.squashfs is not None and made.image.squashfs.sha256 == "5678"


def test_a_squashfs_file_of_anybody_is_taken_as_it_is(project: Project, tmp_path: Path) -> None:
    (tmp_path / "enroot.sqsh").write_bytes(b"hsqs")
    (tmp_path / "own.toml").write_text(f'image = "{tmp_path}/enroot.sqsh"\n')
    made = plan(project, request(env=str(tmp_path / "own.toml"), engine="ce", words=("true",)))
    assert made.image.reference == f"{tmp_path}/enroot.sqsh"


def test_a_file_that_is_no_squashfs_is_refused(project: Project, tmp_path: Path) -> None:
    (tmp_path / "torn.sqsh").write_bytes(b"<html>")
    (tmp_path / "own.toml").write_text(f'image = "{tmp_path}/torn.sqsh"\n')
    with pytest.raises(RunnerError, match="is not a squashfs file"):
        plan(project, request(env=str(tmp_path / "own.toml"), engine="ce", words=("true",)))


def test_a_registrys_image_goes_to_an_engine_that_pulls(project: Project, tmp_path: Path) -> None:
    (tmp_path / "pull.toml").write_text('image = "docker.io#library/busybox:1"\n')
    made = plan(project, request(env=str(tmp_path / "pull.toml"), engine="ce", words=("true",)))
    assert 'image = "docker.io#library/busybox:1"' in made.files["environment.toml"]
    with pytest.raises(RunnerError):
        plan(project, request(env=str(tmp_path / "pull.toml"), engine="sandbox", words=("true",)))


@pytest.mark.parametrize(
    ("known", "fix"),
    [
        ({"labels": {"runner.recipe": "cpu"}, "source": "cpu"}, "runner build cpu --import --site local"),
        ({"source": "docker://nvcr.io#a/b:1"}, "runner import docker://nvcr.io#a/b:1 --site local"),
    ],
)
def test_an_image_for_other_processors_is_refused_before_submission(
    project: Project, tmp_path: Path, known: dict[str, Any], fix: str
) -> None:
    import_file(tmp_path / "images", "cpu", "riscv64", **known)
    with pytest.raises(RunnerError, match="an image for riscv64, but the nodes of local are") as caught:
        plan(project, request(env="cpu", engine="sandbox", words=("true",)), RUNNER_IMAGES=str(tmp_path / "images"))
    assert "exec format error" in caught.value.why
    assert fix in caught.value.fix


def test_a_missing_mount_source_names_the_line(project: Project, tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match=r"mount source .*/set does not exist .*mounting\.toml:1") as caught:
        plan(project, request(env="mounting", engine="sandbox", words=("true",)), DATA=str(tmp_path))
    assert "create that path" in caught.value.fix


def test_a_relative_mount_source_is_not_looked_for_in_the_callers_folder(project: Project, tmp_path: Path) -> None:
    """The job starts in its run folder."""
    (tmp_path / "a.sqsh").write_bytes(b"hsqs")
    (tmp_path / "relative.toml").write_text('image = "./a.sqsh"\nmounts = ["./nowhere:/set", ".:/run"]\n')
    made = plan(project, request(env=str(tmp_path / "relative.toml"), engine="sandbox", words=("true",)))
    reason = "is not checked: its source is relative to the run folder"
    assert [f"the mount {text} {reason}" for text in ("./nowhere:/set", ".:/run")] == list(made.notes)[:2]
    mounts = replace(made.environment, image="", mounts=(Mount(".", "/run"),))
    assert path_on_host("/run", mounts, {}, None) is None


def test_a_mount_of_another_file_system_is_a_warning(project: Project) -> None:
    """What is not on this machine at all may be on the nodes; what has the job's variables cannot be judged."""
    asked = request(env="mounting", engine="ce", words=("true",))
    elsewhere = plan(project, replace(asked, site="generic-slurm", dry_run=True), DATA="/only-on-nodes/a")
    assert any("must exist on the nodes" in note for note in elsewhere.notes)
    with pytest.raises(RunnerError, match="/only-on-nodes/a/set does not exist"):  # without other nodes
        plan(project, asked, DATA="/only-on-nodes/a")
    unknown = plan(project, request(env="mounting", engine="ce", words=("true",)))
    assert any("is not checked" in note for note in unknown.notes)


def test_a_dry_run_turns_what_is_not_here_into_warnings(project: Project, tmp_path: Path) -> None:
    (project.roots[0] / "edf/both.toml").write_text('image = "${RUNNER_IMAGES}/cpu.sqsh"\nmounts = ["/no/such/x:/x"]\n')
    made = plan(project, request(env="both", site="alps-clariden", engine=None, dry_run=True, words=("true",),
                                 given=given(account="a")))  # fmt: skip
    assert 'image = "${SCRATCH}/runner/images/cpu.sqsh"' in made.files["environment.toml"]
    assert any("SCRATCH" in note for note in made.notes) and any("/no/such" in note for note in made.notes)
    assert any("${SCRATCH}/runner/runs/true-NNNN && sbatch job.sbatch" in line for line in explain(made, HOME, project))


def test_the_users_variables_of_sbatch_override_no_line_of_the_script(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its account and its partition become lines of the script: they come before those of the site."""
    asked = request(site="generic-slurm", words=("true",), dry_run=True, given=given(time_minutes="5", memory="8G"))
    assert plan(project, asked).trial().argv == ("sbatch", "--test-only")
    for name in ("TIMELIMIT", "MEM_PER_CPU", "OPEN_MODE", "EXPORT", "ACCOUNT", "PARTITION"):
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    gpus = "#!/bin/bash\n#SBATCH --gpus-per-node=4\n"
    assert directives.overriding(gpus, {"SBATCH_GPUS": "1", "SBATCH_GRES": "nvme"}) == ("SBATCH_GPUS",)
    made = plan(project, asked)
    assert "#SBATCH --account=x" in made.script and "#SBATCH --partition=x" in made.script
    names = ("ACCOUNT", "MEM_PER_CPU", "OPEN_MODE", "PARTITION", "TIMELIMIT")
    removed = ("env", *(f"--unset=SBATCH_{name}" for name in names))
    assert made.trial().argv == (*removed, "sbatch", "--test-only")
    assert made.by_hand("runs")[0].endswith(f"&& {' '.join(removed)} sbatch job.sbatch")
    (tmp_path / "job.sbatch").write_text(made.script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "${SBATCH_TIMELIMIT-17}"\n')
    (tmp_path / "sbatch").chmod(0o755)
    run = Run("true-0001", tmp_path, "true", "generic-slurm", "slurm", "2026")
    assert slurm.start(run, Dependencies(), Quiet()).job_ids == ("17",)
    assert not lacks_account(made.job, replace(made.site, account_required=True))
    bare = replace(made.job, sbatch=(), resources=replace(made.job.resources, account=None))
    for flags, lacks in (((), True), (("--account", "a01"), False), (("-Aa01",), False)):
        assert lacks_account(bare, replace(made.site, account_required=True, sbatch=flags)) is lacks


def test_a_value_of_a_sweep_goes_to_its_place_or_becomes_an_option(project: Project) -> None:
    made = plan(project, request(words=("sh", "-c", "echo {seed} {x}"), given=given(arguments=("--n={seed}",))))
    found = with_values(made, {"seed": "3", "lr": "1e-5"})
    assert found.job.command == ("sh", "-c", "echo 3 {x}")
    assert found.job.arguments == ("--n=3", "--lr", "1e-5")
    assert "'echo 3 {x}' --n=3 --lr 1e-5" in found.script and found.files["job.sbatch"] == found.script


def test_a_dry_run_tells_the_source_of_each_value(project: Project) -> None:
    (project.roots[0] / "edf/plain.toml").write_text('[env]\nLEVEL = "3"\n')
    lines = list(explain(plan(project, request(script="own", given=given(nodes=1))), HOME, project))
    text = "\n".join(lines)
    assert "jobs/own.toml:4" in text  # tasks_per_node
    assert "edf/plain.toml:2" in text or "plain.toml:2" in text
    assert any(line.split() == ["nodes", "1", "command", "line"] for line in lines)


def test_no_time_number_or_path_of_the_run_stands_in_the_script(project: Project) -> None:
    first, second = (plan(project, request(script="own")) for _ in range(2))
    assert first.script == second.script
    assert str(project.root) not in first.script


def test_the_default_environment_is_the_projects(project: Project) -> None:
    (project.roots[0] / "runner.toml").write_text('environment = "plain"\n')
    assert plan(project, request(env=None, words=("true",))).environment.name == "plain"
    (project.roots[0] / "runner.toml").write_text('enviroment = "plain"\n')
    with pytest.raises(RunnerError, match="enviroment") as caught:
        plan(project, request(env=None, words=("true",)))
    assert "environment" in caught.value.fix
    with pytest.raises(RunnerError, match="enviroment"):  # an environment that is named hides no mistake
        plan(project, request(env="plain", words=("true",)))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed", "--partition"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", "--account"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid", "--time"),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "--gpus-per-node",
        ),
        ("sbatch: error: something new", "--dry-run"),
    ],
)
def test_sbatchs_own_words_are_kept(words: str, advice: str) -> None:
    error = refused(words)
    assert error.why == words
    assert advice in error.fix


def test_the_snapshot_of_a_shipped_script_has_its_helpers(project: Project) -> None:
    (project.shipped / "jobs/training").mkdir()
    (project.shipped / "jobs/training/data.py").write_text("")
    made = plan(project, request(script="sft"))
    assert {"jobs/sft.py", "jobs/training/data.py", "jobs/own.py"} <= set(made.snapshot.files)
    assert json.dumps(made.snapshot.left_out) == "[]"
