"""`runner env check`: several environments and scripts at once; text and JSON; exit code 1 on errors alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.commands.env_check import _is_here
from runner.environments.lint.codes import CODES
from runner.site_files import load_site
from tests import schemas
from tests.lab.sarus import Sarus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path):
    """A project with a clean environment, one with an error, one with a warning, and a script."""
    (tmp_path / "edf").mkdir()
    (tmp_path / "runner.toml").touch()
    (tmp_path / "edf/clean.toml").write_text('image = "/a.sqsh"\n')
    (tmp_path / "edf/wrong.toml").write_text('image = "/a.sqsh"\nworkdir = "/$X y"\n')
    (tmp_path / "edf/risky.toml").write_text('image = "/a.sqsh"\n[env]\nNCCL_PROTO = "^LL128"\n')
    script = "#!/bin/bash\n#SBATCH --account=g1\n#SBATCH --mem=0\nsrun --environment=risky true\n"
    (tmp_path / "job.sh").write_text(script)
    return tmp_path


def check(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "runner", "env", "check", "--site", "alps-clariden", *words)
    variables = {**os.environ, "HOME": str(project)}
    return subprocess.run(argv, cwd=project, env=variables, capture_output=True, text=True, check=False)


def test_one_call_checks_names_paths_and_scripts_with_the_environments_in_them(project):
    done = check(project, "clean", "./edf/wrong.toml", "job.sh")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        "edf/wrong.toml:2: error: workdir contains $X without braces, which is plain text, not a variable"
        " [variable-without-braces]",
        "job.sh:3: error: --mem=0: Clariden's Slurm does not allow it; --mem=450G is most of a node [sbatch-refused]",
        "edf/risky.toml:3: warning: NCCL_PROTO overrides the settings of the network hook [stale-tuning]",
    ]
    assert "this machine does not look like one of site alps-clariden" in done.stderr
    assert "4 environments and scripts on alps-clariden with ce: 2 errors, 1 warning" in done.stderr


@pytest.fixture
def both(tmp_path):
    """A project with an environment for both engines, one for each, and one for none."""
    (tmp_path / "edf").mkdir()
    (tmp_path / "runner.toml").touch()
    head = 'image = "quay.io/x/y:1"\nentrypoint = false\n'
    texts = {
        "both": head,
        "today": 'image = "/elsewhere/a.sqsh"\nentrypoint = false\n',
        "next": f'{head}devices = ["nvidia.com/gpu=all"]\n',
        "none": f"{head}mounts = [3]\n",
    }
    for name, text in texts.items():
        (tmp_path / f"edf/{name}.toml").write_text(text)
    return tmp_path


def test_both_says_with_which_engine_an_environment_works_and_why_not_with_the_other(both):
    done = check(both, "both", "today", "next", "none", "--as", "both")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0] == "both works with ce and with sarus"
    path = "'/elsewhere/a.sqsh' is a path, but Sarus Suite runs images from its own store [image-path]"
    assert lines[1] == f"today works with ce, not with sarus, because {path}"
    assert lines[2].startswith(
        "next works with sarus, not with ce, because the engine 'ce' cannot use the value of devices"
    )
    assert lines[3].startswith("none does not work with ce, because") and "and not with sarus, because" in lines[3]
    assert "  only with sarus" in lines
    found = schemas.check("env check", check(both, "today", "--as", "both", "--json").stdout)
    assert (found["engine"], [(row["ce"], row["sarus"]) for row in found["works"]]) == ("both", [(True, False)])


def test_the_shipped_environment_for_alps_works_with_both(both):
    done = check(both, "ngc-ds-alps", "--as", "both")
    assert done.stdout.startswith("ngc-ds-alps works with ce and with sarus\n") and done.returncode == 0
    assert "cxi" in done.stdout and "com.hooks.aws_ofi_nccl.variant has no effect" in done.stdout


def test_both_changes_no_file(both):
    done = check(both, "both", "--as", "both", "--fix")
    assert done.returncode == 2 and "a change for one engine may be wrong for the other" in done.stderr


def test_the_answer_of_sarusctl_is_shown_apart(both, monkeypatch):
    sarus = Sarus(both / "sarus")
    for name, value in sarus.environ.items():
        monkeypatch.setenv(name, value)
    done = check(both, "both", "--engine", "sarus")
    path = both / "edf/both.toml"
    assert done.stdout == f"sarusctl validate: {path} is a valid EDF file\n"  # as the user guide prints it
    assert done.returncode == 0 and sarus.calls() == [f"validate {path}"]
    found = schemas.check("env check", check(both, "none", "--engine", "sarus", "--json").stdout)
    assert found["sarusctl"][0]["valid"] is True and found["errors"] == 1  # its schema is not ours
    assert "sarusctl" not in check(both, "both", "--engine", "ce").stdout


@pytest.mark.parametrize(("cluster", "here"), [("another", False), ("clariden", True)])
def test_another_slurm_cluster_is_not_of_a_site_that_names_its_own(tmp_path, monkeypatch, cluster, here):
    """Its images and mounts would all be missing on this one."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "slurm.conf").write_text(f"ClusterName={cluster}\n")
    environ = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf"), "SLURM_CLUSTER_NAME": cluster}
    monkeypatch.setattr("runner.detection.srun_options", lambda: frozenset())
    assert _is_here(load_site("alps-clariden", environ), environ) is here


