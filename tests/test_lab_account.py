"""The account of real parts counts what tests really ran on, and makes a run fail where a part is missing or unused."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import parts
from tests.lab.golden import compare

CONFTEST = "from tests.conftest import *\n"


def session(folder: Path, test: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A pytest session of its own over one file, with this suite's conftest."""
    root = Path(__file__).parents[1]
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(f"import subprocess\nimport pytest\n{test}\n")
    argv = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *flags,
        str(folder),
    )
    clean = {name: value for name, value in os.environ.items() if name != parts.REQUIRE and "PYTEST" not in name}
    settings = {**clean, "PYTHONPATH": str(root), **environ}
    return subprocess.run(argv, cwd=folder, env=settings, capture_output=True, text=True, check=False)


def row(output: str, part: str) -> list[str]:
    """The words behind a part's name in the table."""
    return next(line for line in output.splitlines() if line.startswith(f"{part} ")).removeprefix(part).split()


STARTS = "def test_one():\n    subprocess.run(['unsquashfs', '-version'], capture_output=True)\n"


def test_programs_started_by_a_test_and_marked_parts_are_counted(tmp_path: Path) -> None:
    marked = "@pytest.mark.uses('bubblewrap')\ndef test_two():\n    pass\n"
    ran = session(tmp_path, STARTS + marked)
    assert ran.returncode == 0, ran.stdout
    assert row(ran.stdout, "unsquashfs")[-2:] == ["yes", "1"]
    assert row(ran.stdout, "bubblewrap")[-2:] == ["yes", "1"]
    assert row(ran.stdout, "podman")[-1] == "0"
    assert ran.stdout.splitlines()[-1].startswith("2 passed")


def test_counts_of_all_workers_are_added(tmp_path: Path) -> None:
    many = "".join(STARTS.replace("test_one", f"test_{number}") for number in range(6))
    ran = session(tmp_path, many, "-n", "2")
    assert row(ran.stdout, "unsquashfs")[-1] == "6"


def test_an_unused_part_fails_the_run_where_parts_are_required(tmp_path: Path) -> None:
    ran = session(tmp_path, STARTS, **{parts.REQUIRE: "1"})
    assert ran.returncode == 1
    assert "no test ran on podman" in ran.stdout and "no test ran on unsquashfs" not in ran.stdout
    assert "1 passed" in ran.stdout.splitlines()[-1]


def test_a_missing_part_skips_its_tests_and_fails_the_run_where_required(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("python3", "sh"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    test = "def test_one(busybox_sqsh):\n    pass\n"
    hidden = {"PATH": str(tmp_path / "bin")}
    skipped = session(tmp_path, test, **hidden)
    assert skipped.returncode == 0 and "1 skipped" in skipped.stdout.splitlines()[-1]
    required = session(tmp_path, test, **hidden, **{parts.REQUIRE: "1"})
    assert required.returncode == 1
    assert "missing part: mksquashfs (apt-get install squashfs-tools)" in required.stdout
    assert "skipped: test_it.py::test_one" in required.stdout


def test_tests_that_need_what_debian_lacks_may_be_skipped(tmp_path: Path) -> None:
    ran = session(tmp_path, "@pytest.mark.enroot\ndef test_one():\n    pass\n", PATH="/nonexistent")
    assert "1 skipped" in ran.stdout.splitlines()[-1]


def test_every_part_of_a_fixture_or_marker_is_a_known_one() -> None:
    named = {name for names in parts.BY_FIXTURE.values() for name in names}
    assert named | set(parts.BY_MARKER.values()) | set(parts.SLURM) | set(parts.PLUGINS) <= parts.BY_NAME.keys()


def test_golden_files_are_compared_and_written_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "golden/a.txt"
    with pytest.raises(AssertionError, match="is missing"):
        compare(path, "text\n", update=False)
    compare(path, "text\n", update=True)
    compare(path, "text\n", update=False)
    with pytest.raises(AssertionError, match="differs from"):
        compare(path, "other\n", update=False)
    assert path.read_text() == "text\n"


def test_the_golden_fixture_compares_unless_pytest_is_told_to_write(
    golden: Callable[[str, str], None], update_golden: bool
) -> None:
    if update_golden:
        return  # nothing is compared then
    with pytest.raises(AssertionError, match=r"tests/golden/no-such\.txt is missing"):
        golden("no-such.txt", "text\n")
