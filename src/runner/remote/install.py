"""Install this version of runner on HOST, in a folder of its own: one archive with runner and its dependencies.

HOST needs only a Python: the wheels of the dependencies come from this machine, because many login nodes reach no
package index.
"""

import hashlib
import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from runner import __version__
from runner.errors import RunnerError
from runner.machine import folders, process
from runner.machine.report import Report
from runner.project import shipped_folder
from runner.remote.ssh import Connection

# the names of manylinux_2_17, _2_12 and _2_5 before PEP 600
_OLD = ("manylinux2014", "manylinux2010", "manylinux1")


def install(connection: Connection, report: Report) -> None:
    """Install this version of runner, or replace the one that `install` has installed."""
    name = connection.host.name
    answer = connection.ask("python.sh").splitlines()
    if len(answer) < 4 or not answer[3]:
        why = "over ssh, none of python3, python3.11, …, python3.14 on PATH is CPython 3.11 or newer with glibc"
        fix = "load a newer Python in ~/.bashrc there, or install uv there and run: uv python install 3.12"
        raise RunnerError(f"{name} has no suitable Python", why, fix)
    python, tag, machine, glibc = answer[:4]
    with folders.temporary("runner-install-") as folder:
        report.say(f"downloading wheels for Python {tag}, {machine}, glibc {glibc}")
        _download(
            folder,
            tag,
            [f"manylinux_2_{n}_{machine}" for n in range(int(glibc.split(".")[1]), 4, -1)]
            + [f"{old}_{machine}" for old in _OLD],
        )
        archive = folder / "runner.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for wheel in sorted(folder.glob("*.whl")):
                with zipfile.ZipFile(wheel) as source:
                    for each in source.infolist():
                        packed.writestr(each, source.read(each))
            for path, inside in _own_files():
                packed.writestr(zipfile.ZipInfo(inside), path.read_bytes(), zipfile.ZIP_DEFLATED)
        data = archive.read_bytes()
        report.say(f"sending runner {__version__} to {name}, {len(data) / 1e6:.1f} MB")
        values = {
            "version": __version__,
            "python": python,
            "tag": tag,
            "sum": hashlib.sha256(data).hexdigest(),
        }
        connection.ask("install.sh", stdin=archive, **values)
    report.say(f"runner {__version__} is installed on {name}, in {connection.host.folder}/versions")


def _download(folder: Path, tag: str, platforms: list[str]) -> None:
    required = [
        each for each in importlib.metadata.requires("runner-hpc") or () if "extra ==" not in each
    ]
    argv = [sys.executable, "-P", "-m", "pip", "download", "-q"]
    argv += ["--only-binary=:all:", "-d", str(folder)]
    argv += ["--implementation", "cp", "--python-version", tag]
    argv += [f"--platform={each}" for each in platforms]
    done = process.run((*argv, *required), check=False)
    if done.exit_code:
        raise process.failed(
            done,
            f"fix the problem that pip reports, or install runner {__version__} on the other machine yourself",
        )


def _own_files() -> Iterator[tuple[Path, str]]:
    """(file, name in the archive) of this installation, with the shipped files where a wheel has them."""
    package, shipped = Path(__file__).resolve().parents[1], shipped_folder()
    found = [
        (path, f"runner/{path.relative_to(package).as_posix()}") for path in package.rglob("*")
    ]
    if not shipped.is_relative_to(package):
        parts = list(shipped.glob("Containerfile.*"))
        for kind in ("clusters", "containers", "docs", "edf", "jobs"):
            parts += (shipped / kind).rglob("*")
        found += [
            (path, f"runner/shipped/{path.relative_to(shipped).as_posix()}") for path in parts
        ]
    return (
        (path, name) for path, name in sorted(found) if path.is_file() and "__pycache__" not in name
    )
