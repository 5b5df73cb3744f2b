"""import: one whole file, or the old one, or none; whatever is killed, raced, full or foreign."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.squashfs_file import (
    Squashfs,
    as_json,
    find_squashfs,
    list_squashfs,
    read_squashfs,
    recorded_labels,
)
from runner.machine import files, folders
from tests.images.bench import TINY, Bench, content, listing, sidecar
from tests.lab.registry import Registry
from tests.schemas import check
from tests.waiting import until

pytestmark = pytest.mark.uses("podman", "tar2sqfs", "unsquashfs", "busybox")


@pytest.fixture
def tiny(bench: Bench) -> Bench:
    """A bench whose recipe `tiny` is built."""
    bench.write("tiny")
    bench.build("tiny")
    return bench


@pytest.fixture
def heavy(bench: Bench) -> Bench:
    """A bench with an image of 40 MB that does not compress: its import takes a moment."""
    (bench.root / "containers/noise").write_bytes(random.Random(7).randbytes(40_000_000))
    bench.write("heavy", "FROM scratch\nCOPY containers/noise /noise\nENV A=b\n")
    text = (bench.root / "containers/heavy.toml").read_text().replace("busybox", "noise")
    (bench.root / "containers/heavy.toml").write_text(text)
    bench.build("heavy")
    return bench


def files_of(path: Path, name: str) -> list[str]:
    """What an import leaves in the image folder."""
    return sorted([path.name, path.with_suffix(".json").name, path.with_suffix(".layers").name, f"{name}.sqsh"])


def test_a_recipes_image_becomes_a_file_a_link_and_a_sidecar(tiny: Bench) -> None:
    squashfs = tiny.import_image("tiny")
    assert squashfs.path.parent == tiny.images
    assert tiny.files() == files_of(squashfs.path, "tiny")
    assert (tiny.images / "tiny.sqsh").readlink() == Path(squashfs.path.name)
    told = sidecar(squashfs.path)
    assert (
        told["sha256"]
        == subprocess.run(("sha256sum", str(squashfs.path)), text=True, capture_output=True, check=True).stdout.split()[
            0
        ]
    )
    assert told["size_bytes"] == squashfs.path.stat().st_size
    assert (told["source"], told["compression"]) == ("tiny", "lz4")
    assert find_squashfs(tiny.images / "tiny.sqsh") == find_squashfs(squashfs.path) == squashfs
    assert squashfs.labels["runner.recipe"] == "tiny" and len(squashfs.labels["runner.content"]) == 12
    assert squashfs.path.stat().st_mode & 0o777 == 0o644
    assert tiny.left_containers() == ""


def test_a_sidecar_keeps_only_what_tells_of_the_making(tmp_path: Path) -> None:
    """Labels of the base's own stay out; a sidecar of an older version has none, one with anything else is damaged."""
    labels = {"runner.recipe": "a", "org.opencontainers.image.base.digest": "sha256:0", "maintainer": "x",
              "org.opencontainers.image.version": "22.04"}  # fmt: skip
    kept = recorded_labels(labels)
    assert kept == {"org.opencontainers.image.base.digest": "sha256:0", "runner.recipe": "a"}
    path = tmp_path / "a-1.sqsh"
    path.write_bytes(b"hsqs")
    squashfs = Squashfs(path, tmp_path / "a.sqsh", "0" * 64, "0" * 64, 4, "amd64", labels=kept)
    path.with_suffix(".json").write_text(as_json(squashfs))
    assert read_squashfs(path) == squashfs
    told = sidecar(path)
    del told["labels"]
    path.with_suffix(".json").write_text(json.dumps(told))
    older = read_squashfs(path)
    assert older is not None and older.labels == {}
    path.with_suffix(".json").write_text(json.dumps({**told, "labels": 3}))
    assert read_squashfs(path) is None


