"""A bench for tests of build and import: a project of tiny recipes, the lab's podman, a folder of images."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.images.build.base import BuildOptions
from runner.images.build.build import build
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.images.recipe import Recipe, load_recipe
from runner.images.sources.engine_storage import Image
from runner.images.squashfs_file import Squashfs
from runner.machine.report import Quiet
from runner.project import Project

TINY = """\
FROM scratch
COPY containers/busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin GREETING="hello there"
WORKDIR /srv
CMD ["/bin/sh"]
"""


@dataclass
class Bench:
    """A project in `folder`, and the environment that every command gets."""

    folder: Path
    environ: dict[str, str]
    report: Quiet = field(default_factory=Quiet)

    def __post_init__(self) -> None:
        (self.folder / "project/containers").mkdir(parents=True)
        (self.folder / "project/runner.toml").write_text("")
        shutil.copy("/bin/busybox", self.folder / "project/containers/busybox")
        own = {"XDG_CACHE_HOME": str(self.folder / "cache"), "RUNNER_IMAGES": str(self.images), "RUNNER_SITE": "local"}
        self.environ = {**self.environ, **own, "HOME": str(self.folder / "home")}
        (self.folder / "home").mkdir()

    @property
    def root(self) -> Path:
        """The project."""
        return self.folder / "project"

    @property
    def images(self) -> Path:
        """The image folder."""
        return self.folder / "images"

    @property
    def project(self) -> Project:
        return Project(self.root, self.folder / "nothing", self.root)

    def write(self, name: str, containerfile: str = TINY, more: str = "") -> Recipe:
        """Write a recipe; it is named by a text of its own so that tests share no layers."""
        (self.root / f"Containerfile.{name}").write_text(containerfile)
        head = f'containerfile = "Containerfile.{name}"\ncontext = ["containers/busybox"]\n'
        (self.root / f"containers/{name}.toml").write_text(head + more)
        return load_recipe(name, self.project)

    def build(self, name: str, **options: object) -> Image:
        """Build a recipe in this process."""
        return build(load_recipe(name, self.project), BuildOptions(**options), self.environ, self.report)  # type: ignore[arg-type]

    def import_image(self, source: str, **options: object) -> Squashfs:
        """Import an image in this process."""
        settings = ImportOptions(**options)  # type: ignore[arg-type]
        return import_image(
            ImportRequest(source, self.images, self.project, self.environ, settings), self.report
        ).squashfs

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `runner WORDS` in the project."""
        return subprocess.Popen(
            (sys.executable, "-m", "runner", *words),
            cwd=self.root,
            env={**self.environ, **(env or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def runner(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `runner WORDS` in the project to its end."""
        child = self.start(*words, env=env)
        out, err = child.communicate(timeout=600)
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def scratch(self) -> str:
        """A Containerfile that runs nothing, so that it can be built for any platform."""
        (self.root / "Containerfile.scratch").write_text("FROM scratch\nCOPY runner.toml /\n")
        return str(self.root / "Containerfile.scratch")

    def build_stand_in(self, reference: str) -> str:
        """Put a tiny image under a name that a test needs to be there; returns the name."""
        self.write("stand-in")
        self.engine("tag", self.build("stand-in").reference, reference)
        return reference

    def engine(self, *words: str) -> str:
        """What `podman WORDS` prints."""
        return subprocess.run(("podman", *words), env=self.environ, text=True, capture_output=True, check=True).stdout

    def export(self, container: str) -> list[str]:
        """The paths in a container."""
        with subprocess.Popen(("podman", "export", container), env=self.environ, stdout=subprocess.PIPE) as child:
            listed = subprocess.run(("tar", "t"), stdin=child.stdout, text=True, capture_output=True, check=True)
        return listed.stdout.splitlines()

    def left_containers(self) -> str:
        """The ids of containers that imports made and that are still there."""
        return self.engine("ps", "-aq", "--filter", "label=runner.import.process")

    def files(self) -> list[str]:
        """The names in the image folder, without the lock files, which stay by design."""
        found = self.images.iterdir() if self.images.is_dir() else ()
        return sorted(path.name for path in found if not path.name.endswith(".lock"))

    def said(self, words: str) -> bool:
        """Whether a line of the report holds the words."""
        return any(words in line for line in self.report.lines)


def processes_of(words: str) -> list[int]:
    """The processes in whose command line the words stand."""
    listed = subprocess.run(("ps", "-ww", "-e", "-o", "pid=,args="), capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if words in line]


def end_processes_of(words: str) -> None:
    """Kill the processes in whose command line the words stand: words that no other test has."""
    for pid in processes_of(words):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def listing(path: Path) -> dict[str, str]:
    """Path -> mode, owner and size (or link target) of everything in a squashfs file."""
    text = subprocess.run(("unsquashfs", "-lls", str(path)), text=True, capture_output=True, check=True).stdout
    found = {}
    for line in text.splitlines():
        if "squashfs-root" in line:
            head, _, name = line.partition("squashfs-root")
            found[name.lstrip("/").partition(" -> ")[0]] = " ".join([*head.split()[:3], name.partition(" -> ")[2]])
    return found


def content(path: Path, name: str) -> str:
    """The text of one file in a squashfs file."""
    return subprocess.run(("unsquashfs", "-cat", str(path), name), text=True, capture_output=True, check=True).stdout


def sidecar(path: Path) -> dict[str, object]:
    """The JSON beside a squashfs file."""
    data: dict[str, object] = json.loads(path.with_suffix(".json").read_text())
    return data


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what this machine says about packages."""
    names = ("PIP_", "SSL_", "CURL_", "REQUESTS_", "GIT_", "RUNNER_", "DOCKER_")
    return {name: value for name, value in environ.items() if not name.startswith(names)}
