"""init, site, doctor, completion: they answer on stdout, change what they say they change, and overwrite nothing."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runner.project import find_project
from runner.runs.program import Program, program_of_script
from runner.runs.snapshot import Snapshot, copy, plan

ROOT = Path(__file__).resolve().parents[1]


def runner(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HOME": str(folder / "home"), "RUNNER_SITE": "local", **environ}
    argv = (sys.executable, "-m", "runner", *words)
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def everything_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


FIRST = ["edf/cpu.toml", "jobs/sft.py", "jobs/sft.toml", "runner.toml"]


def test_init_writes_few_files_and_names_the_next_step(tmp_path):
    done = runner(tmp_path, "init")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == FIRST == sorted(everything_below(tmp_path))
    assert (tmp_path / "edf/cpu.toml").read_bytes() == (ROOT / "edf/cpu.toml").read_bytes()
    assert done.stderr.splitlines()[-1] == "next: runner launch sft --env cpu --build"
    shown = runner(tmp_path, "env", "show", "cpu")
    assert f"environment cpu ({tmp_path}/edf/cpu.toml)" in shown.stderr  # the copy has won


def test_init_takes_the_environment_of_the_site(tmp_path):
    assert "edf/ngc-ds.toml" in runner(tmp_path, "init", RUNNER_SITE="generic-slurm").stdout.splitlines()


def test_init_all_writes_what_a_user_edits_and_never_what_always_comes_from_runner(tmp_path):
    written = runner(tmp_path, "init", "--all").stdout.splitlines()
    for name in ("containers/cpu.toml", "Containerfile.cpu", "jobs/clm.py", "jobs/deepspeed/zero3.json", *FIRST):
        assert name in written
    assert not [name for name in written if name.startswith(("jobs/training", "jobs/prefetch"))]


def test_a_second_init_says_what_it_did_not_do(tmp_path):
    (tmp_path / "edf").mkdir()
    (tmp_path / "edf/cpu.toml").write_text("# mine\n")
    done = runner(tmp_path, "init")
    assert (tmp_path / "edf/cpu.toml").read_text() == "# mine\n" and done.stdout.splitlines() == FIRST[1:]
    assert "1 file exists already\nthese differ from runner's copies: edf/cpu.toml\n" in done.stderr
    before = everything_below(tmp_path)
    again = runner(tmp_path, "init")
    assert again.stdout == "" and everything_below(tmp_path) == before
    assert again.stderr.startswith("4 files exist already, so nothing was written\n")


def test_init_dry_run_writes_nothing(tmp_path):
    assert runner(tmp_path, "init", "--dry-run").stdout.splitlines() == FIRST
    assert list(tmp_path.iterdir()) == []


def test_a_copied_script_finds_the_package_training(tmp_path):
    """`init` copies jobs/sft.py alone; its snapshot has runner's jobs/training, and the user's script."""
    runner(tmp_path, "init")
    (tmp_path / "jobs/sft.py").write_text("# mine\n" + (tmp_path / "jobs/sft.py").read_text())
    (tmp_path / "jobs/own.py").write_text("print('no package is needed')\n")
    project = find_project(tmp_path)
    taken = plan_of(program_of_script(tmp_path / "jobs/sft.py", project))
    assert {"jobs/training/__init__.py", "jobs/deepspeed/zero3.json"} <= set(taken.files)
    copy(taken, tmp_path / "code")
    assert (tmp_path / "code/jobs/sft.py").read_text().startswith("# mine\n")
    assert "jobs/training/__init__.py" not in plan_of(program_of_script(tmp_path / "jobs/own.py", project)).files


def plan_of(program: Program) -> Snapshot:
    return plan(program.main, program.outside, program.shipped)


def test_init_site_writes_a_file_that_is_used_and_is_never_overwritten(tmp_path):
    done = runner(tmp_path, "init", "--site", "alps-clariden", "--account", "g1'23")
    path = tmp_path / "home/.config/runner/sites/alps-clariden.toml"
    assert done.stdout == f"{path}\n"
    shown = json.loads(runner(tmp_path, "site", "show", "alps-clariden", "--json").stdout)
    assert shown["values"]["account"] == {"value": "g1'23", "from": f"your site file ({path.relative_to(tmp_path)}:4)"}
    again = runner(tmp_path, "init", "--site", "alps-clariden")
    assert again.returncode == 1 and "never overwrites your files" in again.stderr


def test_init_site_asks_for_an_account_where_one_is_needed(tmp_path):
    done = runner(tmp_path, "init", "--site", "alps-clariden", "--dry-run")
    assert "no account is set" in done.stderr and "# account = …" in done.stdout
    assert not (tmp_path / "home").exists()


def test_init_site_of_an_unknown_cluster_builds_on_a_known_one(tmp_path):
    runner(tmp_path, "init", "--site", "mine", "--partition", "gpu")
    shown = json.loads(runner(tmp_path, "site", "show", "mine", "--json").stdout)
    assert shown["values"]["partition"]["value"] == "gpu" and shown["values"]["scheduler"]["value"] == "slurm"


@pytest.mark.uses("mksquashfs")
@pytest.mark.parametrize(
    ("site", "name"),
    [
        ("generic-pyxis", "ngc-ds"),
        ("alps-clariden", "ngc-ds-alps"),
        ("aws-parallelcluster", "ngc-ds-efa"),
        ("local", "cpu"),
    ],
)
def test_the_shipped_environments_are_clean_for_their_site(tmp_path, site, name):
    """Each has nothing to mend on the site that it was written for."""
    (tmp_path / "empty").mkdir()
    for image in ("cpu.sqsh", "ngc-deepspeed.sqsh", "aws-deepspeed.sqsh"):
        subprocess.run(("mksquashfs", tmp_path / "empty", tmp_path / image, "-quiet", "-no-progress"), check=True)
    done = runner(tmp_path, "env", "check", name, "--site", site, RUNNER_IMAGES=str(tmp_path), SCRATCH=str(tmp_path))
    said = [line for line in (done.stdout + done.stderr).splitlines() if ": error: " in line or ": warning: " in line]
    assert done.returncode == 0, done.stdout
    assert said == []


def test_site_show_has_a_line_and_a_source_for_each_item(tmp_path):
    """Tables and lists are read item by item, and so are their sources."""
    lines = runner(tmp_path, "site", "show", "alps-clariden").stdout.splitlines()
    quirk = next(line for line in lines if "scratch: $SCRATCH is on Iopsstor" in line)
    assert "<https://docs.cscs.ch/storage/filesystems/>, 2026-08-20" in quirk
    data = json.loads(runner(tmp_path, "site", "show", "gcp-a3-mega", "--json").stdout)
    assert data["values"]["env"]["value"]["NCCL_SOCKET_IFNAME"] == "enp0s12"
    assert "run-nccl-tests.sh" in data["values"]["env"]["items"]["NCCL_SOCKET_IFNAME"]
    assert "run-nccl-tests.sh" in data["values"]["mounts"]["items"]["0"]


def test_site_list_marks_the_one_that_is_used(tmp_path):
    listed = runner(tmp_path, "site", "list")
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert [row for row in rows if row[0] == "*"] == [
        ["*", "local", "local", "auto", "this", "machine,", "without", "Slurm"]
    ]
    data = json.loads(runner(tmp_path, "site", "list", "--json").stdout)
    assert {site["name"] for site in data} == {
        *(
            "alps",
            "alps-clariden",
            "alps-daint",
            "alps-bristen",
            "alps-extended-images",
            "alps-sarus",
            "aws-parallelcluster",
        ),
        *("gcp-a3-high", "gcp-a3-mega", "gcp-a3-ultra", "gcp-g2", "twcc", "generic-pyxis", "generic-slurm", "local"),
    }
    assert [site["name"] for site in data if site["used"]] == ["local"]


def test_site_show_says_where_each_value_comes_from_and_what_is_not_known(tmp_path):
    done = runner(tmp_path, "site", "show", "alps-clariden")
    line = next(line for line in done.stdout.splitlines() if line.startswith("memory"))
    assert "450G" in line and "<https://docs.cscs.ch/running/slurm/>, 2026-08-20" in line
    assert "not set: account" in done.stderr


@pytest.mark.uses("podman", "bubblewrap", "squashfuse")
def test_doctor_changes_nothing(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    runner(tmp_path, "doctor")  # whatever Python compiles, it compiles now
    before = everything_below(tmp_path)
    done = runner(tmp_path, "doctor", "--json")
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert found["podman"]["verdict"] == found["bwrap"]["verdict"] == "ok"
    assert found["site"]["text"] == "local (RUNNER_SITE)" and found["engine"]["text"].startswith("sandbox: ")
    assert everything_below(tmp_path) == before


def test_doctor_names_what_is_wrong_and_how_to_mend_it(tmp_path):
    folder = tmp_path / "home/.config/enroot"
    folder.mkdir(parents=True)
    credentials = folder / ".credentials"
    credentials.write_text("machine nvcr.io login $oauthtoken password x\n")
    credentials.chmod(0o644)
    done = runner(tmp_path, "doctor", EDF_PATH="/nowhere")
    assert done.returncode == 1
    assert f"chmod 600 {credentials}" in done.stderr and "/nowhere" in done.stdout
    assert f"-> chmod 600 {credentials}" in done.stdout  # and in the line itself
    assert done.stderr.splitlines()[-1].startswith("ready for: ")
    credentials.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert "authn.nvidia.com" in runner(tmp_path, "doctor").stdout
    credentials.write_text(credentials.read_text() + "machine authn.nvidia.com login $oauthtoken password x\n")
    assert "authn.nvidia.com" not in runner(tmp_path, "doctor").stderr


def test_doctor_sees_nodes_of_another_architecture(tmp_path):
    other = {"x86_64": "arm64", "aarch64": "amd64"}[os.uname().machine]
    sites = tmp_path / "home/.config/runner/sites"
    sites.mkdir(parents=True)
    (sites / "other.toml").write_text(f'base = "local"\n[values]\narchitecture = "{other}"\n')
    done = runner(tmp_path, "doctor", "--site", "other")
    assert done.returncode == 1 and f"runner build RECIPE --platform linux/{other}" in done.stderr


COMPLETED = [
    ("la", ["launch"]),
    ("launch --env cp", ["cpu"]),
    ("launch --script hel", ["hello"]),
    ("launch llama", ["llama31-8b-sft"]),
    ("logs la", ["last"]),
    ("status sft-", ["sft-0001", "sft-0002"]),
    ("shell sft-0001", ["sft-0001"]),
    ("--site alps-cl", ["alps-clariden"]),
    ("site show alps-da", ["alps-daint"]),
    ("env show ngc-ds-e", ["ngc-ds-efa"]),
    ("launch --no-p", ["--no-preflight"]),
    ("launch --engine podm", ["podman"]),
    ("--site local build ngc", ["ngc-deepspeed", "ngc-megatron"]),
    ("launch --env cpu -- fi", []),
    ("why --on daint sft-", ["sft-0001", "sft-0002"]),
    ("--on launch why --on=x sft-", ["sft-0001", "sft-0002"]),
    ("status --on=da", ["--on=daint"]),
    ("status --o", ["--on"]),
]


def words_of(shell: str, folder: Path, line: str) -> list[str]:
    """What a real shell offers for the line."""
    if shell == "words":
        return runner(folder, "completion", "words", "--", *line.split(" ")).stdout.split()
    script = runner(folder, "completion", shell).stdout
    asked = {
        "bash": f"COMP_LINE='runner {line}'; COMP_POINT=${{#COMP_LINE}}; _runner runner; echo \"${{COMPREPLY[@]}}\"",
        "zsh": f"words=(runner {line}); CURRENT=$#words; _runner",
        "fish": f"complete -C 'runner {line}'",
    }[shell]
    before = "compdef() {}\ncompadd() { print -l -- $found }\n_files() {}\n" if shell == "zsh" else ""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/runner").write_text(f'#!/bin/sh\nexec {sys.executable} -m runner "$@"\n')
    (folder / "bin/runner").chmod(0o755)
    variables = {**os.environ, "HOME": str(folder), "RUNNER_SITE": "local",
                 "PATH": f"{folder}/bin:{os.environ['PATH']}"}  # fmt: skip
    done = subprocess.run(
        (shell, "-c", f"{before}{script}\n{asked}"),
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.fixture
def with_runs(tmp_path: Path) -> Path:
    for name in ("sft-0001", "sft-0002"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs/sft-data").mkdir()
    hosts = tmp_path / "home/.config/runner/hosts"
    hosts.mkdir(parents=True)
    (hosts / "daint.toml").touch()
    return tmp_path


@pytest.mark.parametrize(("line", "words"), COMPLETED)
def test_words_are_completed_from_what_there_is(with_runs, line, words):
    """Verbs, options, environments, scripts, jobs, runs, sites, engines; nothing behind `--`."""
    assert words_of("words", with_runs, line) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_words(with_runs, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for line, words in (COMPLETED[0], COMPLETED[1], COMPLETED[5]):
        assert words_of(shell, with_runs, line) == words
    assert words_of(shell, with_runs, "launch --env=cp") == (["cpu"] if shell == "bash" else ["--env=cpu"])