def test_the_file_holds_the_tree_and_enroots_four_files(tiny: Bench) -> None:
    squashfs = tiny.import_image("tiny")
    found = listing(squashfs.path)
    assert found["bin/busybox"].startswith("-rwxr-xr-x root/root")
    assert content(squashfs.path, "etc/environment") == "PATH=/bin\nGREETING=hello there\n"
    assert "cd -- '/srv'" in content(squashfs.path, "etc/rc")
    assert {"etc/rc.local", "etc/fstab"} <= set(found)
    assert not [name for name in found if name.startswith("dev/")]


@pytest.mark.uses("squashfuse", "/dev/fuse", "bubblewrap")
def test_the_file_can_be_entered_and_its_rc_starts_the_command(tiny: Bench, tmp_path: Path) -> None:
    squashfs = tiny.import_image("tiny")
    subprocess.run(
        ("unsquashfs", "-q", "-d", str(tmp_path / "root"), str(squashfs.path)), check=True, capture_output=True
    )
    words = ("bwrap", "--bind", str(tmp_path / "root"), "/", "--dev", "/dev", "--proc", "/proc", "/bin/sh", "/etc/rc")
    done = subprocess.run((*words, "sh", "-c", "pwd; echo $1", "x", "a b"), text=True, capture_output=True, check=True)
    assert done.stdout == "/srv\na b\n"


def test_the_same_image_answers_at_once(tiny: Bench) -> None:
    first = tiny.import_image("tiny")
    tiny.report.lines.clear()
    second = tiny.import_image("tiny")
    assert second == first
    assert tiny.said("already imported")
    assert not tiny.said("packing")
    assert tiny.import_image("tiny", again=True).sha256 == first.sha256  # the same bytes again


def test_options_and_image_decide_the_name(tiny: Bench) -> None:
    names = {tiny.import_image("tiny").path, tiny.import_image("tiny", compression="gzip").path}
    tiny.write("tiny", TINY + "ENV MORE=1\n")
    tiny.build("tiny")
    newest = tiny.import_image("tiny")
    assert len({*names, newest.path}) == 3
    assert (tiny.images / "tiny.sqsh").resolve() == newest.path
    found = list_squashfs(tiny.images)
    assert [links for _, links in found] == [("tiny.sqsh",), (), ()]
    table = tiny.runner("images")
    assert table.stdout.splitlines()[1].split()[0] == newest.path.name
    assert len(json.loads(tiny.runner("images", "--json").stdout)) == 3


def test_an_image_that_is_not_built_names_the_commands(bench: Bench) -> None:
    bench.write("unbuilt", TINY.replace("hello", "unbuilt"))
    with pytest.raises(RunnerError) as caught:
        bench.import_image("unbuilt")
    assert "not been built yet" in caught.value.what
    assert "runner build unbuilt && runner import unbuilt" in caught.value.fix
    assert bench.files() == []


def test_an_unknown_name_lists_the_recipes(bench: Bench) -> None:
    bench.write("known")
    with pytest.raises(RunnerError) as caught:
        bench.import_image("knwon")
    assert caught.value.fix == "did you mean 'known'?"
    with pytest.raises(RunnerError, match="podman has no image"):
        bench.import_image("podman://localhost/absent:1")


def test_a_recipe_that_has_changed_since_is_said(tiny: Bench) -> None:
    tiny.write("tiny", TINY + "ENV CHANGED=1\n")
    tiny.import_image("tiny")
    assert tiny.said("warning: recipe 'tiny' has changed since its image was built")


def test_a_registrys_image_is_pulled_and_named_as_enroot_does(tiny: Bench, registry: Registry) -> None:
    tiny.engine("push", "--quiet", "localhost/runner/tiny:latest", f"{registry.address}/some/image:1.0")
    squashfs = tiny.import_image(f"docker://{registry.address}#some/image:1.0")
    assert squashfs.link.name == "some+image+1.0.sqsh"
    with pytest.raises(RunnerError) as caught:
        tiny.import_image(f"docker://me@{registry.address}#some/absent:1.0")
    assert f"machine {registry.address.rpartition(':')[0]} login me" in caught.value.fix


