"""import into a folder where others write too: other users, other programs, other imports; with and without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import random
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.images.importer.importer import Imported, explain_import, import_image
from runner.images.importer.leftovers import clear_leftovers
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.machine import files
from runner.machine.report import Quiet
from runner.project import Project
from tests.images.handmade import file, folder, layout, tar
from tests.images.sources.hostile import Hostile
from tests.images.sources.test_registry import Made

BASE = [folder("lib"), file("lib/large", random.Random(1).randbytes(300_000))]


class Place:
    """Two images that share a layer, and a folder to import into."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.images, self.report = folder, folder / "images", Quiet()
        self.images.mkdir()
        for name in ("one", "two"):
            layout(folder / name, [tar(BASE), tar([file("name", name.encode())])])

    def bring(self, name: str, **options: object) -> Imported:
        project = Project(self.folder, self.folder, self.folder)
        settings = ImportOptions(**options)  # type: ignore[arg-type]
        return import_image(ImportRequest(f"oci:{self.folder / name}", self.images, project, {}, settings), self.report)

    def names(self) -> set[str]:
        return {path.name for path in self.images.iterdir()}

    def said(self, words: str) -> bool:
        return any(words in line for line in self.report.lines)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def shared() -> Iterator[Place]:
    """A place whose image folder everybody may write to, as a project's folder is on a cluster."""
    if os.geteuid() != 0:
        pytest.skip("only root may act as two users")
    top = Path(tempfile.mkdtemp(prefix="runner-shared-"))
    try:
        top.chmod(0o755)
        made = Place(top)
        made.images.chmod(0o2777)
        yield made
    finally:
        shutil.rmtree(top)


def as_user(name: str, act: Callable[[], Any], umask: int = 0o022) -> Any:
    """What `act` returns (JSON) in a process of that user's. Raises RunnerError where it does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            user = pwd.getpwnam(name)
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.umask(umask)
            answer: object = {"returned": act()}
        except RunnerError as error:
            answer = {"refused": [error.what, error.why, error.fix]}
        except BaseException:
            answer = {"broken": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        told = json.load(stream)
    os.waitpid(child, 0)
    if "refused" in told:
        raise RunnerError(*told["refused"])
    assert "returned" in told, told
    return told["returned"]


# two users


def test_a_second_user_gets_the_file_of_the_first(shared: Place) -> None:
    """At once, without a lock; and a new image gets the link, in a folder that is not sticky."""
    shared.bring("one", output=shared.folder / "warm.sqsh")  # what is imported late is imported as root

    def bring(name: str) -> list[object]:
        imported = shared.bring(name)
        return [str(imported.squashfs.path), imported.made, shared.said("already imported by nobody")]

    first = as_user("nobody", lambda: bring("one"))
    assert as_user("daemon", lambda: bring("one")) == [first[0], False, True]
    shared.images.chmod(0o555)
    assert as_user("daemon", lambda: bring("one")) == [first[0], False, True]


def test_users_share_a_lock_and_not_each_others_layers(shared: Place) -> None:
    """Another user's index could put any file into an image whose layers were to be checked."""
    shared.bring("one", output=shared.folder / "warm.sqsh")
    path = as_user("nobody", lambda: str(shared.bring("one").squashfs.path))
    with files.locked(Path(path)):
        assert as_user("daemon", lambda: files.is_locked(Path(path)))
    copied = as_user("daemon", lambda: shared.bring("two").packed.layers_reused)
    assert copied == 0
    again = as_user("daemon", lambda: shared.bring("one", again=True).packed.layers)
    assert again == 2 and Path(path).owner() == "daemon"
    assert as_user("daemon", lambda: shared.bring("two", owners="keep").packed.layers_reused) == 2


def test_what_a_group_may_write_to_is_not_copied_from(place: Place) -> None:
    old = os.umask(0o002)
    try:
        path = place.bring("one").squashfs.path
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert place.bring("two").packed.layers_reused == 1
    for each in place.images.glob("*.layers"):
        each.chmod(0o664)
    assert place.bring("two", owners="keep").packed.layers_reused == 0


def test_a_link_of_another_users_in_a_sticky_folder_stays(shared: Place) -> None:
    """The file is made and named; that the link still means the older image is said."""
    shared.bring("one", output=shared.folder / "warm.sqsh")
    layout(shared.folder / "newer/one", [tar([file("newer")])])
    shared.images.chmod(0o1777)
    before = as_user("nobody", lambda: str(shared.bring("one").squashfs.path))

    def bring() -> list[object]:
        made = shared.bring("newer/one").squashfs
        return [str(made.path), str(made.link), shared.said("warning: ") and shared.said("cannot make")]

    path, link, warned = as_user("daemon", bring)
    assert path == link != before and warned
    assert str((shared.images / "one.sqsh").resolve()) == before


