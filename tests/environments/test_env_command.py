"""`runner env`: the answer on stdout is what plain srun, an engine, or a program that reads JSON can use as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.environments.emit import emitted
from runner.environments.environment import load_environment
from runner.project import Project
from runner.site import Site


@pytest.fixture
def project(tmp_path, busybox_sqsh):
    """A project with one environment `it`, its image in an image folder, and the command in it."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/it.sqsh").symlink_to(busybox_sqsh)
    (tmp_path / "edf").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "runner.toml").touch()
    edf = f"""\
image = "${{RUNNER_IMAGES}}/it.sqsh"
mounts = ["{tmp_path}/data:/data:ro"]
[env]
GREETING = "it's \\"EDF\\" $HOME"
GONE = ""
"""
    (tmp_path / "edf/it.toml").write_text(edf)
    return tmp_path


def runner(project: Path, *words: str, environ=None) -> subprocess.CompletedProcess[str]:
    variables = {**(environ or os.environ), "HOME": str(project), "RUNNER_IMAGES": str(project / "images")}
    argv = (sys.executable, "-m", "runner", *words)
    return subprocess.run(argv, cwd=project, env=variables, capture_output=True, text=True, check=False)


def test_show_tells_where_each_value_came_from(project):
    done = runner(project, "env", "show", "it", "--site", "local")
    rows = [tuple(part.strip() for part in line.split("  ") if part.strip()) for line in done.stdout.splitlines()]
    assert rows == [
        ("FIELD", "VALUE", "FROM"),
        ("image", "${RUNNER_IMAGES}/it.sqsh", "edf/it.toml:1"),
        ("workdir", "(the image's own)", "default"),
        ("entrypoint", "false", "default"),
        ("writable", "true", "default"),
        ("mounts.0", f"{project}/data:/data:ro", "edf/it.toml:2"),
        ("env.GREETING", 'it\'s "EDF" $HOME', "edf/it.toml:4"),
        ("env.GONE", "(unset)", "edf/it.toml:5"),
    ]
    assert f"environment it ({project}/edf/it.toml)" in done.stderr and "site local (--site)" in done.stderr


def test_show_as_json(project):
    data = json.loads(runner(project, "env", "show", "it", "--site", "local", "--json").stdout)
    assert data["mounts"] == [{"source": f"{project}/data", "target": "/data", "flags": ["ro"]}]
    assert data["env"] == {"GREETING": 'it\'s "EDF" $HOME', "GONE": ""}
    assert (data["entrypoint"], data["writable"], data["workdir"]) == (False, True, None)
    assert data["origins"]["mounts.0"] == "edf/it.toml:2"


def test_show_tells_what_a_base_and_the_site_say(project):
    (project / "edf/top.toml").write_text('base_environment = "it"\n[env]\nGONE = "back"\n')
    sites = project / ".config/runner/sites"
    sites.mkdir(parents=True)
    (sites / "mine.toml").write_text(f'base = "local"\n[values]\nmounts = ["{project}:/all"]\nenv = {{ S = "1" }}\n')
    environ = {key: value for key, value in os.environ.items() if key != "XDG_CONFIG_HOME"}
    data = json.loads(runner(project, "env", "show", "top", "--site", "mine", "--json", environ=environ).stdout)
    assert data["origins"]["env.GONE"] == "edf/top.toml:3, in place of edf/it.toml:5"
    assert data["replaced"] == {"env.GONE": ["edf/it.toml:5"]}
    assert data["origins"]["env.S"] == "site mine: your site file (.config/runner/sites/mine.toml:4)"
    assert data["origins"]["mounts.1"] == "site mine: your site file (.config/runner/sites/mine.toml:3)"


@pytest.mark.parametrize("engine", ["ce", "sarus"])
def test_an_emitted_edf_says_where_each_value_came_from(engine, tmp_path):
    """And the default of a variable in a mount is decided: no engine that reads an EDF expands it there."""
    (tmp_path / "it.toml").write_text('image = "quay.io/x"\nmounts = ["${NOPE:-/data}:/data"]\n[env]\nA = "1"\n')
    environment = load_environment(str(tmp_path / "it.toml"), Project(None, tmp_path, tmp_path), {})
    text, notes = emitted(environment, Site("a", "", "slurm", engine, "/i", env={"B": "2"}), engine, {})
    rows = [line.split("  # ") for line in text.splitlines() if "  # " in line]
    places = {value.strip(): place.rpartition("/")[2] for value, place in rows}
    assert places == {
        'image = "quay.io/x"': "it.toml:1",
        "entrypoint = false": "default",
        "writable = true": "default",
        '"/data:/data",': "it.toml:2",
        'A = "1"': "it.toml:4",
        'B = "2"': "site a",
    }
    assert notes == ("mounts.0: ${NOPE:-…} becomes '/data': NOPE is not set here",)


