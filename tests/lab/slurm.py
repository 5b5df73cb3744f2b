"""A private Slurm: own munged, one slurmctld and virtual nodes that look like GH200 nodes, all under one folder.

Works as root and entirely as an ordinary user; any number of labs run side by side.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.lab import configuration, debian, processes
from tests.lab.ports import free_ports
from tests.lab.processes import LabError

PLUGINS = ("environment", "pyxis")
NEWER = "RUNNER_LAB_NEWER"  # set: labs run the Slurm of tests/lab/debian.py


class SlurmLab:
    """A Slurm cluster of `nodes` virtual nodes, running between `start` and `stop` (or inside `with`)."""

    started: ClassVar[set["SlurmLab"]] = set()  # the labs of this process that have not been stopped

    def __init__(
        self,
        nodes: int = 3,
        plugins: Sequence[str] = PLUGINS,
        folder: Path | None = None,
        extra_config: Sequence[str] = (),
        newer: bool = bool(os.environ.get(NEWER)),
        node: str = configuration.GH200,
        topology: str = "",
    ) -> None:
        """`plugins`: names of SPANK plugins to load; `extra_config`: lines for slurm.conf, such as PreemptType;
        `newer`: Slurm and all other programs of jobs are those of `debian.SUITE`; `node`: what each node has;
        `topology`: the text of topology.conf."""
        self.nodes = tuple(f"nid{number:03}" for number in range(1, nodes + 1))
        self.plugins = () if newer else tuple(plugins)  # they are compiled for this machine's Slurm
        self.extra_config = tuple(extra_config)
        self.topology = topology
        self.node = node
        self.root = debian.root() if newer else None
        # A short path: a munge or podman socket has room for 107 characters.
        self._guard: subprocess.Popen[bytes] | None = None
        self.folder = (folder or Path(tempfile.mkdtemp(prefix="runner-lab-"))).resolve()

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment with everything that makes Slurm's commands talk to the lab."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "PYXIS_", processes.MARK))
        }
        first = [str(self.folder / "bin")] if self.root else []
        path = ":".join(dict.fromkeys([*first, *inherited.get("PATH", os.defpath).split(":"), "/usr/sbin", "/sbin"]))
        return {**inherited, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command against the lab; output captured as text, `check` on, one minute at most unless told."""
        settings: dict[str, Any] = {
            "env": self.environ,
            "text": True,
            "capture_output": True,
            "stdin": subprocess.DEVNULL,
            "timeout": 300,
            "check": True,
            **options,
        }
        extra: Mapping[str, str] = settings.pop("extra_environ", {})
        settings["env"] = {**settings["env"], **extra}
        return subprocess.run(argv, **settings)

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`, as text; empty when Slurm does not know the job."""
        shown = self.run(("scontrol", "show", "--oneliner", "job", job_id), check=False).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for(self, job_id: str, states: Sequence[str] | str, timeout: float = 120.0) -> dict[str, str]:
        """The job's fields as soon as its state is one of `states`; LabError with the last state otherwise."""
        wanted = (states,) if isinstance(states, str) else tuple(states)
        deadline = time.monotonic() + timeout
        if not self.answers():  # each test behind a broken lab would wait in vain
            raise LabError(f"the lab does not answer: {self.logs()}")
        while (fields := self.job(job_id)).get("JobState") not in wanted:
            if time.monotonic() > deadline:
                raise LabError(f"job {job_id} is {fields.get('JobState')} ({fields.get('Reason')}), not {wanted}")
            time.sleep(0.05)
        return fields

    def start(self, guarded: bool = True) -> Self:
        """Bring the cluster up and return when all nodes are idle; nothing is left behind on failure.

        `guarded`: the lab ends with this process, however that ends.
        """
        self._guard = processes.guard(self.folder) if guarded else None
        self.started.add(self)
        try:
            for attempt in range(3):
                try:
                    self._start()
                    return self
                except LabError:  # most likely somebody took one of the ports: other ports next time
                    if attempt == 2:
                        raise
                    self._end_processes()
        except BaseException:
            self.stop()
            raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End everything that this lab started, wait until it is gone, remove its folder."""
        self.started.discard(self)
        self._end_processes()
        processes.remove(self.folder)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def answers(self) -> bool:
        """Whether slurmctld answers one of two questions: on a busy machine, the first may come too early."""
        for _ in range(2):
            with suppress(subprocess.TimeoutExpired):
                if self.run(("sinfo", "--noheader"), check=False, timeout=30).returncode == 0:
                    return True
        return False

    def restart(self) -> None:
        """End what is left of the cluster and start a new one in the same folder; its jobs are forgotten."""
        self._end_processes()
        self._start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        ports = free_ports(len(self.nodes) + 1)
        configuration.write(self.folder, self.nodes, ports, self.plugins, self.extra_config, self.node)
        (self.folder / "topology.conf").write_text(self.topology)
        if self.root:
            debian.write_wrappers(self.root, self.folder / "bin")
        self._start_munge()
        self.start_controller("-c", "-i")
        for node in self.nodes:
            self.start_node(node)
        processes.wait_until(self._all_idle, 120, f"{len(self.nodes)} idle nodes\n{self.logs()}", pause=0.03)

    def start_controller(self, *flags: str) -> None:
        """Start slurmctld; without `-c` it goes on with the state that an earlier one has left."""
        processes.start_daemon(
            (*self._daemon("slurmctld"), *flags, "-f", str(self.folder / "slurm.conf")),
            self.environ,
            self.folder / "slurmctld.start",
            self.folder,
        )

    def stop_controller(self) -> None:
        """Kill slurmctld, as a crash would."""
        self._kill(self.folder / "slurmctld.pid")

    def start_node(self, node: str) -> None:
        """Start the slurmd of one node."""
        processes.start_daemon(
            (*self._daemon("slurmd"), "-N", node, "-f", str(self.folder / "slurm.conf")),
            self.environ,
            self.folder / f"slurmd-{node}.start",
            self.folder,
        )

    def stop_node(self, node: str) -> None:
        """Kill the slurmd of one node, as a crash of the node would."""
        self._kill(self.folder / f"slurmd-{node}.pid")

    def _kill(self, pid_file: Path) -> None:
        pid = processes.read_pid(pid_file)
        if pid is not None and processes.is_marked(pid, self.folder):
            processes.kill((pid,))

    def containers(self) -> list[str]:
        """One word for each container of a step: what mounted or unpacked its image, or `reused`."""
        log = self.folder / "containers.log"
        return log.read_text().split() if log.exists() else []

    def logs(self) -> str:
        """The last lines of every daemon's log, for error messages."""
        texts = []
        for log in sorted((*self.folder.glob("*.log"), *self.folder.glob("*.start"))):
            lines = log.read_text(errors="replace").splitlines()[-8:]
            texts += [f"--- {log.name}", *lines] if lines else []
        return "\n".join(texts)

    def _all_idle(self) -> bool:
        shown = self.run(("sinfo", "--noheader", "-N", "-p", "normal", "-o", "%T"), check=False).stdout.split()
        return shown == ["idle"] * len(self.nodes)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o755)
        private = folder / "private"
        private.mkdir(exist_ok=True)
        private.chmod(0o700)
        key = private / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        processes.start_daemon(
            (
                *self._daemon("munged"),
                "--force",  # a private TMPDIR above the folder is a warning then
                f"--key-file={key}",
                f"--socket={folder}/munge.socket",
                f"--pid-file={private}/munged.pid",
                f"--log-file={private}/munged.log",
                f"--seed-file={private}/munged.seed",
                "--num-threads=2",
            ),
            self.environ,
            self.folder / "munged.start",
            self.folder,
        )

    def _pid_files(self) -> list[Path]:
        files = [self.folder / f"slurmd-{node}.pid" for node in self.nodes]
        return [*files, self.folder / "slurmctld.pid", self.folder / "munge/private/munged.pid"]

    def _end_processes(self) -> None:
        """End the daemons, then the steps and what runs below them; nothing without the lab's mark is touched.

        They are killed: their state goes with the folder, and slurmctld takes 5 s to leave in good order.
        """
        listed = [processes.read_pid(path) for path in self._pid_files()]  # daemons remove them early
        processes.kill(pid for pid in listed if pid is not None and processes.is_marked(pid, self.folder))
        processes.end_all(self.folder)

    def _daemon(self, name: str) -> tuple[str, ...]:
        """The words that start the daemon."""
        if self.root:
            return (*debian.prefix(self.root), f"/usr/sbin/{name}")
        path = shutil.which(name, path=f"/usr/sbin:/sbin:{os.environ.get('PATH', os.defpath)}")
        if path is None:
            raise LabError(f"{name} is not installed")
        return (path,)