@pytest.mark.uses("skopeo")
@pytest.mark.parametrize(
    ("form", "source", "name"),
    [
        ("oci-archive", "oci-archive:{path}", "image"),
        ("docker-archive", "docker-archive:{path}", "image"),
        ("oci-dir", "oci:{path}", "image"),
    ],
)
def test_layouts_and_archives(tiny: Bench, tmp_path: Path, form: str, source: str, name: str) -> None:
    path = tmp_path / "image"
    tiny.engine("save", "--quiet", f"--format={form}", "--output", str(path), "localhost/runner/tiny:latest")
    squashfs = tiny.import_image(source.format(path=path))
    assert squashfs.link.name == f"{name}.sqsh"
    assert content(squashfs.path, "etc/environment").endswith("GREETING=hello there\n")
    assert tiny.import_image(source.format(path=path)) == squashfs


def test_a_broken_archive_is_an_error(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"nothing" * 500)
    with pytest.raises(RunnerError, match=r"broken\.tar"):
        bench.import_image(f"docker-archive:{tmp_path}/broken.tar")
    assert bench.files() == []


def test_an_image_of_another_architecture_is_refused(bench: Bench) -> None:
    bench.engine(
        "build", "-q", "--platform=linux/arm64", "--tag=localhost/arm:1", "-f", bench.scratch(), str(bench.root)
    )
    with pytest.raises(RunnerError, match="is an image for arm64") as caught:
        bench.import_image("podman://localhost/arm:1", architecture="amd64")
    assert "exec format error" in caught.value.why
    assert bench.import_image("podman://localhost/arm:1", architecture="arm64").architecture == "arm64"


def test_declared_volumes_keep_their_content(bench: Bench) -> None:
    bench.write("volume", TINY + "RUN mkdir -p /data && echo kept > /data/file\nVOLUME /data\n")
    bench.build("volume")
    squashfs = bench.import_image("volume")
    assert content(squashfs.path, "data/file") == "kept\n"
    assert content(squashfs.path, "etc/fstab").startswith("${ENROOT_ROOTFS}/data /data none")
    # others use the same storage at the same time: only a volume with this content would be ours
    folders = bench.engine("volume", "ls", "--format", "{{.Mountpoint}}").split()
    assert [folder for folder in folders if (Path(folder) / "file").exists()] == []


def test_hostile_configuration_arrives_as_text(bench: Bench) -> None:
    evil = "$(touch /OWNED) `id` 'x' \"y\""
    quoted = json.dumps(["/bin/echo", evil])
    label = evil.replace('"', '\\"').replace("$", "\\$")
    bench.write("evil", f'{TINY}ENV EVIL="{label}"\nLABEL evil="{label}"\nENTRYPOINT {quoted}\n')
    bench.build("evil")
    squashfs = bench.import_image("evil")
    assert f"EVIL={evil}" in content(squashfs.path, "etc/environment").splitlines()
    script = content(squashfs.path, "etc/rc").replace("/etc/rc.local", "/nowhere").replace("'/srv'", "'/tmp'")
    done = subprocess.run(("dash", "-c", script, "rc", "z"), text=True, capture_output=True, check=True)
    assert done.stdout == f"{evil} z\n"
    assert not Path("/OWNED").exists()


