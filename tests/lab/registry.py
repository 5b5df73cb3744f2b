"""A private container registry (docker-registry) on 127.0.0.1: plain http, own storage, own port."""

import http.client
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab import processes
from tests.lab.ports import free_ports
from tests.lab.processes import LabError

CONFIG = """\
version: 0.1
log:
  level: warn
storage:
  filesystem:
    rootdirectory: {folder}/storage
  delete:
    enabled: true
http:
  addr: 127.0.0.1:{port}
"""
USERS = """\
auth:
  htpasswd:
    realm: lab
    path: {folder}/users
"""


class Registry:
    """A registry that runs inside `with`; `address` is `127.0.0.1:PORT`, its images `ADDRESS/NAME:TAG`.

    `users`: lines of an htpasswd file (bcrypt); with them it asks for Basic authentication.
    """

    def __init__(self, users: str = "") -> None:
        self.users = users
        self.folder = Path(tempfile.mkdtemp(prefix="runner-lab-registry-")).resolve()
        self.address = ""

    def start(self) -> Self:
        program = shutil.which("docker-registry") or shutil.which("registry")
        if program is None:
            raise LabError("docker-registry is not installed")
        self._guard = processes.guard(self.folder)
        for _ in range(3):  # another process may take the port between choice and use
            port = free_ports(1)[0]
            self.address = f"127.0.0.1:{port}"
            config = self.folder / "config.yml"
            config.write_text(CONFIG.format(folder=self.folder, port=port))
            if self.users:
                (self.folder / "users").write_text(self.users)
                config.write_text(config.read_text() + USERS.format(folder=self.folder))
            environ = {"PATH": "/usr/bin:/bin"}
            server = processes.spawn((program, "serve", str(config)), environ, self.folder / "log", self.folder)
            processes.wait_until(lambda s=server: s.poll() is not None or self._answers(), 60, "the registry")  # type: ignore[misc]
            if server.poll() is None:
                return self
        self.stop()
        raise LabError("the registry does not start")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=20)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status == (401 if self.users else 200)
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
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
