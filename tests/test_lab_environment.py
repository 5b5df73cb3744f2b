"""The lab's `--environment` follows the Container Engine's documents: what runs, and what is refused."""

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.processes import wait_until
from tests.lab.slurm import SlurmLab


@pytest.fixture
def edf(tmp_path: Path, busybox_sqsh: Path) -> Path:
    """An EDF of the busybox image with a read-only mount and two variables."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("content\n")
    path = tmp_path / "edf.toml"
    path.write_text(
        f'image = "{busybox_sqsh}"\nmounts = ["{tmp_path}/data:/data:ro"]\n'
        '[env]\nFROM_EDF = "edf $${X}"\nGREETING = "from the EDF"\n'
    )
    return path


def shell(slurm: SlurmLab, edf: Path | str, script: str, *flags: str, **options: object) -> str:
    """The output of a shell line run in the container."""
    ran = slurm.run(("srun", *flags, f"--environment={edf}", "sh", "-c", script), check=False, **options)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


def write(path: Path, image: Path, text: str) -> Path:
    path.write_text(f'image = "{image}"\n{text}\n')
    return path


def test_command_runs_in_the_image_with_its_environment_and_its_exit_code(slurm: SlurmLab, edf: Path) -> None:
    script = 'echo "$FROM_EDF|$GREETING|$HOST_OR_IMAGE|$PWD"; cat /data/file; touch /data/new; exit 7'
    ran = slurm.run(("srun", f"--environment={edf}", "sh", "-c", script), check=False)
    assert ran.stdout == "edf ${X}|from the EDF|image|/srv\ncontent\n"
    assert "Read-only file system" in ran.stderr
    assert ran.returncode == 7


def test_image_beats_host_and_the_edf_beats_both(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    edf = write(tmp_path / "e.toml", busybox_sqsh, '[env]\nGREETING = "edf"\nUNSET = ""')
    host = {"HOST_OR_IMAGE": "host", "GREETING": "host", "ONLY_HOST": "host", "UNSET": "host", "LANG": "C"}
    script = 'echo "$GREETING $HOST_OR_IMAGE $ONLY_HOST ${UNSET-unset} ${LANG-unset} $PATH"'
    assert shell(slurm, edf, script, extra_environ=host) == "edf image host unset unset /bin:/usr/bin\n"


def test_no_variable_of_the_labs_own_is_seen_inside(slurm: SlurmLab, edf: Path) -> None:
    assert "RUNNER_LAB" not in shell(slurm, edf, "env")


def test_tasks_of_a_step_on_a_node_share_one_container_and_steps_do_not(slurm: SlurmLab, edf: Path) -> None:
    script = "echo $SLURM_PROCID > /shared-$SLURM_PROCID; sleep 0.5; cat /shared-*"
    assert shell(slurm, edf, script, "--nodes=1", "--ntasks=2") == "0\n1\n" * 2
    assert shell(slurm, edf, "ls /shared-* 2> /dev/null | wc -l") == "0\n"


def test_two_nodes_have_a_container_each(slurm: SlurmLab, edf: Path) -> None:
    script = "echo $SLURMD_NODENAME > /who-$SLURMD_NODENAME; sleep 0.5; ls /who-*"
    lines = shell(slurm, edf, script, "--nodes=2", "--ntasks=2").split()
    assert len(lines) == 2 and len(set(lines)) == 2


def test_a_step_of_a_job_knows_the_node_that_it_is_on(slurm: SlurmLab, edf: Path, tmp_path: Path) -> None:
    """The batch script's own node name must not enter the containers of other nodes."""
    step = f"srun --nodes=2 --environment={edf} sh -c 'echo $SLURMD_NODENAME'"
    out = tmp_path / "out"
    argv = ("sbatch", "--parsable", "--nodes=2", f"--output={out}", "--wrap", step)
    slurm.wait_for(slurm.run(argv).stdout.strip(), "COMPLETED")
    assert len(set(out.read_text().split())) == 2


