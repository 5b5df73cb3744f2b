"""A private podman: own configuration and storage, as root or rootless; on request a socket for the docker SDK."""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.lab import processes
from tests.lab.processes import LabError

CONTAINERS = """\
[containers]
netns = "host"
{limits}
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "{runtime}"
[network]
network_config_dir = "{folder}/networks"
"""
STORAGE = """\
[storage]
driver = "{driver}"
graphroot = "{folder}/storage"
rootless_storage_path = "{folder}/storage"
runroot = "{folder}/run"
{options}
"""
REGISTRIES = """\
unqualified-search-registries = []
short-name-mode = "permissive"
"""
INSECURE = """
[[registry]]
location = "{address}"
insecure = true
"""
# podman asks for limits that root without CAP_SYS_RESOURCE may not raise. Source: containers-common 0.49, defaults.
LIMITS = 'default_ulimits = ["nofile=1024:{files}", "nproc=4096:{tasks}"]'


class Podman:
    """podman with a storage of its own; `environ` makes any podman, buildah or skopeo use it."""

    def __init__(self, insecure_registries: Sequence[str] = (), folder: Path | None = None) -> None:
        self.folder = (folder or Path(tempfile.mkdtemp(prefix="runner-lab-podman-"))).resolve()
        self.insecure_registries = tuple(insecure_registries)

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment with podman's three files and a private home of its run-time data."""
        return {
            **{name: value for name, value in os.environ.items() if name not in ("CONTAINER_HOST", "DOCKER_HOST")},
            processes.MARK: str(self.folder),  # rootless podman leaves a process that keeps its user namespace
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
            "REGISTRY_AUTH_FILE": str(self.folder / "auth.json"),
            "XDG_RUNTIME_DIR": str(self.folder / "xdg"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `podman WORDS`; output captured as text, `check` on, five minutes at most unless told."""
        settings = {"env": self.environ, "text": True, "capture_output": True, "timeout": 300, "check": True, **options}
        return subprocess.run(("podman", *words), **settings)

    @contextmanager
    def socket(self) -> Iterator[str]:
        """The URL of a socket that speaks docker's API, for the docker SDK."""
        path = self.folder / "podman.sock"
        argv = ("podman", "system", "service", "--time=0", f"unix://{path}")
        server = processes.spawn(argv, self.environ, self.folder / "service.log", self.folder)
        try:
            processes.wait_until(path.exists, 120, "podman's socket")
            yield f"unix://{path}"
        finally:
            processes.kill((server.pid,))
            server.wait()
            path.unlink(missing_ok=True)

    def start(self) -> Self:
        for name in ("xdg", "tmp", "networks"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        self._guard = processes.guard(self.folder)
        runtime = "runc" if Path("/sys/fs/cgroup/unified").exists() and shutil.which("runc") else "crun"
        overlay = os.geteuid() == 0 or shutil.which("fuse-overlayfs") is not None
        options = ""
        if os.geteuid() != 0 and overlay:
            options = f'[storage.options.overlay]\nmount_program = "{shutil.which("fuse-overlayfs")}"'
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        tasks = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        limits = LIMITS.format(files=min(files, 1 << 20), tasks=min(tasks, 1 << 15) if tasks > 0 else 1 << 15)
        texts = {
            "containers.conf": CONTAINERS.format(folder=self.folder, runtime=runtime, limits=limits),
            "storage.conf": STORAGE.format(folder=self.folder, driver="overlay" if overlay else "vfs", options=options),
            "registries.conf": REGISTRIES
            + "".join(INSECURE.format(address=address) for address in self.insecure_registries),
        }
        for name, text in {**texts, "auth.json": "{}"}.items():
            (self.folder / name).write_text(text)
        self._check_that_storage_is_private()
        return self

    def _check_that_storage_is_private(self) -> None:
        """Before anything is removed from it: a podman that ignores the configuration would use the user's own."""
        said = self.run("info", "--format={{.Store.GraphRoot}} {{.Store.RunRoot}}").stdout.split()
        if len(said) != 2 or not all(Path(path).is_relative_to(self.folder) for path in said):
            processes.end_all(self.folder)
            processes.remove(self.folder)
            raise LabError(f"podman does not use the lab's storage but {said}")

    def stop(self) -> None:
        """Remove all containers and the storage; a rootless storage needs podman's own user namespace for that."""
        self.run("rm", "--all", "--force", "--time=0", check=False)
        if os.geteuid() != 0:
            self.run("unshare", "rm", "-rf", str(self.folder / "storage"), check=False)
        processes.end_all(self.folder)
        processes.remove(self.folder)
        self._guard.kill()
        self._guard.communicate()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
