"""Each rule finds the file that breaks it alone, at its line; the fixed twin has no findings."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runner.environments.edf import Mount, find_edf
from runner.environments.environment import Environment
from runner.environments.lint.check import Linter
from runner.environments.lint.codes import CODES, SEVERITIES
from runner.environments.lint.finding import Setting, Subject
from runner.environments.lint.image import file
from runner.environments.lint.mounts import missing_source
from runner.environments.lint.problems import PROBLEMS
from runner.errors import RunnerError
from runner.images.sarus_store import Stored, write_record
from runner.images.squashfs_file import Squashfs, as_json, sidecar
from runner.project import Project
from runner.site_files import load_site
from tests.environments.lint_cases import CASES
from tests.environments.lint_scripts import HARMLESS, SCRIPTS

LOGIN = "machine {} login me password x\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images, mounts and logins; the tests change nothing in it but it.toml."""
    folder = tmp_path_factory.mktemp("lint")
    for name in ("there", "with,comma", "with blank", "home/.config/enroot", "half", "empty", "edf"):
        (folder / name).mkdir(parents=True)
    subprocess.run(("mksquashfs", "empty", "a.sqsh", "-quiet"), cwd=folder, check=True, capture_output=True)
    whole = (folder / "a.sqsh").read_bytes()
    (folder / "short.sqsh").write_bytes(whole[:100])
    (folder / "text.sqsh").write_text("no squashfs at all" * 10)
    (folder / "pytorch-25.01.sqsh").write_bytes(whole)
    for architecture in ("arm64", "amd64"):
        path = folder / f"for-{architecture}.sqsh"
        path.write_bytes(whole)
        source = "docker://nvcr.io#nvidia/pytorch:24.12-py3"
        made = Squashfs(path, path, "", "", len(whole), architecture, source=source)
        sidecar(path).write_text(as_json(made))
    hosts = ("nvcr.io", "authn.nvidia.com", "registry-1.docker.io", "quay.io", "jfrog.example.org")
    (folder / "home/.config/enroot/.credentials").write_text("".join(map(LOGIN.format, hosts)))
    write_record(folder, Stored("stored", "localhost/runner/stored:1", "stored", "1" * 12, "", created=1.0))
    (folder / "home/.config/containers").mkdir()
    (folder / "home/.config/containers/auth.json").write_text('{"auths": {"quay.io": {"auth": "bWU6eA=="}}}')
    (folder / "half/.credentials").write_text(LOGIN.format("nvcr.io"))
    for text in ("plain", "edf/plain"):
        (folder / f"{text}.toml").write_text('writable = true\nimage = "${HERE}/a.sqsh"\n')
    remap = 'image = "${HERE}/a.sqsh"\n[annotations]\ncom.pyxis.pytorch_remap_vars = "true"\n'
    (folder / "remap.toml").write_text(remap)
    for level in range(1, 12):
        above = f'base_environment = "./level{level - 1}.toml"\n' if level > 1 else ""
        (folder / f"level{level}.toml").write_text(above)
    return folder


@pytest.fixture
def linter(place):
    """linter(environ, engine, site, setting): the linter on a machine of the site `local`, unless told otherwise."""

    def make(environ=None, engine="ce", site=None, setting=None) -> Linter:
        given = {
            name: str(place / value) if name.isupper() and value in ("half", "home/.config/enroot") else value
            for name, value in (environ or {}).items()
        }
        known = {"HOME": str(place / "home"), "HERE": str(place), "RUNNER_IMAGES": str(place), **given}
        known_site = replace(load_site("local", known), **{"gpus_per_node": 0, "architecture": None, **(site or {})})
        return Linter(Project(place, place, place), Setting(known_site, engine, known, **(setting or {})))

    return make


def written(place, text, name="it.toml"):
    """The path of the file, an image in its first line unless the text says something about one."""
    path = place / name
    path.write_text(text if "image" in text or name != "it.toml" else 'image = "${RUNNER_IMAGES}/a.sqsh"\n' + text)
    return str(path)


