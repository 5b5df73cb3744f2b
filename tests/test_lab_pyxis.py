"""The lab's `--container-*` options follow pyxis 0.24: what runs, and what is refused."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.slurm import SlurmLab


def shell(slurm: SlurmLab, image: Path | str, script: str, *flags: str, **options: object) -> str:
    """The output of a shell line run in the container."""
    image_flag = (f"--container-image={image}",) if image else ()
    ran = slurm.run(("srun", *image_flag, *flags, "sh", "-c", script), check=False, **options)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


def test_command_runs_in_the_image_and_its_exit_code_passes(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    argv = ("srun", f"--container-image={busybox_sqsh}", "sh", "-c", 'echo "$GREETING $PWD"; exit 7')
    ran = slurm.run(argv, check=False)
    assert (ran.stdout, ran.returncode) == ("from the image /srv\n", 7)


def test_root_is_read_only_unless_asked_otherwise(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    assert "Read-only" in shell(slurm, busybox_sqsh, "touch /x 2>&1 || true")
    assert shell(slurm, busybox_sqsh, "touch /x && echo yes", "--container-writable") == "yes\n"


def test_image_beats_host_except_for_container_env(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    host = {"HOST_OR_IMAGE": "host", "LC_ALL": "C", "ONLY_HOST": "host"}
    script = 'echo "$HOST_OR_IMAGE ${LC_ALL-unset} $ONLY_HOST"'
    assert shell(slurm, busybox_sqsh, script, extra_environ=host) == "image unset host\n"
    kept = shell(slurm, busybox_sqsh, script, "--container-env=HOST_OR_IMAGE,LC_ALL", extra_environ=host)
    assert kept == "host C host\n"


def test_mounts_workdir_and_a_source_that_is_its_own_target(
    slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("a\n")
    mounts = f"--container-mounts={tmp_path}/a:/data:ro,{tmp_path},./a:/relative,tmpfs:/fresh"
    script = f"cat file; cat {tmp_path}/a/file /relative/file; touch /data/x 2>&1; ls /fresh; touch {tmp_path}/made"
    out = shell(slurm, busybox_sqsh, script, mounts, "--container-workdir=/data", cwd=tmp_path)
    assert out == "a\na\na\ntouch: /data/x: Read-only file system\n"
    assert (tmp_path / "made").exists()


def test_home_root_and_entrypoint_switches(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    home = {"HOME": str(tmp_path)}
    look = f"ls {tmp_path} 2> /dev/null || echo none"
    assert shell(slurm, busybox_sqsh, look, extra_environ=home) == "none\n"
    assert shell(slurm, busybox_sqsh, look, "--container-mount-home", extra_environ=home) == "mine\n"
    assert shell(slurm, busybox_sqsh, "id -u", "--container-remap-root") == "0\n"
    assert shell(slurm, busybox_sqsh, "id -u", "--no-container-remap-root") == f"{os.getuid()}\n"
    entered = "echo ${ENTRYPOINT_RAN-no}"
    assert shell(slurm, busybox_sqsh, entered, "--container-entrypoint") == "yes\n"
    assert shell(slurm, busybox_sqsh, entered) == "no\n"


def test_named_containers_keep_what_was_written(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    name = ("--container-name=kept", "--nodelist=nid001")
    assert shell(slurm, busybox_sqsh, "echo 1 > /srv/f; echo ok", *name, "--container-writable") == "ok\n"
    assert shell(slurm, "", "cat /srv/f", *name) == "1\n"
    created = slurm.run(
        ("srun", f"--container-image={busybox_sqsh}", "--container-name=kept:create", "-wnid001", "true"), check=False
    )
    assert created.returncode == 1 and "already exists" in created.stderr
    absent = slurm.run(("srun", "--container-name=absent", "true"), check=False)
    assert absent.returncode == 1 and "does not exist" in absent.stderr


def test_saved_containers_are_squashfs_files_with_what_was_written(
    slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.sqsh"
    flags = ("--container-writable", f"--container-save={saved}", f"--container-mounts={tmp_path}:/mounted")
    shell(slurm, busybox_sqsh, "echo 1 > /srv/f", *flags)
    listed = subprocess.run(("unsquashfs", "-l", str(saved)), capture_output=True, text=True, check=True).stdout
    assert "squashfs-root/srv/f\n" in listed and "squashfs-root/mounted/" not in listed
    assert shell(slurm, saved, "cat /srv/f") == "1\n"


def test_variables_ask_for_a_container_and_the_command_line_wins(
    slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path
) -> None:
    asked = {"PYXIS_CONTAINER_IMAGE": str(busybox_sqsh), "PYXIS_CONTAINER_WORKDIR": "/etc"}
    assert shell(slurm, "", "pwd", extra_environ=asked) == "/etc\n"
    assert shell(slurm, "", "pwd", "--container-workdir=/bin", extra_environ=asked) == "/bin\n"
    writable = {**asked, "PYXIS_CONTAINER_WRITABLE": "yes"}
    assert shell(slurm, "", "touch /x && echo yes", extra_environ=writable) == "yes\n"


def test_torch_images_get_rank_from_slurm(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    host = {"PYTORCH_VERSION": "2.13", "RANK": "stale"}
    out = shell(slurm, busybox_sqsh, "echo $RANK $LOCAL_RANK", "--ntasks=2", "--nodes=1", extra_environ=host)
    assert sorted(out.splitlines()) == ["0 0", "1 1"]


def test_an_edf_and_container_flags_combine(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('[env]\nX = "edf"\n')
    flags = (f"--environment={tmp_path}/e.toml", "--container-workdir=/etc")
    assert shell(slurm, busybox_sqsh, "echo $X $PWD", *flags) == "edf /etc\n"


def test_without_image_or_name_the_flags_are_ignored_with_a_word(slurm: SlurmLab) -> None:
    ran = slurm.run(("srun", "--container-mounts=/tmp:/x", "ls", "-d", "/usr/sbin/slurmd"))
    assert ran.stdout == "/usr/sbin/slurmd\n"
    assert "ignoring --container-mounts" in ran.stderr


def test_batch_scripts_run_in_the_container_too(slurm: SlurmLab, busybox_sqsh: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    text = f'#!/bin/sh\n#SBATCH --container-image={busybox_sqsh} --output={tmp_path}/out\necho "$GREETING"\n'
    script.write_text(text)
    slurm.wait_for(slurm.run(("sbatch", "--parsable", str(script))).stdout.strip(), "COMPLETED")
    assert (tmp_path / "out").read_text() == "from the image\n"


def test_a_missing_command_exits_with_2(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    ran = slurm.run(("srun", f"--container-image={busybox_sqsh}", "no-such-command"), check=False)
    assert ran.returncode == 2


REFUSED = {
    "relative squashfs file": (("--container-image=foo.sqsh",), "names an image of a registry"),
    "image of a registry": (("--container-image=nvcr.io#nvidia/pytorch:24.06-py3",), "does not pull"),
    "docker prefix": (("--container-image=docker://ubuntu",), "does not pull"),
    "two images": (("{image}", "--container-image=/other.sqsh"), "specified multiple times"),
    "two lists of mounts": (("{image}", "--container-mounts=/a:/b", "--container-mounts=/c:/d"), "multiple times"),
    "comma in a path": (("{image}", "--container-mounts=/data,x/y:/z"), "must begin with . or /"),
    "variable in a mount": (("{image}", "--container-mounts=${HOME}:/z"), "must begin with . or /"),
    "tilde in a mount": (("{image}", "--container-mounts=~/x:/z"), "must begin with . or /"),
    "relative target": (("{image}", "--container-mounts=/tmp:z"), "the target must begin"),
    "empty mount": (("{image}", "--container-mounts=/tmp:"), "an empty field"),
    "unknown mount flag": (("{image}", "--container-mounts=/tmp:/x:readonly"), "unknown mount flag"),
    "home and no home": (("{image}", "--container-mount-home", "--no-container-mount-home"), "its opposite"),
    "root and no root": (("{image}", "--container-remap-root", "--no-container-remap-root"), "its opposite"),
    "entrypoint twice": (("{image}", "--container-entrypoint", "--no-container-entrypoint"), "its opposite"),
    "writable and read-only": (("{image}", "--container-writable", "--container-readonly"), "its opposite"),
    "mode of a name": (("{image}", "--container-name=x:often"), "invalid name or mode"),
    "save to a folder": (("{image}", "--container-save=/tmp/"), "target is a directory"),
    "empty name of a variable": (("{image}", "--container-env=A,,B"), "empty name"),
    "unshare": (("{image}", "--container-unshare=net"), "not available in the lab"),
    "empty image": (("--container-image=",), "argument required"),
    "unknown flag": (("{image}", "--container-image-format=x"), "unrecognized option"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_submission(slurm: SlurmLab, busybox_sqsh: Path, case: str) -> None:
    flags, reason = REFUSED[case]
    filled = tuple(flag.replace("{image}", f"--container-image={busybox_sqsh}") for flag in flags)
    for argv in (("srun", *filled, "true"), ("sbatch", *filled, "--wrap", "true")):
        refused = slurm.run(argv, check=False)
        assert refused.returncode != 0
        assert reason in refused.stderr


def test_the_same_option_twice_with_the_same_value_is_accepted(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    again = f"--container-image={busybox_sqsh}"
    assert shell(slurm, busybox_sqsh, "echo $GREETING", again) == "from the image\n"


def test_a_variable_that_is_no_boolean_is_refused(slurm: SlurmLab, busybox_sqsh: Path) -> None:
    argv = ("srun", f"--container-image={busybox_sqsh}", "true")
    refused = slurm.run(argv, check=False, extra_environ={"PYXIS_CONTAINER_WRITABLE": "maybe"})
    assert refused.returncode != 0 and "invalid value: maybe" in refused.stderr


REFUSED_ON_THE_NODE = {
    "missing image": (("--container-image=/no/such.sqsh",), "image file not found"),
    "missing mount source": (("{image}", "--container-mounts=/no/such:/x"), "mount source not found"),
    "missing workdir": (("{image}", "--container-workdir=/no/such"), "couldn't chdir to container workdir"),
}


@pytest.mark.parametrize("case", REFUSED_ON_THE_NODE)
def test_refused_on_the_node_with_exit_code_1(slurm: SlurmLab, busybox_sqsh: Path, case: str) -> None:
    flags, reason = REFUSED_ON_THE_NODE[case]
    filled = (flag.replace("{image}", f"--container-image={busybox_sqsh}") for flag in flags)
    refused = slurm.run(("srun", *filled, "true"), check=False)
    assert (refused.returncode, reason in refused.stderr) == (1, True), refused.stderr
