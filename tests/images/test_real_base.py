"""A real distribution: a recipe on Debian with Python, and a Debian base made by mmdebstrap."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from runner.images.build.base import debian_steps
from runner.images.build.steps import run_logged, run_quietly
from runner.images.engine import Engine
from runner.images.recipe import Base
from tests.images.bench import Bench, content, listing

CONTAINERFILE = """\
ARG BASE
FROM ${BASE} AS build
RUN python3 -c 'import compileall, pathlib; pathlib.Path("/opt/module.py").write_text("ANSWER = 6 * 7\\n")'
FROM ${BASE}
COPY --from=build /opt/module.py /opt/module.py
ENV PYTHONPATH=/opt
CMD ["python3", "-c", "import module; print(module.ANSWER)"]
"""


@pytest.mark.uses("podman", "tar2sqfs", "bubblewrap")
def test_python_in_the_squashfs_runs(bench: Bench, python_image: str, tmp_path: Path) -> None:
    bench.write("python", CONTAINERFILE, f'[[base]]\nimage = "{python_image}"\n')
    bench.build("python")
    assert bench.said("step 2/4 of stage 2/2: COPY --from=build")
    squashfs = bench.import_image("python")
    root = tmp_path / "root"
    subprocess.run(("unsquashfs", "-q", "-d", str(root), str(squashfs.path)), capture_output=True, check=True)
    inside = ("bwrap", "--bind", str(root), "/", "--dev", "/dev", "--proc", "/proc", "--clearenv")
    variables = dict(line.split("=", 1) for line in content(squashfs.path, "etc/environment").splitlines())
    flags = [word for name, value in variables.items() for word in ("--setenv", name, value)]
    done = subprocess.run((*inside, *flags, "/bin/sh", "/etc/rc"), text=True, capture_output=True, check=True)
    assert done.stdout == "42\n"
    assert listing(squashfs.path)["etc/shadow"].startswith("-rw-r----- root/root")


def sizes(bench: Bench, container: str) -> dict[str, int]:
    """Path -> size of the files in a container that are not empty (podman itself leaves empty ones)."""
    with (
        subprocess.Popen(("podman", "export", container), env=bench.environ, stdout=subprocess.PIPE) as child,
        tarfile.open(fileobj=child.stdout, mode="r|") as archive,
    ):
        return {entry.name: entry.size for entry in archive if entry.size}


@pytest.mark.slow
@pytest.mark.uses("mmdebstrap", "podman")
def test_a_debian_base_carries_nothing_of_the_host(bench: Bench) -> None:
    """Made as the tool makes it; no proxy, no mirror, no apt lists of the host stay in it."""
    name = "localhost/runner/base-debian-bookworm:test"
    first, *rest = debian_steps(
        Base(None, "bookworm", ()), Engine("podman", "test"), "linux/amd64", name, bench.folder / "a.tar"
    )
    lines: list[str] = []
    assert run_logged(first, bench.folder / "log", lines.append) == 0, lines[-10:]
    for step in rest:
        run_quietly(step)
    container = bench.engine("create", name).strip()
    paths = bench.export(container)
    assert not {"etc/hostname", "etc/resolv.conf"} & set(sizes(bench, container))
    assert not [path for path in paths if "99mmdebstrap" in path or path.startswith("var/lib/apt/lists/deb")]
    show = ("run", "--rm", "--network=none", name, "cat", "/etc/apt/sources.list", "/etc/os-release")
    text = bench.engine(*show)
    assert re.match(r"deb http\S+ bookworm main", text)
    assert "VERSION_CODENAME=bookworm" in text
    assert f"{name}-unfinished" not in bench.engine("images", "--format={{.Repository}}:{{.Tag}}")
