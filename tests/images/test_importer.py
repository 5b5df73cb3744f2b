"""runner-importer: what pyxis gets is whole, trusted and imported once, whoever else uses the folder or is killed."""

from __future__ import annotations

import errno
import io
import os
import pwd
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.images.importer import get as get_module
from runner.images.importer import importer as importer_module
from runner.images.importer import store as store_module
from runner.images.importer.get import Getter, read_settings
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.images.importer.store import Store
from runner.images.squashfs_file import is_whole, sidecar
from runner.machine import files, sessions
from runner.machine.report import Quiet
from runner.project import find_project
from tests.conftest import need
from tests.images.handmade import MANIFEST_TYPE, digest_of, file, make_config, make_manifest, tar
from tests.images.sources.hostile import Hostile, Request
from tests.images.test_import_shared import as_user
from tests.lab import parts
from tests.lab.ports import free_ports
from tests.lab.slurm import SlurmLab
from tests.waiting import until

TAG = "/v2/team/app/manifests/1"
PROGRAM = str(Path(sys.executable).parent / "runner-importer")


class Shelf:
    """A registry with the image team/app; its layers wait while the gate is closed."""

    def __init__(self) -> None:
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.layers: set[str] = set()
        self.announces: Callable[[bytes], str] = digest_of
        self.gate = threading.Event()
        self.gate.set()

    def put(self, tag: str, text: str, size: int = 0) -> str:
        """Push an image with one file; its digest."""
        layer = tar([file("text", text.encode()), file("filler", random.Random(text).randbytes(size))])
        config = make_config([layer])
        manifest = make_manifest(config, [layer])
        self.blobs |= {digest_of(data): data for data in (layer, config)}
        self.layers.add(digest_of(layer))
        self.manifests[tag] = self.manifests[digest_of(manifest)] = manifest
        return digest_of(manifest)

    def serve(self, request: Request) -> None:
        kind, name = (*request.path.removeprefix("/v2/team/app/").split("/"), "", "")[:2]
        if request.path == "/v2/":
            request.answer(200, b"{}")
        elif kind == "manifests" and name in self.manifests:
            manifest = self.manifests[name]
            digest = self.announces(manifest)
            request.answer(200, manifest, Content_Type=MANIFEST_TYPE, Docker_Content_Digest=digest)
        elif kind == "blobs" and name in self.blobs:
            if name in self.layers:
                self.gate.wait(120)
            request.blob(self.blobs[name])
        else:
            request.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}')


class Cluster:
    """A registry, a user's home with a configuration, and job steps."""

    def __init__(self, folder: Path, server: Hostile, shelf: Shelf) -> None:
        self.folder, self.server, self.shelf = folder, server, shelf
        self.store, self.other = folder / "store", folder / "other"
        self.image = f"docker://{server.address}#team/app:1"
        self.report = Quiet()
        self.environ = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        self.environ["TMPDIR"] = str(folder)
        self.configure(f"folders = ['{self.store}', '{self.other}']")

    def configure(self, text: str, path: str = ".config/runner/importer.toml") -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def getter(self, **environ: str) -> Getter:
        environ = self.environ | environ
        return Getter(read_settings(environ), environ, self.report, time.time())

    def get(self, **environ: str) -> Path:
        return self.getter(**environ).get(self.image)

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """The program itself, in its own process."""
        pipe = subprocess.PIPE
        return subprocess.Popen((PROGRAM, *words), env=self.environ | environ, stdout=pipe, stderr=pipe, text=True)

    def said(self, words: str) -> bool:
        return any(words in line for line in self.report.lines)

    def leases(self) -> list[str]:
        return sorted(path.name for path in (self.store / "leases").iterdir())

    def imports(self) -> int:
        """How often the start of a layer was fetched; a large one is fetched in parts."""
        asked = [seen for layer in self.shelf.layers for seen in self.server.asked(f"/v2/team/app/blobs/{layer}")]
        return sum(seen.span is None or seen.span[0] == 0 for seen in asked)

    def left_behind(self) -> list[str]:
        """What an import that has not ended well would leave."""
        names = [path.name for path in self.store.iterdir()]
        return [name for name in names if name.endswith((".import", ".importing", ".removing", ".partial"))]