def test_writable_false_makes_the_root_read_only(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    edf = write(tmp_path / "e.toml", busybox_sqsh, "writable = false")
    assert shell(slurm, edf, "touch /x 2>&1; touch /tmp/x && echo tmp") == "touch: /x: Read-only file system\ntmp\n"


def test_workdir_of_the_edf_beats_the_images(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    edf = write(tmp_path / "e.toml", busybox_sqsh, 'workdir = "/etc"')
    assert shell(slurm, edf, "pwd") == "/etc\n"


def test_entrypoint_runs_only_when_asked_for(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    with_it = write(tmp_path / "with.toml", busybox_sqsh, "entrypoint = true")
    without = write(tmp_path / "without.toml", busybox_sqsh, "")
    assert shell(slurm, with_it, 'echo "${ENTRYPOINT_RAN-no} $PWD"') == "yes /srv\n"
    assert shell(slurm, without, 'echo "${ENTRYPOINT_RAN-no} $PWD"') == "no /srv\n"


def test_home_is_not_mounted_and_hosts_and_shared_memory_are(slurm: SlurmLab, edf: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = "ls -d $HOME 2> /dev/null || echo no home; cat /etc/hosts; ls -d /dev/shm"
    out = shell(slurm, edf, script, extra_environ={"HOME": str(home)})
    assert out == f"no home\n{Path('/etc/hosts').read_text()}/dev/shm\n"


def test_user_is_known_inside_by_the_same_number(slurm: SlurmLab, edf: Path) -> None:
    assert shell(slurm, edf, "id -u; id -g; whoami").splitlines()[:2] == [str(os.getuid()), str(os.getgid())]


def test_base_environments_are_merged_in_order(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "one.toml", busybox_sqsh, f'mounts = ["{tmp_path}/a:/a"]\n[env]\nX = "one"\nY = "one"')
    (tmp_path / "two.toml").write_text('workdir = "/a"\n[env]\nY = "two"\nZ = "two"\n')
    last = f'base_environment = ["one", "two"]\nmounts = ["{tmp_path}/b:/b"]\n[env]\nZ = "three"\n'
    (tmp_path / "three.toml").write_text(last)
    paths = {"EDF_PATH": f"/nonexistent:{tmp_path}"}
    assert shell(slurm, "three", "echo $X $Y $Z $PWD; ls -d /b", extra_environ=paths) == "one two three /a\n/b\n"


def test_names_are_found_in_home_and_relative_files_by_the_caller(
    slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path
) -> None:
    (tmp_path / ".edf").mkdir()
    write(tmp_path / ".edf/mine.toml", busybox_sqsh, "")
    shutil.copy(busybox_sqsh, tmp_path / "own.sqsh")
    (tmp_path / "own.toml").write_text('image = "./own.sqsh"\nmounts = ["./.edf:/edf"]\n')
    assert shell(slurm, "mine", "echo $GREETING", extra_environ={"HOME": str(tmp_path)}) == "from the image\n"
    assert shell(slurm, "./own.toml", "ls /edf", "--chdir=/", cwd=tmp_path) == "mine.toml\n"


def test_variables_of_host_and_image_are_expanded(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    shutil.copy(busybox_sqsh, tmp_path / "images/b.sqsh")
    edf = tmp_path / "e.toml"
    edf.write_text(
        'image = "${IMAGES}/b.sqsh"\nmounts = ["${IMAGES}:/images:ro+private"]\n[env]\n'
        'A = "${GREETING}"\nB = "${HOST_OR_IMAGE}"\nC = "${NOT_SET:-default}"\nD = "$GREETING"\nE = "${SLURM_JOB_ID}"\n'
    )
    host = {"IMAGES": str(tmp_path / "images"), "HOST_OR_IMAGE": "host"}
    out = shell(slurm, edf, 'echo "$A|$B|$C|$D|${E:+job}"; ls /images', extra_environ=host)
    assert out == "from the image|image|default|$GREETING|job\nb.sqsh\n"


def test_squashfs_files_are_mounted_with_the_sqsh_flag(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    edf = write(tmp_path / "e.toml", busybox_sqsh, f'mounts = ["{busybox_sqsh}:/other:sqsh"]')
    assert shell(slurm, edf, "ls -d /other/bin/busybox") == "/other/bin/busybox\n"


def test_without_an_image_the_command_stays_on_the_host(slurm: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('[env]\nX = "1"\n')
    assert shell(slurm, tmp_path / "e.toml", "readlink /proc/self/root/usr/sbin/slurmd || ls /usr/sbin/slurmd").strip()


def test_batch_scripts_run_in_the_container_too(slurm: SlurmLab, edf: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\necho "$GREETING $1"\nexit 5\n')
    argv = ("sbatch", "--parsable", f"--environment={edf}", f"--output={tmp_path}/out", str(script), "a b")
    job = slurm.run(argv).stdout.strip()
    assert slurm.wait_for(job, ("FAILED", "COMPLETED"))["ExitCode"] == "5:0"
    assert (tmp_path / "out").read_text() == "from the EDF a b\n"


def test_steps_of_a_batch_job_enter_the_container_on_every_node(slurm: SlurmLab, edf: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    step = f"srun --environment={edf} sh -c 'echo \"$GREETING $SLURM_PROCID\"'"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\n{step}\n")
    job = slurm.run(("sbatch", "--parsable", f"--output={tmp_path}/out", str(script))).stdout.strip()
    slurm.wait_for(job, "COMPLETED")
    assert sorted((tmp_path / "out").read_text().splitlines()) == [f"from the EDF {rank}" for rank in range(4)]


def test_arguments_reach_the_command_byte_for_byte(slurm: SlurmLab, edf: Path) -> None:
    words = ["", "'", '"', "$HOME", "$(id)", "`id`", "a\nb", "#", "%j", "\\", "-x", "é☃", "x" * 50_000]
    ran = slurm.run(("srun", f"--environment={edf}", "printf", "%s\\0", *words))
    assert ran.stdout.split("\0")[:-1] == words


def test_signals_reach_the_command_itself(slurm: SlurmLab, edf: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    step = f"srun --environment={edf} sh -c 'trap \"echo caught; exit 0\" USR1; echo up; while :; do sleep 0.1; done'"
    script.write_text(f"#!/bin/bash\n{step}\n")
    job = slurm.run(("sbatch", "--parsable", f"--output={tmp_path}/out", str(script))).stdout.strip()
    slurm.wait_for(job, "RUNNING")
    wait_until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() != "", 60, "the step to start")
    slurm.run(("scancel", "--signal=USR1", job))
    slurm.wait_for(job, "COMPLETED")
    assert "caught" in (tmp_path / "out").read_text().splitlines()


def test_a_missing_command_exits_with_2_as_under_slurmstepd(slurm: SlurmLab, edf: Path) -> None:
    ran = slurm.run(("srun", f"--environment={edf}", "no-such-command"), check=False)
    assert ran.returncode == 2 and "no-such-command: No such file or directory" in ran.stderr


def test_a_step_has_a_terminal_when_asked_for_and_joins_a_running_job(slurm: SlurmLab, edf: Path) -> None:
    job = slurm.run(("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 60")).stdout.strip()
    slurm.wait_for(job, "RUNNING")
    join = ("srun", f"--jobid={job}", "--overlap", "--pty", f"--environment={edf}", "sh", "-c")
    outer, inner = pty.openpty()
    terminal = {"stdin": inner, "stdout": inner, "stderr": inner, "capture_output": False}
    try:
        ran = slurm.run((*join, "test -t 0 && test -t 1 && exit 41"), check=False, **terminal)
    finally:
        os.close(outer)
        os.close(inner)
        slurm.run(("scancel", job))
    assert ran.returncode == 41


REFUSED = {
    "unknown name": ("no-such", "", "not found in"),
    "missing file": ("./missing.toml", "", "environment file not found"),
    "relative path without ./": ("dir/e.toml", "", "neither an absolute path"),
    "TOML error": (None, "image = /x\n", "at line 1"),
    "table opened twice": (None, "[annotations.com]\na = '1'\n[annotations.com]\nb = '1'", "at line"),
    "number as env": (None, "[env]\nX = 1", "env.X must be a string"),
    "bad name of a variable": (None, '[env]\n"A B" = "1"', "not the name of a variable"),
    "boolean annotation": (None, "[annotations]\ncom.hooks.cxi.enabled = true", "must be a string"),
    "writable as text": (None, 'writable = "true"', "writable must be of type bool"),
    "mounts as text": (None, 'mounts = "/a:/b"', "mounts must be of type list"),
    "unknown key": (None, 'imagee = "/x"', "unknown key 'imagee'"),
    "undefined variable": (None, 'mounts = ["${NO_SUCH_VARIABLE}:/x"]', "NO_SUCH_VARIABLE is not defined"),
    "reference to another env entry": (None, '[env]\nA = "1"\nB = "${A}"', "variable A is not defined"),
    "relative squashfs file": (None, 'image = "foo.sqsh"', "names an image of a registry"),
    "image of a registry": (None, 'image = "nvcr.io#nvidia/pytorch:24.06-py3"', "does not pull"),
    "mount with an empty field": (None, 'mounts = ["/tmp::ro"]', "an empty field"),
    "mount with too many fields": (None, 'mounts = ["/tmp:/a:ro:x"]', "invalid format"),
    "mount with an unknown flag": (None, 'mounts = ["/tmp:/a:ro,private"]', "unknown mount flag"),
    "relative mount target": (None, 'mounts = ["/tmp:a"]', "the target must be an absolute path"),
    "mount source by name": (None, 'mounts = ["data:/a"]', "the source must be an absolute path"),
    "unknown base": (None, 'base_environment = "no-such-base"', "'no-such-base' not found"),
    "endless inheritance": (None, 'base_environment = "./e.toml"', "more than 10 levels"),
}


def jobs(slurm: SlurmLab) -> set[str]:
    """The ids of all jobs that were ever submitted to the lab."""
    return set(slurm.run(("squeue", "--states=all", "--noheader", "-o", "%i")).stdout.split())


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_submission(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path, case: str) -> None:
    name, text, reason = REFUSED[case]
    prefix = "" if "image" in text or "base_environment" in text else f'image = "{busybox_sqsh}"\n'
    (tmp_path / "e.toml").write_text(prefix + text)
    before = jobs(slurm)
    for argv in (("srun", "true"), ("sbatch", "--wrap", "true")):
        command = (argv[0], f"--environment={name or './e.toml'}", *argv[1:])
        refused = slurm.run(command, check=False, cwd=tmp_path)
        assert refused.returncode != 0
        assert reason in refused.stderr
    assert jobs(slurm) <= before, "Slurm forgets old ones meanwhile"


REFUSED_ON_THE_NODE = {
    "missing image": ('image = "/no/such.sqsh"', "image file not found"),
    "not a squashfs file": ('image = "/etc/hostname"', "not a squashfs file"),
    "missing mount source": ('image = "{image}"\nmounts = ["/no/such:/x"]', "mount source not found: /no/such"),
    "missing workdir": ('image = "{image}"\nworkdir = "/no/such"', "couldn't chdir to container workdir /no/such"),
}


@pytest.mark.parametrize("case", REFUSED_ON_THE_NODE)
def test_refused_on_the_node_with_exit_code_1(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path, case: str) -> None:
    text, reason = REFUSED_ON_THE_NODE[case]
    (tmp_path / "e.toml").write_text(text.replace("{image}", str(busybox_sqsh)))
    refused = slurm.run(("srun", f"--environment={tmp_path}/e.toml", "true"), check=False)
    assert reason in refused.stderr
    assert refused.returncode == 1


def test_twice_with_other_values_is_refused_and_unknown_flags_are_sruns_own(slurm: SlurmLab, edf: Path) -> None:
    twice = slurm.run(("srun", f"--environment={edf}", "--environment=other", "true"), check=False)
    assert twice.returncode != 0 and "multiple times with different values" in twice.stderr
    unknown = slurm.run(("srun", "--environments=x", "true"), check=False)
    assert unknown.returncode != 0 and "unrecognized option" in unknown.stderr


def test_without_the_plugin_srun_does_not_know_the_flag() -> None:
    with SlurmLab(nodes=1, plugins=("pyxis",)) as lab:
        refused = lab.run(("srun", "--environment=x", "true"), check=False)
        assert refused.returncode != 0 and "unrecognized option" in refused.stderr
        assert "--container-image" in lab.run(("srun", "--help")).stdout


def test_nothing_stays_mounted_after_a_step(slurm: SlurmLab, edf: Path) -> None:
    shell(slurm, edf, "true")
    assert str(slurm.folder / "steps") not in Path("/proc/mounts").read_text()
    found = subprocess.run(("pgrep", "-f", f"squashfuse .*{slurm.folder}"), capture_output=True, check=False)
    assert found.stdout == b""
