"""On Lustre the squashfs is striped. Debian has no Lustre: a program of its name answers here as `lfs` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.images.importer.plan import STRIPING, stripe


def lfs(folder: Path, setstripe: str, getstripe: str = "exit 0") -> None:
    """A stand-in for Lustre's `lfs` that writes down how it was called."""
    program = folder / "lfs"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\n'
        f"case $1 in getstripe) {getstripe} ;; setstripe) {setstripe} ;; esac\n"
    )
    program.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_on_lustre_the_empty_file_is_made_striped(path: Path) -> None:
    lfs(path, ': > "$(eval echo \\${$#})"')
    assert list(stripe(path / "x.partial", STRIPING)) == [f"Lustre: the file is striped with {STRIPING}"]
    calls = (path / "calls").read_text().splitlines()
    assert calls == [f"getstripe -d {path}", f"setstripe {STRIPING} {path}/x.partial"]
    assert (path / "x.partial").exists()


def test_elsewhere_nothing_is_said_or_made(path: Path) -> None:
    assert list(stripe(path / "x.partial", STRIPING)) == []
    lfs(path, "exit 0", "echo not Lustre >&2; exit 25")
    assert list(stripe(path / "x.partial", STRIPING)) == []
    assert not (path / "x.partial").exists()


def test_where_it_is_refused_the_way_is_told(path: Path) -> None:
    lfs(path, "echo 'error on ioctl: Operation not permitted' >&2; exit 1")
    (line,) = stripe(path / "x.partial", STRIPING)
    assert "Operation not permitted" in line and "lfs setstripe -E 4M" in line