def test_warnings_alone_are_exit_0(project):
    done = check(project, "risky")
    assert done.returncode == 0 and "[stale-tuning]" in done.stdout


def test_json_has_every_part_of_a_finding(project):
    data = json.loads(check(project, "wrong", "--json").stdout)
    assert (data["site"], data["engine"], data["errors"], data["warnings"]) == ("alps-clariden", "ce", 1, 0)
    assert data["findings"] == [
        {
            "code": "variable-without-braces",
            "severity": "error",
            "field": "workdir",
            "reason": "workdir contains $X without braces, which is plain text, not a variable",
            "fix": "write ${X}",
            "path": str(project / "edf/wrong.toml"),
            "line": 2,
        }
    ]


def test_fix_mends_what_says_how_and_keeps_comments_and_order(project):
    """Renamed, moved, quoted, retyped; the tuning, which only measurement can judge, is left to the user."""
    (project / "edf/all.toml").write_text("""\
# ours
mount = ["/x:/x:ro,private", "/y"]  # data
writable = "True"  # for triton
[env]
A = 1  # one
NCCL_PROTO = "^LL128"
image = "docker://nvcr.io/nvidia/cuda:12.4.1"
[annotations]
com.hooks.aws_ofi_nccl.enabled = true
com.hooks.aws_ofi_nccl.variant = "cuda13"
""")
    done = check(project, "all", "--fix", "--enroot", "3.5.0")
    assert (done.returncode, done.stdout.count("[")) == (0, 2) and "[stale-tuning]" in done.stdout
    assert "[hook-variant-ignored]" in done.stdout, "the site's default makes the variant harmless"
    assert (
        (project / "edf/all.toml").read_text()
        == """\
# ours
mounts = ["/x:/x:ro+private", "/y:/y"]  # data
writable = true  # for triton
image = "nvcr.io#nvidia/cuda:12.4.1"
[env]
A = "1"  # one
NCCL_PROTO = "^LL128"
[annotations]
com.hooks.aws_ofi_nccl.enabled = "true"
com.hooks.aws_ofi_nccl.variant = "cuda13"
"""
    )
    assert "edf/all.toml: fixed" in done.stderr


def test_fix_leaves_a_file_alone_that_is_not_toml(project):
    text = 'image = "/a.sqsh"\nmount = []\n[env]\n[env]\n'
    (project / "edf/all.toml").write_text(text)
    done = check(project, "all", "--fix")
    assert done.returncode == 1 and "[table-twice]" in done.stdout and "[unknown-key]" in done.stdout
    assert (project / "edf/all.toml").read_text() == text


def test_an_unknown_name_and_an_unknown_engine_are_told_the_known_ones(project):
    done = check(project, "cleann")
    assert done.returncode == 1 and "did you mean 'clean'?" in done.stderr
    done = check(project, "clean", "--engine", "podmann")
    assert done.returncode == 1 and "did you mean 'podman'?" in done.stderr


def test_each_problem_of_the_alps_set_up_is_named_with_the_codes_that_find_it():
    section = (ROOT / "docs/lint.md").read_text().partition("| problem | code |")[2].partition("##")[0]
    problems = dict(re.findall(r"^\| ([A-Za-z ]+) \| (.+) \|$", section, re.M))
    assert list(problems) == [
        "wrong EDF syntax",
        "mounts not accessible",
        "image path wrong",
        "no write permission",
        "NCCL over TCP",
    ]
    assert all(code in CODES for codes in problems.values() for code in re.findall(r"`([^`]+)`", codes))


def test_the_list_has_every_code_with_severity_meaning_and_fix(project):
    lines = [(f"{code} ({', '.join(known.severities)}): {known.title}", f"  try: {known.fix}")
             for code, known in CODES.items()]  # fmt: skip
    assert check(project, "--list").stdout.splitlines() == [line for pair in lines for line in pair]
    assert check(project, "--list", "fixed-port").stdout.splitlines() == list(lines[list(CODES).index("fixed-port")])
    assert "no lint code contains 'portt'" in check(project, "--list", "portt").stderr
    words = (sys.executable, "-m", "runner", "completion", "words", "--", "env", "check", "--list", "fixed-")
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "fixed-port\n"