def test_the_umask_decides_who_may_read(place: Place) -> None:
    old = os.umask(0o077)
    try:
        place.bring("one")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.images.iterdir() if not path.is_symlink()}
    assert len(modes) == 4 and set(modes.values()) == {0o600}


def test_a_file_that_is_rewritten_may_keep_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "x"
    files.write(target, "a", mode=0o777)
    target.chmod(0o664)
    files.write(target, "b", keep_mode=True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o664
    files.write(target, "c")
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~0o022


# other programs' files


@pytest.mark.parametrize("name", ["model.json", "model.layers"])
@pytest.mark.parametrize("options", [{}, {"again": True}], ids=["", "force"])
def test_foreign_files_beside_the_output_stay(place: Place, name: str, options: dict[str, bool]) -> None:
    target, foreign = place.images / "model.sqsh", place.images / name
    foreign.write_text('{"my": "data"}')
    with pytest.raises(RunnerError, match="did not write it") as caught:
        place.bring("one", output=target, **options)
    assert name in caught.value.what and caught.value.fix
    assert foreign.read_text() == '{"my": "data"}' and not target.exists()
    project = Project(place.folder, place.folder, place.folder)
    with pytest.raises(RunnerError, match="did not write it"):
        explain_import(
            ImportRequest(f"oci:{place.folder}/one", place.images, project, {}, ImportOptions(output=target)), Quiet()
        )


def test_our_own_files_beside_the_output_are_replaced(place: Place) -> None:
    target = place.images / "model.sqsh"
    first = place.bring("one", output=target).squashfs
    assert place.bring("two", output=target).squashfs.content != first.content
    target.unlink()
    assert place.bring("one", output=target).squashfs.content == first.content
    with pytest.raises(RunnerError, match="did not write it"):
        place.bring("two", output=place.images / "model")  # its sidecar would be model.json too


def test_a_dry_run_reads_the_layers_that_it_does_not_reuse(place: Place) -> None:
    first = place.bring("one").squashfs.path

    def explained(name: str) -> tuple[str, ...]:
        project = Project(place.folder, place.folder, place.folder)
        source = f"oci:{place.folder / name}"
        return explain_import(ImportRequest(source, place.images, project, {}, ImportOptions()), Quiet())

    about, *rest = explained("one")
    assert "/one (2 layers, 0 MB, amd64)" in about and about.startswith("image:  ")
    assert rest == [f"reuses: {first} (the same content)", "writes: nothing"]
    assert explained("two")[1:3] == ("reads:  1 layer", f"reuses: 1 layer of {first.name}")


# other imports


def test_hidden_files_of_others_and_of_running_imports_stay(place: Place) -> None:
    """A left-over counts as such by the lock of the very target that its name tells, whatever the suffix."""
    running, dead = place.images / ".big.squashfs.abcd1234.import", place.images / ".big.sqsh.abcd1234.import"
    foreign = place.images / ".own.sqsh.abcd1234.import"
    for each in (running, dead, foreign):
        each.mkdir()
        (each / "squashfs").write_text("half")
    (foreign / "letter").write_text("precious")
    others = [".numbers.json.4711.partial", ".x.layers.8587.partial", ".notes.partial", ".cpu.sqsh.12.partial"]
    for name in others:
        (place.images / name).write_text("another program's")
    with files.locked(place.images / "big.squashfs"):
        place.bring("one", output=place.images / "one.squashfs")
        clear_leftovers(place.images, place.report)
    assert running.is_dir() and (running / "squashfs").exists()
    assert (foreign / "letter").exists() and not dead.exists()
    assert set(others) <= place.names()
    assert ".big.sqsh.lock" not in place.names() and ".own.sqsh.lock" not in place.names()
    clear_leftovers(place.images, place.report)
    assert not running.exists()


def test_whichever_sync_an_import_is_killed_at_the_next_one_leaves_no_other_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next import works, and beside what a whole import leaves there is nothing."""
    place.bring("one")
    wanted = place.names()
    sync, killed = files.sync, 0
    while True:
        child = os.fork()
        if child == 0:
            left = killed

            def killed_here(path: Path) -> None:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                sync(path)

            code = 1
            try:
                monkeypatch.setattr(files, "sync", killed_here)
                place.bring("one", again=True)
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == 9
        killed += 1
        place.bring("one", again=True)
        assert place.names() == wanted
    assert killed > 3


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_file_locks_an_import_works_and_warns(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Lustre without `-o flock`, NFS without lockd. Whose a left-over is cannot be known there: it stays."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    left = place.images / ".one.sqsh.abcd1234.import"
    left.mkdir()
    (place.images / ".one.sqsh.lock").touch()  # an import makes it before it knows that locks do not work
    monkeypatch.setattr(fcntl, "flock", refuse)
    imported = place.bring("one")
    assert imported.made and imported.squashfs.path.exists()
    assert place.said("does not support file locks")
    assert left.exists()


def test_an_error_of_the_lock_itself_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunnerError, match="cannot write") as caught:
        place.bring("one")
    assert caught.value.why == "Input/output error" and "message above" not in caught.value.fix


# the stable link


def source_of(place: Place, name: str, source: str, **labels: str) -> None:
    """Let the sidecar behind the link NAME.sqsh say that the image came from there."""
    path = (place.images / f"{name}.sqsh").resolve().with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": source, "labels": labels}))


def test_a_recipes_link_is_not_taken_over_by_another_image(place: Place) -> None:
    before = place.bring("one").squashfs.path
    source_of(place, "one", "one", **{"runner.recipe": "one"})
    layout(place.folder / "x/one", [tar([file("other")])])
    with pytest.raises(RunnerError, match="belongs to another image") as caught:
        place.bring("x/one")
    assert "recipe 'one'" in caught.value.why and "-o FILE" in caught.value.fix
    assert (place.images / "one.sqsh").resolve() == before
    (place.images / "one.sqsh").unlink()
    assert place.bring("x/one").squashfs.link == place.images / "one.sqsh"


def test_a_registrys_link_is_not_taken_over_by_another_registry(place: Place) -> None:
    layout(place.folder / "team+app+1", [tar(BASE)])
    place.bring("team+app+1")
    source_of(place, "team+app+1", "docker://nvcr.io#team/app:1")
    project, made = Project(place.folder, place.folder, place.folder), Made()
    with Hostile(made.serve) as server, pytest.raises(RunnerError, match="belongs to another image") as caught:
        source = f"docker://{server.address}#team/app:1"
        options = ImportOptions(architecture="amd64")
        import_image(ImportRequest(source, place.images, project, {"HOME": str(place.folder)}, options), Quiet())
    assert "nvcr.io" in caught.value.why


def test_a_newer_image_of_the_same_recipe_gets_the_link(place: Place) -> None:
    recipe = {"Labels": {"runner.recipe": "r"}}
    for number in ("1", "2"):
        layout(place.folder / number / "r", [tar([file(number)])], recipe)
        made = place.bring(f"{number}/r").squashfs
        assert (place.images / "r.sqsh").resolve() == made.path
    layout(place.folder / "3/r", [tar([file("3")])])
    with pytest.raises(RunnerError, match="belongs to another image"):
        place.bring("3/r")


def test_a_symlink_of_the_users_own_is_left_alone(place: Place) -> None:
    (place.images / "one.sqsh").symlink_to("../elsewhere.sqsh")
    with pytest.raises(RunnerError, match="did not create"):
        place.bring("one")
    assert (place.images / "one.sqsh").readlink() == Path("../elsewhere.sqsh")


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_or_a_symlink_is_no_file_to_write(place: Place, force: bool) -> None:
    out = place.folder / "out"
    (out / "folder").mkdir(parents=True)
    (out / "link.sqsh").symlink_to("elsewhere.sqsh")
    for name, words in (("folder", "folder is a folder"), ("link.sqsh", "is a symlink to elsewhere.sqsh")):
        with pytest.raises(RunnerError, match=words):
            place.bring("one", output=out / name, force=force, again=force)
    assert {path.name for path in out.iterdir()} == {"folder", "link.sqsh"}
    assert (out / "link.sqsh").readlink() == Path("elsewhere.sqsh")


def test_the_sites_striping_is_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = place.folder / "bin"
    programs.mkdir()
    calls = place.folder / "calls"
    made = ': > "$(eval echo \\${$#})"'
    (programs / "lfs").write_text(f'#!/bin/sh\necho "$*" >> {calls}\n[ $1 = getstripe ] || {made}\n')
    (programs / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    place.bring("one", striping="-c 8 -S 1M")
    assert calls.read_text().splitlines()[1].startswith("setstripe -c 8 -S 1M ")