def test_two_imports_at_once_give_one_file(heavy: Bench) -> None:
    racers = [heavy.start("import", "heavy") for _ in range(2)]
    said = [racer.communicate(timeout=600) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum("packing" in err for _, err in said) == 1
    assert len(heavy.files()) == 4
    assert heavy.left_containers() == ""


def test_a_kill_at_any_moment_leaves_the_old_file_or_none(heavy: Bench) -> None:
    """Twelve moments from start to end; then the next import removes what the killed ones left, and works."""
    started = time.monotonic()
    whole = heavy.runner("import", "heavy")
    seconds = time.monotonic() - started
    assert whole.returncode == 0, whole.stderr
    path = Path(whole.stdout.strip())
    for old in (False, True):
        assert heavy.runner("import", "heavy").returncode == 0
        for moment in range(6):
            if not old:
                shutil.rmtree(heavy.images, ignore_errors=True)
            child = heavy.start("import", "heavy", "--no-cache")
            time.sleep(seconds * (moment + 0.5) / 6)
            os.killpg(child.pid, signal.SIGKILL) if moment % 2 else child.kill()
            child.communicate()
            shown = [name for name in heavy.files() if not name.startswith(".")]
            for name in shown:
                if name.endswith(".sqsh"):
                    target = (heavy.images / name).resolve()
                    subprocess.run(("unsquashfs", "-s", str(target)), capture_output=True, check=True)
                    assert target.stat().st_size > 40_000_000
            assert path.name in shown or not old
    again = heavy.runner("import", "heavy", "--no-cache")
    assert (again.returncode, again.stdout.strip()) == (0, str(path)), again.stderr
    assert heavy.files() == files_of(path, "heavy")
    assert heavy.left_containers() == ""


def test_left_overs_of_another_image_go_too_but_not_those_of_a_live_import(tiny: Bench) -> None:
    tiny.images.mkdir()
    dead = tiny.images / ".other-0123456789ab.sqsh.99999abc.import"
    live = tiny.images / ".live-0123456789ab.sqsh.99998abc.import"
    for left in (dead, live):
        left.mkdir()
        (left / "squashfs").write_text("half")
    strangers = tiny.images / ".notes.partial"
    strangers.write_text("not ours")
    with files.locked(tiny.images / "live-0123456789ab.sqsh"):
        holder = tiny.runner("import", "tiny")
    assert holder.returncode == 0, holder.stderr
    assert not dead.exists()
    assert live.exists() and strangers.exists()


def test_docker_is_read_through_its_socket_and_a_dead_imports_container_goes(tiny: Bench, docker_socket: str) -> None:
    """podman's socket speaks docker's API; a real daemon is not asked here."""
    machine = f"{os.uname().nodename}:{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    dead = f"runner.import.process={machine} {os.getpid()} boot:start"
    tiny.images.mkdir()
    tiny.engine("create", "--label", dead, "localhost/runner/tiny:latest")
    theirs = tiny.engine("create", "localhost/runner/tiny:latest").strip()
    words = ("import", "dockerd://localhost/runner/tiny:latest", "--json")
    done = tiny.runner(*words, env={"DOCKER_HOST": docker_socket})
    assert done.returncode == 0, done.stderr
    assert check("import", done.stdout)["layers"] == 1
    assert theirs in tiny.engine("ps", "-aq", "--no-trunc").split()
    tiny.engine("rm", theirs)
    assert tiny.left_containers() == ""


def test_a_lock_that_is_held_is_waited_for_never_ignored(tiny: Bench) -> None:
    squashfs = tiny.import_image("tiny")
    with files.locked(squashfs.path):
        child = tiny.start("import", "tiny", "--no-cache")
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=4)
    assert child.wait(timeout=600) == 0


def test_a_damaged_file_is_made_anew(tiny: Bench) -> None:
    squashfs = tiny.import_image("tiny")
    with squashfs.path.open("r+b") as damaged:
        damaged.write(bytes(96))
    tiny.import_image("tiny")
    assert tiny.said("is damaged")
    assert find_squashfs(squashfs.path) == find_squashfs(tiny.images / "tiny.sqsh")
    with squashfs.path.open("r+b") as cut:
        cut.truncate(5000)
    assert find_squashfs(squashfs.path) is None
    assert tiny.import_image("tiny").sha256 == squashfs.sha256