@pytest.fixture
def server() -> Iterator[Hostile]:
    shelf = Shelf()
    shelf.put("1", "one")
    with Hostile(shelf.serve) as server:
        server.shelf = shelf  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def cluster(tmp_path: Path, server: Hostile, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(get_module, "SYSTEM", tmp_path / "etc.toml")
    return Cluster(tmp_path, server, server.shelf)  # type: ignore[attr-defined]


# get and release


def test_the_answer_is_one_path_on_stdout(cluster: Cluster) -> None:
    got = cluster.start("get", cluster.image)
    out, err = got.communicate(timeout=120)
    path = Path(out.removesuffix("\n"))
    assert got.returncode == 0 and path.parent == cluster.store and is_whole(path)
    assert "packing" in err and re.fullmatch(r"[0-9a-f]{32}\.sqsh", path.name) and not cluster.left_behind()
    assert cluster.store.stat().st_mode & 0o777 == 0o700


def test_a_second_get_asks_for_the_tag_and_nothing_else(cluster: Cluster) -> None:
    path = cluster.get()
    before = len(cluster.server.requests)
    assert cluster.get() == path
    asked = {(seen.method, seen.path) for seen in cluster.server.requests[before:]}
    assert asked == {("GET", "/v2/"), ("HEAD", TAG)}, "Docker Hub counts a GET as a pull"


def test_processes_of_one_node_that_began_before_the_answer_share_it(cluster: Cluster) -> None:
    """As the tasks of a step do; a process that begins later asks again, since the tag may have moved."""

    def questions() -> int:
        return sum(seen.method == "HEAD" for seen in cluster.server.asked(TAG))

    first, second = cluster.getter(), cluster.getter()
    path = first.get(cluster.image)
    before = questions()
    assert second.get(cluster.image) == path and questions() == before
    assert cluster.get() == path and questions() == before + 1
    assert sessions.began(os.getpid()) < first.began < time.time()


def test_an_answer_that_another_user_could_have_written_is_not_used(cluster: Cluster) -> None:
    place = cluster.folder / f"runner-importer-{os.geteuid()}"
    late = cluster.getter()
    path = cluster.get()
    (lock,) = place.glob(".*.lock")
    (place / lock.name[1:].removesuffix(".lock")).write_text("sha256:" + "0" * 64)
    place.chmod(0o777)
    assert late.get(cluster.image) == path and cluster.said(f"not using {place}")


def test_a_process_that_gets_no_answer_does_not_keep_the_others_waiting(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_module, "_TURN_SECONDS", 0.1)
    path = cluster.get()
    with ExitStack() as stack:
        for note in (cluster.folder / f"runner-importer-{os.geteuid()}").glob("[!.]*[!s]"):
            stack.enter_context(files.locked(note))
        assert cluster.get() == path


@pytest.mark.parametrize("announced", ["", "sha512:" + "a" * 128, "sha256:../../x"])
def test_a_registry_that_announces_no_digest_is_asked_for_the_manifest(cluster: Cluster, announced: str) -> None:
    path = cluster.get()
    cluster.shelf.announces = lambda _: announced
    before = len(cluster.server.requests)
    assert cluster.get() == path
    assert [seen.method for seen in cluster.server.requests[before:] if seen.path == TAG] == ["HEAD", "GET"]


def test_an_image_named_by_digest_needs_no_registry(cluster: Cluster) -> None:
    cluster.image += f"@{digest_of(cluster.shelf.manifests['1'])}"
    path, before = cluster.get(), len(cluster.server.requests)
    assert cluster.get() == path and len(cluster.server.requests) == before


def test_a_tag_that_has_moved_gives_the_new_image(cluster: Cluster) -> None:
    first = cluster.get()
    cluster.shelf.put("1", "two")
    second = cluster.get()
    assert first != second and first.exists() and is_whole(second)


def test_release_ends_the_leases_of_its_own_step_only(cluster: Cluster) -> None:
    """It may come twice, or without any `get`."""
    cluster.getter().release()
    cluster.get(SLURM_STEP_ID="1")
    cluster.get(SLURMD_NODENAME="nid001")  # pyxis' last release does not have this variable
    assert len(cluster.leases()) == 2
    for _ in range(2):
        cluster.getter().release()
        assert [name.split("+")[1:3] for name in cluster.leases()] == [["7", "1"]]


def test_outside_of_slurm_there_is_no_lease(cluster: Cluster) -> None:
    assert cluster.get(SLURM_JOB_ID="").exists() and cluster.leases() == []
    cluster.getter(SLURM_JOB_ID="").release()


def test_only_registries_are_read(cluster: Cluster) -> None:
    with pytest.raises(RunnerError, match="cannot get dockerd://app"):
        cluster.getter().get("dockerd://app")


def test_folders_are_safe_whatever_the_umask(cluster: Cluster) -> None:
    """With umask 002, which many systems set, a new folder could be written to by the user's group."""
    cluster.configure("folders = ['${HOME}/new/store']")
    before = os.umask(0o002)
    try:
        got = cluster.start("get", cluster.image)
    finally:
        os.umask(before)
    paths, _ = check([got])
    assert paths == {str(next((cluster.folder / "new/store").glob("*.sqsh")))}


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONHOME": "/opt/conda"}, {"PYTHONPATH": "{folder}"}, {"LD_LIBRARY_PATH": "{folder}"}],
    ids=lambda variables: next(iter(variables)),
)
def test_the_variables_of_the_job_do_not_reach_the_importers_python(
    cluster: Cluster, variables: dict[str, str]
) -> None:
    """Users set them for the program in their container."""
    for name in ("runner.py", "json.py", "typing.py", "libz.so.1", "libexpat.so.1", "libpython3.so"):
        (cluster.folder / name).write_text("raise SystemExit('a module of the user')")
    environ = {name: value.format(folder=cluster.folder) for name, value in variables.items()}
    paths, _ = check([cluster.start("get", cluster.image, **environ)])
    assert paths and cluster.start("release", **environ).wait(60) == 0


def test_the_importer_starts_through_a_link(cluster: Cluster) -> None:
    link = cluster.folder / "link"
    link.symlink_to(PROGRAM)
    shown = subprocess.run((link, "--help"), capture_output=True, text=True, env={"PATH": ""}, check=True)
    assert "usage: runner" in shown.stdout


def test_wrong_words_show_the_usage(cluster: Cluster) -> None:
    got = cluster.start("get")
    assert "runner-importer get IMAGE | release" in got.communicate(timeout=60)[1] and got.returncode == 2


# the configuration


def test_an_unknown_key_is_refused_with_a_suggestion(cluster: Cluster) -> None:
    cluster.configure("\nfolder = ['/x']")
    with pytest.raises(RunnerError, match=r"importer\.toml:2: unknown key 'folder'") as caught:
        cluster.get()
    assert "'folders'" in caught.value.fix


def test_a_limit_is_not_negative(cluster: Cluster) -> None:
    cluster.configure("limit_gb = -5")
    with pytest.raises(RunnerError, match=r"importer\.toml:1: limit_gb is -5"):
        cluster.get()


def test_a_user_does_not_name_shared_folders(cluster: Cluster) -> None:
    cluster.configure("shared = ['/x']")
    with pytest.raises(RunnerError, match="unknown key 'shared'"):
        cluster.get()


def test_the_user_narrows_the_allowed_registries_and_does_not_widen_them(cluster: Cluster) -> None:
    address = cluster.server.address
    for system, own, refused in (
        (f"['{address}']", f"['{address}/team']", False),
        (f"['{address}/tea']", f"['{address}']", True),
        (f"['{address}']", "['nvcr.io']", True),
        ("[]", f"['{address}']", True),
    ):
        cluster.configure(f"registries = {system}", "etc.toml")
        cluster.configure(f"folders = ['{cluster.store}']\nregistries = {own}")
        if refused:
            with pytest.raises(RunnerError, match="the importer does not accept"):
                cluster.get()
        else:
            assert cluster.get().exists()


