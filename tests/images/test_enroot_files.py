"""What an image says of itself never becomes shell code: /etc/rc is run by dash and by busybox with hostile values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.images.importer.enroot_files import environment, fstab, metadata_files, multiline_variables, rc
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.machine.report import Quiet
from runner.project import find_project
from tests.conftest import need
from tests.images.handmade import file, folder, hard_link, layout, symlink, tar

SHELLS = [shell for shell in (("dash",), ("busybox", "sh"), ("bash", "--posix")) if shutil.which(shell[0])]
HOSTILE = (
    "", "'", '"', "$HOME", "$(touch OWNED)", "`touch OWNED`", "a\nb", "#", "\\", "-n", "--", "😀", "a  b", "*", "~",
    "'; touch OWNED; '", "\\'; touch OWNED #", "\t", "é", "!x", "x" * 100_000, "a;b|c&d>e<f(g){h}[i]",
)  # fmt: skip
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=40)


def run_rc(folder: Path, config: dict[str, Any], shell: tuple[str, ...], *arguments: str) -> list[str]:
    """The arguments that the image's program gets, when a shell runs /etc/rc in `folder`."""
    show = folder / "show"
    if not show.exists():
        show.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
        show.chmod(0o755)
    script = rc(config).replace("/etc/rc.local", str(folder / "rc.local"))
    (folder / "rc").write_bytes(script.encode("utf-8", "surrogateescape"))
    done = subprocess.run((*shell, str(folder / "rc"), *arguments), capture_output=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "OWNED").exists()
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_reach_the_program_unchanged(tmp_path: Path, shell: tuple[str, ...], word: str) -> None:
    config = {"Entrypoint": [str(tmp_path / "show"), word], "Cmd": [word, "second"], "Labels": {word: word, "k": word}}
    assert run_rc(tmp_path, config, shell) == [word, word, "second"]
    assert run_rc(tmp_path, config, shell, "given", word) == [word, "given", word]


@settings(max_examples=200)
@given(entry=st.lists(TEXT, max_size=3), command=st.lists(TEXT, max_size=3), labels=st.dictionaries(TEXT, TEXT))
def test_any_text_reaches_the_program_unchanged(
    tmp_path: Path, entry: list[str], command: list[str], labels: dict[str, str]
) -> None:
    config = {"Entrypoint": [str(tmp_path / "show"), *entry], "Cmd": command, "Labels": labels}
    assert run_rc(tmp_path, config, ("dash",)) == [*entry, *command]


@pytest.mark.parametrize("name", ["a b", "$(touch OWNED)", "'q'", "-n", "x\ny"])
def test_the_working_directory_is_made_and_entered(tmp_path: Path, name: str) -> None:
    config = {"WorkingDir": str(tmp_path / name), "Cmd": ["/bin/pwd"]}
    (tmp_path / "rc").write_text(rc(config).replace("/etc/rc.local", "/nowhere"))
    done = subprocess.run(("dash", str(tmp_path / "rc")), capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == f"{tmp_path / name}\n"
    assert not (tmp_path / "OWNED").exists()


def test_a_working_directory_that_cannot_be_entered_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "rc").write_text(rc({"WorkingDir": f"{tmp_path}/file/below"}))
    assert subprocess.run(("dash", str(tmp_path / "rc")), capture_output=True, check=False).returncode == 1


def test_rc_local_runs_first_and_may_exec_the_arguments(tmp_path: Path) -> None:
    """pyxis writes `exec "$@"` there when the entry point is not wanted."""
    (tmp_path / "rc.local").write_text('exec "$@"\n')
    config = {"Entrypoint": ["/does/not/exist"]}
    assert run_rc(tmp_path, config, ("dash",), str(tmp_path / "show"), "a") == ["a"]


def test_without_entry_point_and_command_it_is_a_shell(tmp_path: Path) -> None:
    (tmp_path / "rc").write_text(rc({}).replace("/etc/rc.local", "/nowhere"))
    done = subprocess.run(("dash", str(tmp_path / "rc")), input=b"echo $0", capture_output=True, check=True)
    assert done.stdout == b"/bin/sh\n"


def test_each_label_is_one_comment_line() -> None:
    config = {"Labels": {"a": "one\ntwo", "b\r": "\x1b[2K; touch OWNED", "c": "plain"}}
    lines = rc(config).splitlines()
    assert lines[:4] == ["#!/bin/sh", "# a one two", "# b   [2K; touch OWNED", "# c plain"]