def test_a_full_disk_is_told_and_nothing_is_left(heavy: Bench) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    heavy.images.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(heavy.images)), check=True)
    try:
        with pytest.raises(RunnerError) as caught:
            heavy.import_image("heavy")
        left = heavy.files()
    finally:
        subprocess.run(("umount", str(heavy.images)), check=True)
    assert caught.value.why == "No space left on device"
    assert caught.value.what.startswith(f"cannot write {heavy.images}/heavy-")
    assert "RUNNER_IMAGES" in caught.value.fix
    assert left == []
    assert heavy.left_containers() == ""


def test_ctrl_c_leaves_nothing(heavy: Bench) -> None:
    child = heavy.start("import", "heavy")
    until(lambda: list(heavy.images.glob(".*.import")))
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=600) == 130, child.communicate()[1]
    assert heavy.files() == []
    assert heavy.left_containers() == ""


def test_ctrl_c_leaves_nothing_even_if_the_folder_has_just_been_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def interrupted(*words: object, **named: object) -> None:
        make(*words, **named)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", interrupted)
        with folders.beside(tmp_path / "x.sqsh", ".import"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_users_own_name(tiny: Bench, tmp_path: Path) -> None:
    target = tmp_path / "sub/own.sqsh"
    squashfs = tiny.import_image("tiny", output=target)
    assert squashfs.path == squashfs.link == target
    assert sorted(path.name for path in target.parent.iterdir() if path.suffix != ".lock") == [
        "own.json",
        "own.layers",
        "own.sqsh",
    ]
    assert not tiny.images.exists()
    assert tiny.import_image("tiny", output=target) == squashfs
    assert tiny.said("already imported")


def test_a_file_that_we_did_not_make_is_replaced_only_by_force(tiny: Bench, tmp_path: Path) -> None:
    target = tmp_path / "theirs.sqsh"
    target.write_text("precious")
    for words in ((), ("--no-cache",)):
        done = tiny.runner("import", "tiny", "-o", str(target), *words)
        assert done.returncode == 1
        assert "replace it: --force" in done.stderr
        assert target.read_text() == "precious"
    assert tiny.runner("import", "tiny", "-o", str(target), "--force").stdout == f"{target}\n"
    assert find_squashfs(target)


def test_a_link_name_that_is_a_file_is_left_alone(tiny: Bench) -> None:
    tiny.images.mkdir()
    (tiny.images / "tiny.sqsh").write_text("precious")
    with pytest.raises(RunnerError, match="cannot create the link"):
        tiny.import_image("tiny")
    assert (tiny.images / "tiny.sqsh").read_text() == "precious"


def test_a_folder_that_refuses_is_told(tiny: Bench) -> None:
    (tiny.folder / "file").write_text("")
    tiny.environ["RUNNER_IMAGES"] = str(tiny.folder / "file/images")
    done = tiny.runner("import", "tiny")
    assert (done.returncode, done.stdout) == (1, "")
    assert "because:" in done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_says_what_would_be_read_reused_and_written(tiny: Bench) -> None:
    before = tiny.runner("import", "tiny", "--dry-run")
    assert before.stdout == ""
    assert "reuses: nothing" in before.stderr and not tiny.images.exists()
    squashfs = tiny.import_image("tiny")
    after = tiny.runner("import", "tiny", "--dry-run")
    assert f"reuses: {squashfs.path}" in after.stderr


def test_stdout_is_the_path_and_json_is_json(tiny: Bench) -> None:
    done = tiny.runner("import", "tiny")
    assert done.stdout == f"{(tiny.images / 'tiny.sqsh').resolve()}\n"
    told = check("import", tiny.runner("import", "tiny", "--json").stdout)
    assert told["path"] == done.stdout.strip()
    built = tiny.runner("build", "tiny", "--import")
    assert built.stdout == done.stdout