def test_a_folder_with_a_variable_that_is_not_set_is_left_out(cluster: Cluster) -> None:
    cluster.configure("folders = ['${SCRATCH}/images', '${HOME}/mine']")
    path = cluster.get()
    assert path.parent == cluster.folder / "mine"
    path.unlink()
    assert cluster.get(SCRATCH=str(cluster.folder)).parent == cluster.folder / "images"


@pytest.mark.parametrize("name", ["HOME", "USER", "LOGNAME"])
def test_a_step_without_variables_has_those_of_the_password_database(cluster: Cluster, name: str) -> None:
    """srun --export=NONE, srun --export=FOO=1."""
    cluster.configure(f"folders = ['${{{name}}}/x']", "etc.toml")
    user = pwd.getpwuid(os.geteuid())
    for environ in ({}, {name: ""}):
        getter = replace(cluster.getter(XDG_CONFIG_HOME=str(cluster.folder)), environ=environ)
        assert getter._own_folders([]) == [Path("/", user.pw_dir if name == "HOME" else user.pw_name, "x")]


def test_the_error_names_the_folders_that_are_left_out(cluster: Cluster) -> None:
    cluster.configure("folders = ['${SCRATCH}/images', '/proc/images']")
    with pytest.raises(RunnerError, match="no folder can take") as caught:
        cluster.get()
    assert "${SCRATCH}/images: SCRATCH is not set\n/proc/images: " in caught.value.why


def test_the_error_says_how_to_make_a_folder_safe(cluster: Cluster) -> None:
    """Homes whose files the user's group may write to: umask 002."""
    cache = cluster.folder / ".cache"
    cache.mkdir()
    cache.chmod(0o775)
    cluster.configure("")
    with pytest.raises(RunnerError, match="no folder can take") as caught:
        cluster.get()
    assert f"its group may write to {cache} (to change that: chmod go-w {cache})" in caught.value.why
    cache.chmod(0o755)
    assert cluster.get().is_relative_to(cache)


def test_another_compression_is_another_file(cluster: Cluster) -> None:
    first = cluster.get()
    cluster.configure(f"folders = ['{cluster.store}']\ncompression = 'zstd:1'")
    assert cluster.get() != first


# registries that do not answer, and mirrors


def test_the_last_known_digest_serves_only_where_it_is_allowed(cluster: Cluster) -> None:
    path = cluster.get()
    cluster.server.__exit__(None, None, None)
    with pytest.raises(RunnerError, match="cannot reach"):
        cluster.get()
    cluster.configure(f"folders = ['{cluster.store}']\nlast_digest = true")
    assert cluster.get() == path and cluster.said("warning: ") and cluster.said("using the last known digest")


def test_a_registry_that_is_silent_gets_a_few_seconds_if_a_digest_is_known(cluster: Cluster) -> None:
    path = cluster.get()
    cluster.configure(f"folders = ['{cluster.store}']\nlast_digest = true")
    cluster.server.__exit__(None, None, None)
    host, _, port = cluster.server.address.rpartition(":")
    with socket.create_server((host, int(port))):  # it accepts connections, and never answers
        begun = time.monotonic()
        assert cluster.get() == path and cluster.said("using the last known digest")
        assert time.monotonic() - begun < 30, "the usual patience is 4 minutes"


def test_a_tag_that_is_gone_is_an_error_whatever_was_known(cluster: Cluster) -> None:
    cluster.configure(f"folders = ['{cluster.store}']\nlast_digest = true")
    cluster.get()
    del cluster.shelf.manifests["1"]
    with pytest.raises(RunnerError, match="does not exist"):
        cluster.get()


def test_a_mirror_is_asked_first_and_the_registry_if_it_fails(cluster: Cluster) -> None:
    name = f"folders = ['{cluster.store}']\n[mirrors]\n'registry.invalid' = "
    cluster.image = "docker://registry.invalid#app:1"
    cluster.configure(f"{name}'{cluster.server.address}/team'")
    path = cluster.get()
    assert is_whole(path) and not cluster.said("warning")
    cluster.image = f"docker://{cluster.server.address}#team/app:1"
    cluster.configure(name.replace("registry.invalid", cluster.server.address) + "'mirror.invalid'")
    assert cluster.get() == path and cluster.said("mirror.invalid")


def test_a_mirror_is_asked_first_for_a_digest_too(cluster: Cluster) -> None:
    digest = digest_of(cluster.shelf.manifests["1"])
    mirrors = f"folders = ['{cluster.store}']\n[mirrors]\n"
    cluster.configure(f"{mirrors}'registry.invalid' = '{cluster.server.address}/team'")
    for number, version in enumerate((f"@{digest}", f":1@{digest}"), 1):
        cluster.image = f"docker://registry.invalid#app{version}"
        path = cluster.get()
        assert is_whole(path) and not cluster.said("warning") and cluster.imports() == number
        path.unlink()
    cluster.configure(f"{mirrors}'{cluster.server.address}' = 'mirror.invalid'")
    cluster.image = f"docker://{cluster.server.address}#team/app@{digest}"
    assert cluster.get() == path and cluster.said("mirror.invalid") and cluster.imports() == 3


def test_one_digest_is_one_file_under_all_names(cluster: Cluster) -> None:
    path = cluster.get()
    cluster.shelf.manifests["same"] = cluster.shelf.manifests["1"]
    for version in (":same", f"@{digest_of(cluster.shelf.manifests['1'])}"):
        cluster.image = f"docker://{cluster.server.address}#team/app{version}"
        assert cluster.get() == path
    assert cluster.imports() == 1 and len(list(cluster.store.glob("*.sqsh"))) == 1


def test_the_nodes_of_a_step_share_the_digest_of_the_first(cluster: Cluster) -> None:
    """All get the same image, and the registry is not asked a thousand times; another step asks again."""
    nodes = [cluster.folder / f"node{number}" for number in range(3)]
    for node in nodes:
        node.mkdir()
    first = cluster.get(SLURM_STEP_NUM_NODES="3", TMPDIR=str(nodes[0]))
    before = len(cluster.server.requests)
    cluster.shelf.put("1", "two")
    for node in nodes[1:]:
        assert cluster.get(SLURM_STEP_NUM_NODES="3", TMPDIR=str(node)) == first
    assert len(cluster.server.requests) == before
    assert cluster.get(SLURM_STEP_NUM_NODES="3", SLURM_STEP_ID="1", TMPDIR=str(nodes[1])) != first
    cluster.getter(SLURM_STEP_NUM_NODES="3").release()
    assert cluster.get(SLURM_STEP_NUM_NODES="3", TMPDIR=str(nodes[2])) != first


