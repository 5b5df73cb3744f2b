"""A throw-away user, and what the lab does when an ordinary user starts it: `python ordinary_user.py PART`."""

import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class User:
    """A user with a copy of the lab in its home: made by root for a test, or the ordinary user who runs the tests."""

    name: str
    home: Path
    is_me: bool = False

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as the user, in a fresh environment."""
        clean = ("env", "-i", f"HOME={self.home}", f"USER={self.name}", "PATH=/usr/bin:/bin:/usr/sbin:/sbin")
        become = () if self.is_me else ("runuser", "-u", self.name, "--")
        command = (*become, *clean, f"PYTHONPATH={self.home}", *argv)
        settings = {"cwd": self.home, "capture_output": True, "text": True, "check": False, "timeout": 600, **options}
        return subprocess.run(command, **settings)


@contextmanager
def ordinary_user() -> Iterator[User]:
    """Make a user with subordinate ids and a home, where root may; remove both afterwards."""
    home = Path(tempfile.mkdtemp(prefix="runner-lab-home-"))
    ignored = shutil.ignore_patterns("__pycache__")
    if os.geteuid() != 0:
        shutil.copytree(HERE.parent, home / "tests/lab", ignore=ignored)
        try:
            yield User(getpass.getuser(), home, is_me=True)
        finally:  # rootless podman leaves folders of subordinate ids, which only its own user namespace may remove
            subprocess.run(("podman", "unshare", "rm", "-rf", str(home)), capture_output=True, check=False)
            shutil.rmtree(home, ignore_errors=True)
        return
    name = f"lab{home.name[-8:].lower().replace('_', '0')}"
    home.rmdir()
    for attempt in range(10):  # useradd fails while another one holds the lock of /etc/passwd
        made = subprocess.run(
            ("useradd", "--create-home", f"--home-dir={home}", "--shell=/bin/bash", name),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode == 0:
            break
        time.sleep(0.2 * (attempt + 1))
    else:
        raise RuntimeError(f"useradd: {made.stderr}")
    _open_fuse()
    try:
        shutil.copytree(HERE.parent, home / "tests/lab", ignore=ignored)
        subprocess.run(("chown", "-R", f"{name}:", str(home)), check=True)
        yield User(name, home)
    finally:
        subprocess.run(("userdel", "--force", "--remove", name), capture_output=True, check=False)
        shutil.rmtree(home, ignore_errors=True)


def _open_fuse() -> None:
    """Let users mount with FUSE, as distributions do; says so where it had to be changed."""
    device = Path("/dev/fuse")
    if device.exists() and device.stat().st_mode & 0o666 != 0o666:
        device.chmod(0o666)
        print("the lab has made /dev/fuse readable and writable for all", file=sys.stderr)


def report_slurm() -> dict[str, Any]:
    """What a lab shows to the ordinary user who started it."""
    from tests.lab.images import make_busybox_squashfs
    from tests.lab.slurm import SlurmLab

    home = Path.home()
    image = make_busybox_squashfs(home / "busybox.sqsh")
    (home / "data").mkdir()
    (home / "e.toml").write_text(f'image = "{image}"\nmounts = ["{home}/data:/data:ro", "{home}:/home/me"]\n')
    inside = 'id -u; pwd; echo "$GREETING $SLURM_PROCID"; touch /made /home/me/from-inside; touch /data/x 2>&1; exit 7'
    started = time.monotonic()
    with SlurmLab() as lab:
        seconds = time.monotonic() - started
        nodes = lab.run(("sinfo", "--noheader", "-N", "-p", "normal", "-o", "%N %T")).stdout
        gpus = lab.run(("srun", "-N1", "--gpus-per-node=4", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")).stdout
        entered = lab.run(("srun", f"--environment={home}/e.toml", "sh", "-c", inside), check=False)
        shared = lab.run(
            (
                "srun",
                "-N1",
                "-n2",
                f"--environment={home}/e.toml",
                "sh",
                "-c",
                "touch /$SLURM_PROCID; until [ -e /0 ] && [ -e /1 ]; do sleep 0.1; done; ls /0 /1",
            )
        )
        flags = (f"--container-image={image}", "--container-remap-root")
        remapped = lab.run(("srun", *flags, "sh", "-c", "id -u; touch /x 2>&1 || true"))
        saved = ("--container-writable", f"--container-save={home}/saved.sqsh")
        lab.run(("srun", f"--container-image={image}", *saved, "sh", "-c", "echo 1 > /srv/f"))
        kept = lab.run(("srun", f"--container-image={home}/saved.sqsh", "cat", "/srv/f")).stdout
    return {
        "seconds": seconds,
        "nodes": nodes.splitlines(),
        "gpus": gpus.strip(),
        "entered": [*entered.stdout.splitlines(), entered.returncode],
        "made": (home / "from-inside").exists(),
        "shared": shared.stdout.split(),
        "remapped": remapped.stdout.splitlines(),
        "saved": kept,
        "left": lab.folder.exists(),
    }


def report_podman() -> dict[str, Any]:
    """Build, run, push to and pull from the registry, rootless."""
    from tests.lab.images import build_busybox
    from tests.lab.podman import Podman
    from tests.lab.registry import Registry

    with Registry() as registry, Podman((registry.address,)) as podman:
        name = build_busybox(podman)
        ran = podman.run("run", "--rm", name, "sh", "-c", 'echo "$GREETING"; id -u; exit 7', check=False)
        podman.run("push", "--quiet", name, f"{registry.address}/busybox:1")
        podman.run("rmi", "--all", "--force")
        podman.run("pull", "--quiet", f"{registry.address}/busybox:1")
        images = podman.run("images", "--format={{.Repository}}:{{.Tag}}").stdout.split()
    return {
        "ran": [*ran.stdout.splitlines(), ran.returncode],
        "said": ran.stderr,
        "pulled": [name.partition("/")[2] for name in images],
        "left": podman.folder.exists(),
    }


if __name__ == "__main__":
    print(json.dumps({"slurm": report_slurm, "podman": report_podman}[sys.argv[1]]()))
