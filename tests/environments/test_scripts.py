"""The shell scripts that engines put into a run folder are clean, and trust no folder of another user."""

import os
import subprocess
from pathlib import Path

import pytest

import runner.environments.engines

SCRIPTS = sorted(Path(runner.environments.engines.__file__).parent.glob("*.sh"))


@pytest.mark.uses("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(("shellcheck", str(script)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_all_scripts_were_found():
    assert [path.name for path in SCRIPTS] == ["container.sh", "environment.sh", "gpus.sh", "sandbox.sh"]


def own_folder(folder: Path, *, user: int | None = None, before: str = "") -> subprocess.CompletedProcess[str]:
    environment = Path(runner.environments.engines.__file__).parent / "environment.sh"
    text = f'set -euo pipefail; node=here; {environment.read_text()}\n{before}\nown_folder "$1"; stat -c %a "$1"'
    return subprocess.run(
        ("bash", "-c", text, "bash", str(folder)), user=user, capture_output=True, text=True, check=False
    )


def test_a_folder_for_unpacked_images_is_private_from_the_first_moment(tmp_path):
    assert own_folder(tmp_path / "new").stdout == "700\n"
    assert own_folder(tmp_path / "new").stdout == "700\n"
    assert own_folder(tmp_path / "made", before="umask 000; chmod() { :; }").stdout == "700\n"


def test_a_folder_that_an_earlier_version_left_readable_is_closed(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o755)
    assert own_folder(tmp_path / "old").stdout == "700\n"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = own_folder(tmp_path / "open")
    assert done.returncode == 1
    assert "is not a private folder of this user" in done.stderr


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("mine")
    assert "is not a private folder of this user" in own_folder(tmp_path / "link").stderr
    (tmp_path / "dangling").symlink_to("nothing")
    assert "is not a private folder of this user" in own_folder(tmp_path / "dangling").stderr


def test_a_parent_that_is_missing_is_named(tmp_path):
    assert "cannot create the folder" in own_folder(tmp_path / "no" / "folder").stderr


@pytest.fixture
def shared_folder():
    """A folder like /tmp: everybody may write, only the owner of a file may remove it."""
    folder = Path("/tmp") / f"runner-test-shared-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    subprocess.run(("rm", "-rf", str(folder)), check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="two users are needed: only root can be both")
def test_another_users_folder_is_refused_whatever_its_mode(shared_folder):
    theirs = shared_folder / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 1, 1)
    assert "is not a private folder of this user" in own_folder(theirs, user=65534).stderr
    assert own_folder(theirs, user=1).stdout == "700\n"


@pytest.mark.uses("bubblewrap", "unsquashfs")
@pytest.mark.skipif(os.geteuid() != 0, reason="two users are needed: only root can be both")
def test_an_unpacked_image_that_another_user_planted_never_runs(shared_folder, busybox_sqsh):
    engines = Path(runner.environments.engines.__file__).parent
    job = shared_folder / "job"
    job.mkdir()
    for name in ("sandbox.sh", "environment.sh", "gpus.sh"):
        (job / name).write_bytes((engines / name).read_bytes())
    image = shared_folder / "image.sqsh"
    image.write_bytes(busybox_sqsh.read_bytes())
    (job / "sandbox.conf").write_text(f"image={image} entrypoint='' writable='' workdir='' mounts=() env=()\n")
    status = image.stat()
    named = f"{image} {status.st_size} {int(status.st_mtime)} {status.st_ino}\n"
    key = subprocess.run(("sha256sum",), input=named, text=True, capture_output=True, check=True).stdout[:16]
    planted = shared_folder / f"runner-unpacked-65534/{key}"
    (planted / "root").mkdir(parents=True)
    (planted / "complete").touch()
    Path(f"{planted}.lock").touch()
    for path in (planted.parent, planted, planted / "root", planted / "complete", Path(f"{planted}.lock")):
        os.chown(path, 1, 1)
        path.chmod(0o777)
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(shared_folder), "RUNNER_SANDBOX_UNPACK": "1"}
    command = ("bash", str(job / "sandbox.sh"), "/bin/sh", "-c", "echo ran")
    done = subprocess.run(command, user=65534, group=65534, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not a private folder of this user" in done.stderr
    assert "ran" not in done.stdout