def test_a_node_that_gets_no_digest_from_the_first_asks_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_module, "_TURN_SECONDS", 0.1)
    getter = cluster.getter(SLURM_STEP_NUM_NODES="2")
    note = cluster.store / f"digests/x+{getter._start()}"
    cluster.store.mkdir()
    assert get_module._from_another_node(note) == "", "this is the first, which asks"
    assert get_module._from_another_node(note) == "", "the first has been killed"
    note.write_text("sha256:1")
    assert get_module._from_another_node(note) == "sha256:1"


# traces


def test_a_trace_in_the_folder_decides_what_is_read_ahead(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = cluster.get(), []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *place: ahead.append(place[:2]))
    assert cluster.get() == plain and ahead == []
    (cluster.store / "traces").mkdir()
    (cluster.store / "traces/team+app+1.trace").write_text("/text\n")
    hot = cluster.get()
    assert hot != plain and is_whole(hot) and len(ahead) == 1
    assert sum(ahead[0]) == hot.stat().st_size - 4096
    assert cluster.get() == hot and len(ahead) == 2 and cluster.imports() == 1, "the layer is copied"
    (cluster.store / "traces").chmod(0o777)
    assert cluster.get() == plain, "other users could have written the trace"


# folders


def test_a_full_folder_is_not_tried_by_each_waiting_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import goes to the next folder. The others wait for it there, also those that waited here."""
    whole, tried = importer_module.import_image, []
    begun, last = threading.Event(), threading.Event()
    monkeypatch.setattr(store_module, "_MORE_BYTES", 1 << 60)

    def import_image(request: object, report: object) -> object:
        tried.append(request.images)  # type: ignore[attr-defined]
        if request.images == cluster.store:  # type: ignore[attr-defined]
            begun.set()
            last.wait(60)
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise files.explain(error, "write it") from error
        return whole(request, report)  # type: ignore[arg-type]

    monkeypatch.setattr(importer_module, "import_image", import_image)
    got: list[Path] = []
    getting = [threading.Thread(target=lambda: got.append(cluster.get())) for _ in range(5)]
    getting[0].start()
    assert begun.wait(60)
    for each in getting[1:]:
        each.start()
    until(lambda: cluster.said("waiting for the import"), "a process that waits")
    last.set()
    for each in getting:
        each.join(120)
    assert len(got) == 5 and {path.parent for path in got} == {cluster.other}
    assert tried == [cluster.store, cluster.other]
    got[0].unlink()
    assert cluster.get() == got[0] and tried[2:] == [cluster.other], "nor by the next one"


def test_a_folder_with_less_room_than_the_layers_need_is_left_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.shelf.put("1", "large", 300_000)
    real = os.statvfs

    def statvfs(path: Any) -> Any:
        fields = list(real(path))
        fields[4] = 1 if Path(path) == cluster.store else fields[4]  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert cluster.get().parent == cluster.other and cluster.imports() == 1


def test_a_file_of_logins_that_cannot_be_read_is_not_a_fault_of_the_folder(cluster: Cluster) -> None:
    error = RunnerError("cannot read the logins", "x", "")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied", str(cluster.folder / "auth.json"))
    assert not Store(cluster.store, 0).is_fault(error)
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied", str(cluster.store / "x"))
    assert Store(cluster.store, 0).is_fault(error)


def test_a_folder_that_cannot_take_the_image_gives_way_to_the_next(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, full = importer_module.import_image, {cluster.store}

    def import_image(request: object, report: object) -> object:
        if request.images in full:  # type: ignore[attr-defined]
            error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            raise files.explain(error, "write it") from error
        return whole(request, report)  # type: ignore[arg-type]

    monkeypatch.setattr(importer_module, "import_image", import_image)
    path = cluster.get()
    assert path.parent == cluster.other and cluster.said("Disk quota exceeded") and not cluster.left_behind()
    assert cluster.get() == path
    path.unlink()
    full.add(cluster.other)
    with pytest.raises(RunnerError, match="no folder can take") as caught:
        cluster.get()
    assert str(cluster.store) in caught.value.why and str(cluster.other) in caught.value.why


def test_a_folder_that_cannot_be_made_gives_way_to_the_next(cluster: Cluster) -> None:
    cluster.store.write_text("a file")
    assert cluster.get().parent == cluster.other and cluster.said(f"not using {cluster.store}")


def test_a_damaged_file_is_imported_again(cluster: Cluster) -> None:
    path = cluster.get()
    os.truncate(path, 100)
    assert cluster.get() == path and is_whole(path) and cluster.imports() == 2


def test_a_damaged_sidecar_does_not_stop_the_import(cluster: Cluster) -> None:
    path = cluster.get()
    sidecar(path).write_text("x\n")
    assert cluster.get() == path and cluster.imports() == 2 and cluster.get() == path


# whose files are used


def _link(path: Path) -> None:
    path.rename(path.parent / "moved")
    path.symlink_to("moved")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o664),
        lambda path: path.chmod(0o646),
        lambda path: sidecar(path).chmod(0o664),
        _link,
    ],
    ids=["group", "others", "sidecar", "link"],
)
def test_a_file_that_others_could_have_written_is_not_used(cluster: Cluster, spoil: Callable[[Path], None]) -> None:
    path = cluster.get()
    spoil(path)
    assert Store(cluster.store, os.geteuid()).take(path.name, "") is None


def test_a_folder_that_others_may_write_to_is_not_used(cluster: Cluster) -> None:
    """Nor one below it: who may write to a folder can replace what is in it."""
    cluster.store = cluster.folder / "open/store"
    cluster.configure(f"folders = ['{cluster.store}', '{cluster.other}']")
    first = cluster.get()
    assert first.parent == cluster.store
    cluster.store.parent.chmod(0o770)
    assert cluster.get().parent == cluster.other and cluster.said("may write to")


def test_a_link_in_a_folder_of_others_is_not_followed(cluster: Cluster) -> None:
    """The folder that it leads to may be safe; where it leads is not."""
    cluster.store.mkdir()
    (cluster.folder / "open").mkdir()
    (cluster.folder / "open/link").symlink_to(cluster.store)
    (cluster.folder / "start").symlink_to("open/link")
    cluster.configure(f"folders = ['{cluster.folder}/start']")
    assert cluster.get().parent == cluster.folder / "start"
    (cluster.folder / "open").chmod(0o777)
    with pytest.raises(RunnerError, match="no folder can take"):
        cluster.get()


@pytest.fixture
def two_users(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose folder all users may read; `daemon` fills the shared folder, and `nobody` is a user."""
    if os.geteuid() != 0:
        pytest.skip("only root may act as two users")
    cluster.get()  # what is imported late is imported as root
    cluster.folder = Path(tempfile.mkdtemp(prefix="runner-importer-"))
    cluster.folder.chmod(0o755)
    cluster.store = cluster.folder / "shared"
    for name, user in (("shared", "daemon"), ("home", "nobody")):
        (cluster.folder / name).mkdir()
        shutil.chown(cluster.folder / name, user)
    get_module.SYSTEM = cluster.folder / "etc.toml"
    owner = (cluster.folder / "shared").stat().st_uid
    cluster.configure(f"shared = ['{cluster.store}']\nshared_owner = {owner}", "etc.toml")
    cluster.environ |= {"HOME": str(cluster.folder / "home")}
    cluster.configure(f"{cluster.image}\n", "list")
    yield cluster
    shutil.rmtree(cluster.folder)