def seen(linter, path):
    """(code, severity, line) of each finding."""
    return [
        (finding.code, finding.severity, finding.place.line if finding.place else None)
        for checked in linter.check(path)
        for finding in checked.findings
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rule_finds_its_mutant_and_leaves_the_mended_twin(place, linter, case):
    environ = dict(case.environ)
    found = seen(linter(environ, case.engine, case.site, case.setting), written(place, case.broken))
    assert {(code, severity) for code, severity, _ in found} == {(case.code, case.severity)}
    assert found[0][2] == case.line
    environ |= case.fixed_environ
    assert seen(linter(environ, case.engine, case.site, case.setting), written(place, case.fixed)) == []


@pytest.mark.parametrize("case", SCRIPTS, ids=lambda case: case.name)
def test_a_rule_about_scripts_finds_its_mutant_and_leaves_the_mended_twin(place, linter, case):
    head = "#!/bin/bash\n#SBATCH --nodes=2\n"
    check = linter({}, case.engine, case.site, case.setting)
    assert seen(check, written(place, head + case.broken, "job.sh")) == [(case.code, case.severity, case.line)]
    assert seen(check, written(place, head + case.fixed, "job.sh")) == []


def test_closed_folders_of_others_are_findings_and_no_error(tmp_path):
    """A colleague's EDF is checked to its end, and a closed folder in EDF_PATH hides no other."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "a.sqsh").write_text("x")
    own = Environment("it", None, str(closed / "a.sqsh"), mounts=(Mount(str(closed / "data"), "/data"),))
    subject = Subject(own, Setting(load_site("local", {"HOME": "/h"}), "ce", {}))
    project, user = Project(None, Path("/nowhere"), Path("/")), os.geteuid()
    closed.chmod(0o000)
    if user == 0:
        os.seteuid(65534)
    try:
        found = [*file(subject), *missing_source(subject)]
        with pytest.raises(RunnerError, match="there is no environment 'it'"):
            find_edf("it", project, {"EDF_PATH": str(closed)})
    finally:
        os.seteuid(user)
        closed.chmod(0o700)
    reasons = [f"cannot read {closed}/a.sqsh: Permission denied", f"cannot reach {closed}/data: Permission denied"]
    assert [one.reason for one in found] == reasons


@pytest.mark.parametrize("name", HARMLESS)
def test_scripts_that_only_look_wrong_have_no_findings(place, linter, name):
    assert seen(linter(), written(place, f"#!/bin/bash\n#SBATCH --nodes=2\n{HARMLESS[name]}", "job.sh")) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("-n 8", "a task cannot see the GPUs of the node's other tasks, but NCCL must see them"),
        ("-n $N", "if a node has several tasks, none of them sees the other tasks' GPUs, but NCCL must see them"),
    ],
)
def test_gpus_per_task_says_no_more_than_the_script_tells(place, linter, options, reason):
    script = written(place, f"#!/bin/bash\nsrun {options} --gpus-per-task=1 true\n", "job.sh")
    assert [each.reason for checked in linter().check(script) for each in checked.findings] == [reason]


def test_a_script_that_only_submits_others_needs_no_account(place, linter):
    """The scripts that it submits need one; a script without directives that each task runs has no rank too early."""
    check = linter(site={"account_required": True})
    job = "#!/bin/bash\n#SBATCH --nodes=2{}\ntrue\n"
    for text in (f"sbatch <<EOF\n{job.format(' -A a')}EOF\n", "sbatch -A a train.sh\n"):
        assert seen(check, written(place, f"#!/bin/bash\n{text}", "job.sh")) == []
    missing = written(place, f"#!/bin/bash\nsbatch <<EOF\n{job.format('')}EOF\n", "job.sh")
    assert seen(check, missing) == [("account-missing", "warning", 4)]
    assert seen(check, written(place, "#!/bin/bash\ntorchrun --node-rank=$SLURM_NODEID x.py\n", "job.sh")) == []


def test_off_the_site_no_environment_is_missing(place, linter):
    """Those of ~/.edf on the cluster, and their base environments."""
    check = linter(setting={"here": False})
    script = written(place, "#!/bin/bash\nsrun --environment=/users/me/.edf/x.toml true\n", "job.sh")
    assert seen(check, script) == [("environment-missing", "note", 2)]
    assert seen(check, written(place, 'base_environment = "nowhere"\n')) == [("base-missing", "note", 2)]


def test_every_known_problem_has_a_code_and_a_source():
    assert all(name in CODES and row.source.startswith("https://") and row.date for name, row in PROBLEMS.items())


def test_every_code_has_its_mutant_in_each_of_its_severities():
    shown = {(case.code, case.severity) for case in (*CASES, *SCRIPTS)}
    known = {(code, severity) for code, entry in CODES.items() for severity in entry.severities}
    # these two need files that a table of texts cannot hold: test_lint_files.py
    assert known - shown == {("file-unreadable", "error"), ("cannot-load", "error")}
    assert all(entry.title and entry.fix and set(entry.severities) <= set(SEVERITIES) for entry in CODES.values())
