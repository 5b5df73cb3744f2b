"""The lab's registry, podman and images are real and private."""

import os
import subprocess
from pathlib import Path

import docker
import pytest

from tests.lab.images import PYTHON_ENV, build_busybox
from tests.lab.podman import Podman
from tests.lab.registry import Registry
from tests.lab.slurm import SlurmLab


def test_podman_runs_what_it_has_built(podman: Podman, busybox_image: str) -> None:
    ran = podman.run("run", "--rm", busybox_image, "sh", "-c", 'echo "$GREETING $PWD"; exit 7', check=False)
    assert (ran.stdout, ran.returncode) == ("from the image /srv\n", 7)


def test_the_entrypoint_variant_has_an_entrypoint(podman: Podman) -> None:
    name = build_busybox(podman, "localhost/lab/busybox:entrypoint", entrypoint=True)
    assert podman.run("run", "--rm", name, "sh", "-c", "echo $ENTRYPOINT_RAN").stdout == "yes\n"


def test_images_travel_through_the_registry(podman: Podman, registry: Registry, busybox_image: str) -> None:
    remote = f"{registry.address}/lab/busybox:pushed"
    podman.run("push", "--quiet", busybox_image, remote)
    argv = ("skopeo", "inspect", "--tls-verify=false", "--format={{.Env}}", f"docker://{remote}")
    shown = subprocess.run(argv, env=podman.environ, capture_output=True, text=True, check=True).stdout
    assert "GREETING=from the image" in shown
    podman.run("pull", "--quiet", remote)
    assert podman.run("image", "exists", remote, check=False).returncode == 0


def test_docker_sdk_talks_to_podmans_socket(docker_socket: str, busybox_image: str) -> None:
    client = docker.DockerClient(base_url=docker_socket)
    try:
        assert client.images.get(busybox_image).attrs["Config"]["Env"].count("GREETING=from the image") == 1
    finally:
        client.close()


def test_storage_is_private_and_gone_afterwards(podman: Podman) -> None:
    with Podman() as other:
        build_busybox(other, "localhost/lab/other:1")
        assert podman.run("image", "exists", "localhost/lab/other:1", check=False).returncode == 1
        folder = other.folder
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_registry_is_gone_with_its_storage() -> None:
    with Registry() as server:
        folder = server.folder
        assert server.address.startswith("127.0.0.1:")
    assert not folder.exists()


def test_a_failing_build_keeps_the_words_of_its_step(podman: Podman, busybox_image: str, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text(f"FROM {busybox_image}\nRUN echo said-this && exit 3\n")
    failed = podman.run("build", str(tmp_path), check=False)
    assert failed.returncode != 0 and "said-this" in failed.stdout


def test_the_python_image_runs_python_in_slurm(slurm: SlurmLab, python_sqsh: Path, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(f'image = "{python_sqsh}"\n')
    program = "import os, sys; print(sys.version_info[:2], os.getuid(), sys.executable)"
    ran = slurm.run(("srun", f"--environment={tmp_path}/e.toml", "python3", "-c", program))
    assert ran.stdout == f"(3, 11) {os.getuid()} /usr/bin/python3\n"


def test_the_login_shell_resets_path_of_a_debian_image_and_the_edf_keeps_it(
    slurm: SlurmLab, python_sqsh: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain.toml").write_text(f'image = "{python_sqsh}"\n')
    (tmp_path / "path.toml").write_text(f'image = "{python_sqsh}"\n[env]\nPATH = "/kept:${{PATH}}"\n')
    paths = {
        name: slurm.run(("srun", f"--environment={tmp_path}/{name}.toml", "sh", "-c", "echo $PATH")).stdout.strip()
        for name in ("plain", "path")
    }
    user = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
    assert paths["plain"] == (PYTHON_ENV["PATH"] if os.getuid() == 0 else user)  # from the image's /etc/profile
    assert paths["path"] == f"/kept:{PYTHON_ENV['PATH']}"


def test_the_python_image_runs_in_podman(podman: Podman, python_image: str) -> None:
    assert podman.run("run", "--rm", python_image, "python3", "-c", "print(1 + 1)").stdout == "2\n"


@pytest.mark.uses("bubblewrap", "squashfuse", "/dev/fuse")
def test_squashfs_images_can_be_entered_with_bubblewrap(busybox_sqsh: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(("squashfuse", str(busybox_sqsh), str(root)), check=True)
    try:
        argv = ("bwrap", "--ro-bind", str(root), "/", "--dev", "/dev", "/bin/sh", "-c", "cat /etc/environment; exit 7")
        ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(("fusermount3", "-u", str(root)), check=True)
    assert "GREETING=from the image" in ran.stdout and ran.returncode == 7