def sync(cluster: Cluster) -> list[str]:
    return as_user("daemon", lambda: [str(path) for path in cluster.getter().sync(cluster.folder / "list")])


def get_as(cluster: Cluster, user: str = "nobody") -> str:
    return as_user(user, lambda: str(cluster.get()))


def test_users_get_what_the_administrator_has_imported(two_users: Cluster) -> None:
    (path,) = sync(two_users)
    before = two_users.imports()
    assert get_as(two_users) == path and two_users.imports() == before
    assert len(two_users.leases()) == 1
    as_user("nobody", lambda: two_users.getter().release())
    assert two_users.leases() == []


def test_sync_removes_what_is_not_listed_and_no_job_uses(two_users: Cluster) -> None:
    (path,) = sync(two_users)
    get_as(two_users)
    two_users.shelf.put("2", "two")
    two_users.configure(two_users.image.replace("app:1", "app:2"), "list")
    os.utime(sidecar(Path(path)), (0, 0))
    sync(two_users)
    assert Path(path).exists(), "a job has a lease"
    as_user("nobody", lambda: two_users.getter().release())
    os.utime(sidecar(Path(path)), (0, 0))
    (other,) = sync(two_users)
    assert not Path(path).exists() and [str(each) for each in two_users.store.glob("*.sqsh")] == [other]


def test_only_its_owner_fills_the_shared_folder(two_users: Cluster) -> None:
    with pytest.raises(RunnerError, match="cannot fill a shared folder"):
        as_user("nobody", lambda: [str(path) for path in two_users.getter().sync(two_users.folder / "list")])


def test_a_list_that_cannot_be_read_removes_nothing(two_users: Cluster) -> None:
    (path,) = sync(two_users)
    os.utime(sidecar(Path(path)), (0, 0))
    (two_users.folder / "list").unlink()
    with pytest.raises(RunnerError, match="cannot read"):
        sync(two_users)
    two_users.folder.chmod(0o777)
    with pytest.raises(RunnerError, match="cannot fill a shared folder"):
        sync(two_users)
    assert Path(path).exists()


def test_a_bad_line_stops_no_other_line_and_keeps_all_images(two_users: Cluster) -> None:
    """An unknown tag; a registry that is down."""
    (path,) = sync(two_users)
    os.utime(sidecar(Path(path)), (0, 0))
    two_users.shelf.put("2", "two")
    down = f"docker://localhost:{free_ports(1)[0]}#app:1"
    other = two_users.image.replace("app:1", "app:2")
    two_users.configure(f"{two_users.image}0\n{down}\n{other}\n", "list")
    with pytest.raises(RunnerError, match=f"could not import 2 of the images in {two_users.folder}/list") as caught:
        sync(two_users)
    assert f"{two_users.image}0\n{down}" in caught.value.why
    assert len(list(two_users.store.glob("*.sqsh"))) == 2 and Path(path).exists()


def test_another_users_folder_is_never_used(two_users: Cluster) -> None:
    """As the user's own, as the shared one, or with one file of another user in it."""
    path = Path(sync(two_users)[0])
    two_users.configure(f"folders = ['{two_users.store}']", "home/.config/runner/importer.toml")
    (two_users.folder / "etc.toml").unlink()
    with pytest.raises(RunnerError, match="no folder can take"):
        get_as(two_users)
    owner = two_users.store.stat().st_uid
    two_users.configure(f"shared = ['{two_users.store}']\nshared_owner = {owner + 1}", "etc.toml")
    two_users.configure("", "home/.config/runner/importer.toml")
    assert Path(get_as(two_users)).parent != two_users.store
    two_users.configure(f"shared = ['{two_users.store}']\nshared_owner = {owner}", "etc.toml")
    assert get_as(two_users) == str(path)
    shutil.chown(path, "nobody")
    assert Path(get_as(two_users)).parent != two_users.store