def test_environment_is_raw_in_the_images_order() -> None:
    assert environment(["B=2", "A=$HOME 'x'", "EMPTY="]) == "B=2\nA=$HOME 'x'\nEMPTY=\n"


def test_a_variable_with_a_line_break_cannot_forge_another() -> None:
    config = {"Env": ["A=1", "B=x\nLD_PRELOAD=/evil.so"]}
    assert "LD_PRELOAD" not in metadata_files(config)["etc/environment"][0]
    assert multiline_variables(config) == ("B",)


def test_volumes_are_sorted_and_escaped() -> None:
    assert fstab({"/b": {}, "/a c": {}}) == (
        "${ENROOT_ROOTFS}/a\\040c /a\\040c none x-create=dir,bind,rw,nosuid,nodev\n"
        "${ENROOT_ROOTFS}/b /b none x-create=dir,bind,rw,nosuid,nodev\n"
    )


@pytest.mark.parametrize("volume", ["/../../x", "/data/../../etc", "/..", "data", "", "/$HOME", "/${X}/y"])
def test_a_volume_that_leads_out_of_the_image_is_refused(volume: str) -> None:
    """enroot would mount a folder of the host's, whatever variables it puts in."""
    with pytest.raises(RunnerError, match="with its volume"):
        fstab({"/fine": {}, volume: {}})
    assert fstab({"/a..b/...": {}})


LINKED = {
    "relative": [folder("nix"), folder("nix/etc"), file("nix/etc/passwd", b"root\n"), symlink("etc", "nix/etc")],
    "absolute, the folder in a lower layer": [symlink("etc", "/nix/etc")],
    "over another link": [symlink("etc", "link"), symlink("link", "../../nix/./etc")],
    "to nothing": [symlink("etc", "nix/../nix/etc")],
}


@pytest.mark.parametrize("name", LINKED)
def test_the_files_lie_behind_a_link_to_a_folder(name: str, tmp_path: Path) -> None:
    """The content of the folder stays visible: passwd, certificates, ld.so.cache."""
    below = [folder("nix"), folder("nix/etc"), file("nix/etc/passwd", b"root\n"), file("nix/etc/rc", b"old\n")]
    layers = [tar([] if name == "to nothing" else below), tar(LINKED[name])]
    tree = imported(layout(tmp_path / "image", layers), tmp_path)
    assert (tree / "etc").is_symlink()
    files = {path.name for path in (tree / "nix/etc").iterdir()}
    assert files - {"passwd"} == {"environment", "fstab", "rc", "rc.local"}
    assert name == "to nothing" or (tree / "nix/etc/passwd").read_bytes() == b"root\n"
    assert (tree / "nix/etc/rc").read_text().startswith("#!/bin/sh")


@pytest.mark.parametrize(
    "members",
    [[symlink("etc", "etc")], [file("etc")], [folder("etc"), folder("etc/rc"), file("etc/rc/x")], []],
    ids=["circle", "file", "a folder of the same name", "nothing"],
)
def test_the_files_have_a_folder_whatever_the_image_has_there(members: list[Any], tmp_path: Path) -> None:
    tree = imported(layout(tmp_path / "image", [tar([*members, file("x")])]), tmp_path)
    assert (tree / "etc/rc").is_file() and not (tree / "etc").is_symlink()


def test_the_images_own_files_of_these_names_give_way(tmp_path: Path) -> None:
    """Also if another name of the same file stays."""
    members = [
        folder("etc"),
        file("etc/fstab", b"old\n"),
        hard_link("copy", "etc/fstab"),
        file("etc/passwd", b"root\n"),
    ]
    tree = imported(layout(tmp_path / "image", [tar(members)]), tmp_path)
    assert (tree / "copy").read_bytes() == b"old\n" and (tree / "etc/fstab").read_bytes() == b""
    assert (tree / "etc/passwd").read_bytes() == b"root\n"


def imported(image: Path, work: Path) -> Path:
    """The unpacked squashfs of an image."""
    need("unsquashfs")
    options = ImportOptions(output=work / "image.sqsh", again=True)
    import_image(ImportRequest(f"oci:{image}", work, find_project(work), {}, options), Quiet())
    tree = work / "tree"
    subprocess.run(("unsquashfs", "-q", "-n", "-d", tree, work / "image.sqsh"), check=True, capture_output=True)
    return tree