SEEN = 'printf "%s|" "$GREETING" "${GONE-unset}" "$PWD" "$@"; ls -d /data'


def test_plain_srun_takes_what_emit_writes(project, slurm):
    written = runner(project, "env", "emit", "it", "--as", "ce", "-o", "plain.toml")
    assert written.stdout == "plain.toml\n", written.stderr
    argv = ("srun", "--environment=./plain.toml", "sh", "-c", SEEN, "sh", "a b")
    done = slurm.run(argv, cwd=project, extra_environ={"GONE": "host"})
    assert done.stdout == 'it\'s "EDF" $HOME|unset|/srv|a b|/data\n'


def test_plain_srun_takes_the_shipped_edf_when_the_image_folder_is_exported(project, slurm):
    (project / "images/cpu.sqsh").symlink_to(project / "images/it.sqsh")
    shipped = Path(__file__).resolve().parents[2] / "edf/cpu.toml"
    images = {"RUNNER_IMAGES": str(project / "images")}
    assert slurm.run(("srun", f"--environment={shipped}", "pwd"), extra_environ=images).stdout == "/srv\n"


def test_the_emitted_script_of_pyxis_takes_a_command(project, slurm):
    emitted = runner(project, "env", "emit", "it", "--as", "pyxis", "-o", "plain.sh")
    assert emitted.returncode == 0, emitted.stderr
    argv = (str(project / "plain.sh"), "sh", "-c", SEEN, "sh", "a b")
    done = slurm.run(argv, cwd=project, extra_environ={"GONE": "host"})
    assert done.stdout == 'it\'s "EDF" $HOME|unset|/srv|a b|/data\n'


def test_the_emitted_script_of_podman_takes_a_command(project, podman, busybox_image):
    edf = project / "edf/it.toml"
    edf.write_text(edf.read_text().replace("${RUNNER_IMAGES}/it.sqsh", busybox_image))
    emitted = runner(project, "env", "emit", "it", "--as", "podman", "-o", "plain.sh")
    assert emitted.returncode == 0, emitted.stderr
    # two options that this machine's podman may need, and every other one is the file's own
    argv = ("bash", str(project / "plain.sh"), "sh", "-c", SEEN, "sh", "a b")
    done = subprocess.run(argv, env=podman.environ, capture_output=True, text=True, check=False)
    assert done.stdout == 'it\'s "EDF" $HOME|unset|/srv|a b|/data\n', done.stderr


@pytest.mark.uses("shellcheck")
@pytest.mark.parametrize("engine", ["pyxis", "enroot", "podman", "apptainer", "host"])
def test_emitted_scripts_are_clean_bash(project, engine):
    if engine == "host":
        (project / "edf/it.toml").write_text('[env]\nA = "it\'s ${HOME}"\n')
    done = runner(project, "env", "emit", "it", "--as", engine)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(
        ("shellcheck", "-s", "bash", "-"), input=done.stdout, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_what_an_engine_cannot_say_is_refused_and_no_file_is_written(project):
    done = runner(project, "env", "emit", "it", "--as", "docker", "-o", "x.sh")
    assert done.returncode == 1 and "the engine 'docker' cannot use the value of image" in done.stderr
    assert done.stdout == "" and not (project / "x.sh").exists()


def test_check_is_silent_and_0_when_all_is_well_and_1_on_errors(project):
    edf = project / "edf/it.toml"
    edf.write_text(edf.read_text().replace("$HOME", ""))
    done = runner(project, "env", "check", "it", "--site", "local", "--engine", "sandbox")
    assert (done.returncode, done.stdout) == (0, "") and "no findings" in done.stderr
    edf.write_text(edf.read_text() + 'HF_TOKEN = "hf_secret"\nA = "$B"\n')
    done = runner(project, "env", "check", "it", "--site", "local", "--engine", "sandbox")
    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[0]
        == "edf/it.toml:6: error: env.HF_TOKEN contains a secret in plain text [secret-value]"
    )
    found = json.loads(runner(project, "env", "check", "it", "--site", "local", "--json").stdout)
    assert found["errors"] == 1
    assert [(finding["code"], finding["line"]) for finding in found["findings"]] == [
        ("secret-value", 6),
        ("variable-without-braces", 7),
    ]


def test_an_unknown_environment_lists_the_known_ones(project):
    done = runner(project, "env", "show", "itt")
    assert done.returncode == 1 and "did you mean 'it'?" in done.stderr
    assert "the known names are cpu, host, it, ngc-ds" in done.stderr