def test_a_lease_is_a_new_file_of_a_name_that_nobody_foresees(
    two_users: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users may write to the folder of the leases: a link there, or a FIFO, is neither followed nor opened."""
    sync(two_users)
    for user in ("nobody", "nobody", "daemon"):
        get_as(two_users, user)
    assert len({name.split("+")[4] for name in two_users.leases()}) == 3
    name = Path(sync(two_users)[0]).name
    victim = two_users.folder / "victim"
    taken = two_users.store / f"leases/+7+0+x+{os.geteuid()}-{bytes(8).hex()}+{name.removesuffix('.sqsh')}"
    monkeypatch.setattr(os, "urandom", bytes)
    store = Store(two_users.store, two_users.store.stat().st_uid)
    for spoil in (lambda: taken.symlink_to(victim), lambda: os.mkfifo(taken)):
        spoil()
        assert store.take(name, "+7+0+x") and not victim.exists()
        taken.unlink()


# what is removed


@pytest.fixture
def three(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, list[Path]]:
    """Three images, the first used longest ago; squeue lists job 8."""
    (cluster.folder / "squeue").write_text("#!/bin/sh\necho 8\n")
    (cluster.folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{cluster.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
    paths = []
    for number in "123":
        cluster.shelf.put("1", number, 300_000)
        paths.append(cluster.get(SLURM_JOB_ID=""))
        os.utime(sidecar(paths[-1]), (int(number), int(number)))
    return cluster, paths


def lease_of(path: Path, job: str) -> Path:
    """The lease of another process."""
    lease = path.parent / f"leases/{job}+0+n+{os.geteuid()}-1f+{path.stem}"
    lease.touch()
    return lease


def collect(cluster: Cluster, limit: int, *keep: Path) -> list[Path]:
    return list(Store(cluster.store, os.geteuid()).collect(limit, {path.name for path in keep}))


def test_the_least_recently_used_files_go_until_the_limit_holds(three: tuple[Cluster, list[Path]]) -> None:
    cluster, (first, second, third) = three
    assert collect(cluster, 10**9) == []
    assert collect(cluster, second.stat().st_size + third.stat().st_size) == [first]
    assert collect(cluster, 0, second) == [third] and second.exists()
    assert {path.suffix for path in cluster.store.iterdir() if path.is_file()} <= {".sqsh", ".json", ".layers", ".lock"}


def test_what_has_just_been_used_stays(three: tuple[Cluster, list[Path]]) -> None:
    cluster, (first, second, third) = three
    cluster.shelf.put("1", "2", 300_000)
    assert cluster.get(SLURM_JOB_ID="") == second
    assert collect(cluster, 0) == [first, third]


def test_leases_of_jobs_that_squeue_lists_count_and_others_when_young(three: tuple[Cluster, list[Path]]) -> None:
    cluster, paths = three
    leases = [lease_of(path, f"lab+{job}") for job, path in zip("789", paths, strict=True)]
    assert collect(cluster, 0) == []
    for lease in leases:
        os.utime(lease, (0, 0))
    assert collect(cluster, 0) == [paths[0], paths[2]] and [lease.exists() for lease in leases] == [False, True, False]


def test_leases_of_other_clusters_count_for_a_week(three: tuple[Cluster, list[Path]]) -> None:
    """squeue does not know their jobs; and none, if it does not answer."""
    cluster, paths = three
    lease = lease_of(paths[0], "far+5")
    os.utime(lease, (time.time() - 6 * 86400,) * 2)
    assert collect(cluster, 0) == paths[1:]
    os.utime(lease, (time.time() - 8 * 86400,) * 2)
    assert collect(cluster, 0) == paths[:1]


def test_the_limit_of_the_configuration_is_kept(three: tuple[Cluster, list[Path]]) -> None:
    cluster, paths = three
    cluster.configure(f"folders = ['{cluster.store}']\nlimit_gb = 1")
    cluster.shelf.put("1", "four")
    for path in paths:
        os.truncate(path, 4 * 10**8)
        text = sidecar(path).read_text()
        size = next(line for line in text.splitlines() if "size_bytes" in line)
        sidecar(path).write_text(text.replace(size, f'  "size_bytes": {4 * 10**8},'))
        os.utime(sidecar(path), (paths.index(path),) * 2)
    last = cluster.get()
    assert [path.exists() for path in (*paths, last)] == [False, True, True, True]


def test_two_processes_that_remove_files_do_not_disturb_each_other(three: tuple[Cluster, list[Path]]) -> None:
    cluster, (first, second, third) = three
    removing = Store(cluster.store, os.geteuid()).collect(0, set())
    assert next(removing) == first
    second.unlink()
    assert list(removing) == [] and third.exists()
    assert collect(cluster, 0) == [third]


def test_a_file_that_a_start_takes_while_it_is_about_to_be_removed_stays(
    three: tuple[Cluster, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path exists all the time. If the lease comes too late, the start gets no path."""
    cluster, (first, second, _) = three
    store, used, taken = Store(cluster.store, os.geteuid()), Store._is_used, dict[Path, Path | None]()

    def start(path: Path) -> None:
        taken[path] = store.take(path.name, "lab+8+0+n")

    def is_used(self: Store, path: Path, jobs: Any) -> bool:
        if path == first and (mark := path.with_name(f".{path.name}.removing")).exists():
            begun.start()
            until(lambda: len(list(cluster.store.glob(f"leases/lab+8*{path.stem}"))) == 1)
            assert path.exists() and mark.exists()
        return used(self, path, jobs)

    begun = threading.Thread(target=start, args=(first,))
    monkeypatch.setattr(Store, "_is_used", is_used)
    assert collect(cluster, 0, cluster.store / "none") != [] and first.exists() and not second.exists()
    begun.join()
    start(second)
    assert taken == {first: first, second: None}


def test_a_mark_that_a_killed_process_left_keeps_a_start_waiting_only_for_a_moment(
    three: tuple[Cluster, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, (first, *_) = three
    monkeypatch.setattr(store_module, "_REMOVAL_SECONDS", 0)
    mark = first.with_name(f".{first.name}.removing")
    mark.touch()
    assert Store(cluster.store, os.geteuid()).take(first.name, "") == first and not mark.exists()


def test_files_of_runner_import_stay(three: tuple[Cluster, list[Path]]) -> None:
    """With a stable link, and with a name that the user chose."""
    cluster, paths = three
    project = find_project(cluster.folder)
    for options in (ImportOptions(output=cluster.store / "mine.sqsh"), ImportOptions()):
        request = ImportRequest(cluster.image, cluster.store, project, cluster.environ, options)
        paths.append(importer_module.import_image(request, cluster.report).squashfs.path)
        os.utime(sidecar(paths[-1]), (0, 0))
    assert collect(cluster, 0) == paths[:3] and all(path.exists() for path in paths[3:])


def test_all_jobs_count_whatever_squeue_hides(three: tuple[Cluster, list[Path]]) -> None:
    """Those in hidden partitions; those that the user's SQUEUE_* variables leave out."""
    cluster, paths = three
    squeue = '#!/bin/sh\ncase "$* $SQUEUE_STATES" in *--all*PENDING*) ;; *--all*) echo 8 ;; esac\n'
    (cluster.folder / "squeue").write_text(squeue)
    os.utime(lease_of(paths[0], "lab+8"), (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SQUEUE_STATES", "PENDING")
        assert collect(cluster, 0) == paths[1:]


def test_a_lease_of_a_user_whose_jobs_slurm_does_not_show_counts_for_a_week(
    three: tuple[Cluster, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, paths = three
    (cluster.folder / "scontrol").write_text("#!/bin/sh\necho 'PrivateData             = jobs,usage'\n")
    (cluster.folder / "scontrol").chmod(0o755)
    for path in paths[:2]:
        os.utime(lease_of(path, "lab+7"), (time.time() - 86400,) * 2)
    owner = os.geteuid()
    os.chown(lease_of(paths[1], "lab+6"), owner + 1, -1) if owner == 0 else None
    os.utime(lease_of(paths[1], "lab+6"), (time.time() - 86400,) * 2)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    running = store_module._running_jobs()
    assert running and running.of_all_users == (owner == 0)
    monkeypatch.setattr(store_module, "_running_jobs", lambda: store_module._Jobs(frozenset(), False))
    kept = [paths[1]] if owner == 0 else []
    assert collect(cluster, 0) == [path for path in paths if path not in kept]


# one import, also if its process is killed


def check(processes: list[subprocess.Popen[str]]) -> tuple[set[str], str]:
    """The answers of processes that all end well, and what they said."""
    told = [each.communicate(timeout=300) for each in processes]
    assert [each.returncode for each in processes] == [0] * len(processes), told
    return {out.strip() for out, _ in told}, "".join(err for _, err in told)


def test_simultaneous_gets_make_one_import(cluster: Cluster) -> None:
    """The others wait, and say for whom."""
    cluster.shelf.gate.clear()
    first = cluster.start("get", cluster.image)
    until(cluster.imports, "the first import")
    others = [cluster.start("get", cluster.image) for _ in range(5)]
    claim = next(cluster.store.glob(".*.importing")).read_text()
    assert claim.startswith(f"{os.uname().nodename}, process {first.pid}, job 7, since ")
    for each in others:
        assert each.stderr and any(line.endswith(f"by {claim}\n") for line in each.stderr)
    cluster.shelf.gate.set()
    paths, _ = check([first, *others])
    assert len(paths) == 1 and cluster.imports() == 1 and not cluster.left_behind()


def kill_and_go_on(cluster: Cluster, kills: int, when: Callable[[subprocess.Popen[str]], None]) -> None:
    """Kill the importing process that often, while another one waits; then let the last one end."""
    waiting = cluster.start("get", cluster.image)
    for _ in range(kills):
        importing = waiting
        when(importing)
        asked = len(cluster.server.asked(TAG))
        waiting = cluster.start("get", cluster.image)
        until(lambda before=asked: len(cluster.server.asked(TAG)) > before, "the next process")
        importing.kill()
        importing.communicate()
    cluster.shelf.gate.set()
    (path,), _ = check([waiting])
    assert is_whole(Path(path)) and not cluster.left_behind()
    assert subprocess.run(("unsquashfs", "-cat", path, "text"), capture_output=True, check=True).stdout == b"one"


def test_a_killed_import_is_taken_over_at_once(cluster: Cluster) -> None:
    need("unsquashfs")
    cluster.shelf.gate.clear()
    imports = 0

    def fetching(process: subprocess.Popen[str]) -> None:
        nonlocal imports
        imports += 1
        until(lambda: cluster.imports() >= imports, "the import")

    before = time.monotonic()
    kill_and_go_on(cluster, 3, fetching)
    assert time.monotonic() - before < 60 and cluster.imports() == 4


def test_an_import_that_is_cancelled_leaves_nothing(cluster: Cluster) -> None:
    """scancel: SIGTERM. The next node does not wait for the claim."""
    cluster.shelf.gate.clear()
    importing = cluster.start("get", cluster.image)
    until(cluster.imports, "the import")
    importing.terminate()
    cluster.shelf.gate.set()
    importing.communicate(timeout=60)
    assert importing.returncode == 143 and not cluster.left_behind()


def test_what_killed_imports_left_behind_goes_without_locks_too(cluster: Cluster) -> None:
    path = cluster.get()
    folders = [cluster.store / f".{name}.sqsh.0123abcd.import" for name in ("dead", "live", "new")]
    for folder in folders:
        folder.mkdir()
        (folder / "squashfs").write_text("half")
    (cluster.store / ".live.sqsh.importing").write_text("far, process 1")
    for folder in folders[:2]:
        os.utime(folder / "squashfs", (0, 0))
        os.utime(folder, (0, 0))
    collect(cluster, 10**9)
    assert [folder.exists() for folder in folders] == [False, True, True] and path.exists()


def test_a_process_that_waits_rarely_looks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes look at one folder. While another process holds the claim, nobody tries to make one."""
    path = cluster.get()
    hidden = path.rename(path.parent / "hidden")
    claim = cluster.store / f".{path.name}.importing"
    claim.write_text("far, process 1, job 1, since 2026-01-01 00:00:00")
    clock, opened, pauses = [0.0], list[str](), list[float]()
    whole = Path.open

    def open_path(path: Path, mode: str = "r", **options: Any) -> Any:
        opened.append(mode if path == claim else "")
        return whole(path, mode, **options)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds
        os.utime(claim, (clock[0], clock[0]))
        if clock[0] > 60:
            hidden.rename(path)

    monkeypatch.setattr(Path, "open", open_path)
    # of the store alone: a thread of another test may sleep too
    ours = SimpleNamespace(**{**vars(time), "sleep": sleep, "monotonic": lambda: clock[0]})
    monkeypatch.setattr(store_module, "time", ours)
    assert cluster.get() == path
    assert "x" not in opened and opened.count("r") == len(pauses) < 150
    assert max(pauses) <= 1.0 and len({round(pause, 3) for pause in pauses[-20:]}) > 5


def test_a_claim_that_nobody_touches_is_taken_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of another host has ended, or its host has: locks say nothing there."""
    monkeypatch.setattr(store_module, "_DEAD_SECONDS", 0.3)
    path = cluster.get()
    path.unlink()
    claim = cluster.store / f".{path.name}.importing"
    claim.write_text("far, process 1, job 1, since 2026-01-01 00:00:00")
    assert cluster.get() == path and not cluster.left_behind()
    assert cluster.said("waiting for the import of this image by far, process 1, job 1, since 2026-01-01 00:00:00")


def test_a_claim_that_is_touched_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without any locks, and however far the clocks of the hosts are apart."""
    monkeypatch.setattr(store_module, "_DEAD_SECONDS", 1.0)
    path = cluster.get()
    hidden = path.rename(path.parent / "hidden")
    claim = cluster.store / f".{path.name}.importing"
    claim.write_text("far, process 1, job 1, since 2026-01-01 00:00:00")
    done = threading.Event()
    got: list[Path] = []
    waiting = threading.Thread(target=lambda: got.append(cluster.get()))
    waiting.start()

    def touch() -> None:
        moment = 0
        while not done.is_set():
            moment += 1
            os.utime(claim, (moment, moment))
            done.wait(0.05)

    touching = threading.Thread(target=touch)
    touching.start()
    waiting.join(2.5)
    assert waiting.is_alive() and not got
    hidden.rename(path)
    waiting.join(60)
    done.set()
    touching.join()
    assert got == [path] and claim.exists() and cluster.imports() == 1


def test_a_process_that_was_too_slow_uses_the_file_of_the_one_that_took_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cluster.get()
    path.unlink()
    whole = importer_module.import_image

    def import_image(request: object, report: object) -> object:
        claim = cluster.store / f".{path.name}.importing"
        claim.write_text("far, process 1, job 1, since 2026-01-01 00:00:00")
        whole(request, report)  # type: ignore[arg-type]
        claim.unlink()
        raise RunnerError("cannot write it", "its folder is gone", "")

    monkeypatch.setattr(importer_module, "import_image", import_image)
    assert cluster.get() == path


def test_a_disk_that_is_too_full_for_the_claim_keeps_no_claim(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each later process would wait for it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(io.StringIO):
        def flush(self) -> None:
            raise full

        def fileno(self) -> int:
            raise full

    whole = Path.open

    def open_path(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "x" and path.parent == cluster.store:
            whole(path, mode).close()
            return Full()
        return whole(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_path)
    assert cluster.get().parent == cluster.other and not cluster.left_behind()


def test_an_import_that_fails_does_so_for_all(cluster: Cluster) -> None:
    cluster.shelf.blobs.clear()
    for _ in range(2):
        with pytest.raises(RunnerError, match="incomplete"):
            cluster.get()
        assert not cluster.left_behind()


@pytest.mark.slow
def test_fifty_kills(cluster: Cluster) -> None:
    """Each at any moment of the import; the next process succeeds each time, and no broken file is ever seen."""
    need("unsquashfs")
    cluster.shelf.put("1", "one", 60_000_000)
    chance, killed = random.Random(17), 0
    while killed < 50:
        importing = cluster.start("get", cluster.image)
        until(lambda held=importing: held.poll() is not None or list(cluster.store.glob(".*.importing")), "a claim")
        time.sleep(chance.random() * 0.5)
        importing.kill()
        importing.communicate()
        killed += importing.returncode != 0  # one that was too fast does not count
        for path in cluster.store.glob("*.sqsh"):
            assert is_whole(path)
        (path,), _ = check([cluster.start("get", cluster.image)])
        assert subprocess.run(("unsquashfs", "-cat", path, "text"), capture_output=True, check=True).stdout == b"one"
        # a process that was killed after the file was whole leaves its claim, which the next import takes over
        assert all(name.endswith(".importing") for name in cluster.left_behind())
        for each in cluster.store.glob("*.sqsh"):
            each.unlink()


@pytest.mark.slow
def test_sixty_four_gets_on_three_nodes(cluster: Cluster) -> None:
    """One import, one file. docs/benchmarks.md has the seconds; this prints them, and no test depends on them."""
    need(*parts.SLURM)
    cluster.shelf.put("1", "one", 60_000_000)
    timed = 'from=$(date +%s.%N); "$@" >/dev/null || exit; echo "$from $(date +%s.%N)"'

    with SlurmLab(plugins=()) as lab:

        def medians(*words: str, processes: int = 64) -> float:
            """The median of the seconds from the first start to the end of each process."""
            srun = (
                "srun",
                f"-N{min(processes, 3)}",
                f"-n{processes}",
                "--overcommit",
                "--mem=0",
                "sh",
                "-c",
                timed,
                "sh",
                PROGRAM,
            )
            lines = lab.run(("env", f"HOME={cluster.folder}", *srun, *words)).stdout.split("\n")
            times = [tuple(map(float, line.split())) for line in lines if line]
            assert len(times) == processes
            return statistics.median(end for _, end in times) - min(start for start, _ in times)

        medians("--help")
        bare = medians("--help")
        got = medians("get", cluster.image)
        again = medians("get", cluster.image)
        assert cluster.imports() == 1 and len(list(cluster.store.glob("*.sqsh"))) == 1 and not cluster.left_behind()
        cluster.shelf.put("2", "two", 60_000_000)
        one = medians("get", f"{cluster.image[:-1]}2", processes=1)
    print(f"64 bare starts {bare:.2f} s, 64 gets {got:.2f} s, again {again:.2f} s; one get with an import {one:.2f} s")
