"""Each diagnosis has a verdict that fits, names what it saw, and says how to mend it; none changes anything."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.doctor import examination, machine, storage
from runner.doctor import storage as quota
from runner.doctor.examination import examine
from runner.errors import RunnerError
from runner.machine import probe
from runner.runs import submit
from runner.site import Site
from runner.site_files import load_site
from tests.lab.slurm import SlurmLab

LOCAL = Site("local", "this machine", "local", "auto", "/nowhere")


def test_clock_is_judged_against_our_own_files(monkeypatch):
    """A machine that lives in the past trusts no certificate."""
    assert machine.clock().verdict in {"ok", "missing"}
    monkeypatch.setattr("time.time", lambda: 86_400.0)
    found = machine.clock()
    assert found.verdict == "wrong" and found.text.startswith("1970-01-02 00:00:00 UTC") and "timedatectl" in found.fix


def test_the_kernel_is_asked_about_the_clock():
    """True, False or None: what `adjtimex` answers here, without changing it."""
    assert probe.clock_synchronized() in {True, False, None}


def test_the_file_system_of_a_path_is_the_one_that_is_mounted_nearest():
    assert probe.file_system(Path("/proc/self"))[1] == "/proc"
    assert probe.file_system(Path("/proc/self"))[0] == "proc"
    assert probe.file_system(Path("/processes"))[1] == "/"


@pytest.mark.parametrize(
    ("stdout", "found"),
    [
        # quota -w -p, quota-tools 4.06
        (
            "Disk quotas for user me (uid 1000): \n"
            "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
            "      /dev/sda1      20   10240   20480       0       5       0       0       0\n",
            ((20, 10240), (5, 0)),
        ),
        (
            "Disk quotas for user me (uid 1000): \n"
            "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
            " server:/home 11720* 10240 20480 1732890000 102* 0 200 1732890000\n",
            ((11720, 10240), (102, 200)),
        ),
        ("Disk quotas for user root (uid 0): none\n", None),
        # lfs quota -q, Lustre 2.15: a long name has a line of its own
        (
            "/iopsstor/scratch\n             5242880  0 161061273600       -  980000       0 1000000       -\n",
            ((5242880, 161061273600), (980000, 1000000)),
        ),
        ("   /mnt [256]*      200     300 6d23h59m55s       1       0       0       -\n", ((256, 200), (1, 0))),
        ("", None),
    ],
)
def test_quotas_are_read_as_quota_and_lfs_print_them(stdout, found):
    assert quota.parse_quota(stdout) == found


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Room for several images, so that no test depends on the free space of the machine."""
    free = shutil.disk_usage("/")._replace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """This folder as if it were on Lustre: the kernel's list says so, and an `lfs` answers as Lustre's does."""
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(probe, "file_system", lambda path: ("lustre", str(tmp_path)))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def answers(getstripe: str = "", quota: str = "") -> None:
        program(tmp_path / "bin", "lfs", f"case $1 in getstripe) echo '{getstripe}';; quota) echo '{quota}';; esac")

    return answers


def test_an_image_folder_on_lustre_wants_stripes(lustre, tmp_path):
    """One stripe: every node reads its image from one server. The site knows the words that mend it."""
    site = load_site("alps-clariden", {"HOME": "/h"})
    environ = {"RUNNER_IMAGES": str(tmp_path / "images")}
    lustre("stripe_count:  1 stripe_size:   1048576 pattern: 0 stripe_offset: -1")
    found = storage.striping(site, environ)
    assert found.verdict == "wrong"
    assert f"lfs setstripe -E 4M -c 1 -E 64M -c 4 -E -1 -c -1 -S 4M {tmp_path}/images" in found.fix
    lustre("lcm_layout_gen: 0\n lcme_id: N/A\n stripe_count:  1\n lcme_id: N/A\n stripe_count:  -1\n")
    assert storage.striping(site, environ).verdict == "ok"
    missing = storage.striping(site, {"RUNNER_IMAGES": str(tmp_path / "not/yet")})
    assert missing.verdict == "missing" and "before the first import" in missing.fix


def test_a_quota_that_is_nearly_used_up_is_wrong(lustre, tmp_path):
    """Inodes run out before the space does; both are looked at."""
    environ = {"RUNNER_IMAGES": str(tmp_path / "images")}
    lustre(quota=f"{tmp_path} 5242880 0 161061273600 - 980000 0 1000000 -")
    found = storage.quota(LOCAL, environ)
    assert (
        found.verdict == "wrong" and "inodes 980000 of 1000000" in found.text and "space 5 of 164927 GB" in found.text
    )
    lustre(quota=f"{tmp_path} 5242880 0 161061273600 - 98 0 1000000 -")
    assert storage.quota(LOCAL, environ).verdict == "ok"


def test_a_launch_warns_of_a_quota_that_is_nearly_used_up_and_is_refused_where_nothing_fits(
    lustre, tmp_path, monkeypatch
):
    """Over a soft limit one may still write for a while: that is the file system's to say, with its own error."""
    lustre(quota=f"{tmp_path} 95 100 200 - 1 0 0 -")
    (note,) = submit.check_room(tmp_path / "runs/new")
    assert "nearly used up" in note and f"{tmp_path}: space 0 of 0 GB" in note
    lustre(quota=f"{tmp_path} 94 100 200 - 1 0 0 -")
    assert submit.check_room(tmp_path) == ()
    lustre(quota="")
    assert submit.check_room(tmp_path) == ()
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*full[:4], 0, *full[5:])))
    with pytest.raises(RunnerError, match="not enough space for a run"):
        submit.check_room(tmp_path / "runs/new")


def test_without_lustre_no_stripes_are_wanted(tmp_path):
    assert storage.striping(LOCAL, {"RUNNER_IMAGES": str(tmp_path)}).verdict == "ok"


def test_a_folder_without_rights_is_wrong_and_names_the_variable(tmp_path, monkeypatch):
    """No write permission: the folder, and what to set instead."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = storage.image_folder(LOCAL, {"RUNNER_IMAGES": str(tmp_path / "a/b")})
    assert (found.verdict, found.fix) == ("wrong", "set RUNNER_IMAGES") and f"may not write to {tmp_path}" in found.text
    site = replace(LOCAL, run_folder="${SCRATCH}/runs")
    found = storage.run_folder(site, {"SCRATCH": str(tmp_path)})
    assert (found.verdict, found.fix) == ("wrong", "set RUNNER_RUNS")


def test_an_undefined_scratch_is_named(tmp_path):
    site = replace(LOCAL, image_folder="${SCRATCH}/images", run_folder="${SCRATCH}/runs")
    for check in (storage.image_folder, storage.run_folder, storage.quota, storage.striping):
        found = check(site, {})
        assert "SCRATCH" in found.text and found.verdict in {"wrong", "missing"} and found.fix
    (tmp_path / "file").write_text("")
    assert "is not a folder" in storage.image_folder(LOCAL, {"RUNNER_IMAGES": str(tmp_path / "file/x")}).text


def test_edf_path_must_name_folders_that_are_there_and_names_that_can_be_found(tmp_path):
    def lookup(**environ):
        return machine.edf_lookup({"HOME": str(tmp_path), **environ})

    assert lookup().verdict == "ok" and "0 environments" in lookup().text
    (tmp_path / ".edf").mkdir()
    (tmp_path / ".edf/a.toml").write_text("")
    assert "1 environments" in lookup().text
    assert lookup(EDF_PATH=f"{tmp_path}/.edf:/nowhere").text.endswith("missing or closed folders: /nowhere")
    (tmp_path / ".edf/b.toml.toml").write_text("")
    assert lookup().verdict == "wrong" and lookup().fix == f"mv {tmp_path}/.edf/b.toml.toml {tmp_path}/.edf/b.toml"


@pytest.mark.parametrize(
    ("machines", "mode", "verdict", "fix"),
    [
        (("nvcr.io", "authn.nvidia.com"), 0o600, "ok", ""),
        (("nvcr.io",), 0o600, "wrong", "`machine authn.nvidia.com`"),
        (("authn.nvidia.com",), 0o600, "wrong", "`machine nvcr.io`"),
        (("ghcr.io",), 0o640, "wrong", "chmod 600"),
        ((), 0o600, "ok", ""),
    ],
)
def test_enroots_credentials_are_private_and_complete(tmp_path, machines, mode, verdict, fix):
    path = tmp_path / ".credentials"
    path.write_text("".join(f"machine {name} login $oauthtoken password s3cret\n" for name in machines))
    path.chmod(mode)
    found = storage.credentials({"ENROOT_CONFIG_PATH": str(tmp_path)})
    assert found.verdict == verdict and fix in found.fix and "s3cret" not in found.text + found.fix


def test_missing_credentials_say_what_to_write(tmp_path):
    found = storage.credentials({"HOME": str(tmp_path)})
    assert found.verdict == "missing" and "nvcr.io" in found.fix and "authn.nvidia.com" in found.fix


def test_logins_of_podman_are_named_without_their_secrets(tmp_path):
    path = tmp_path / "auth.json"
    environ = {"REGISTRY_AUTH_FILE": str(path), "HOME": str(tmp_path)}
    assert storage.registry_logins(environ).verdict == "missing"
    path.write_text(json.dumps({"auths": {"nvcr.io": {"auth": "czNjcmV0"}}}))
    path.chmod(0o600)
    found = storage.registry_logins(environ)
    assert found.verdict == "ok" and found.text.startswith("nvcr.io") and "czNj" not in found.text
    path.chmod(0o644)
    assert storage.registry_logins(environ).fix == f"chmod 600 {path}"
    path.write_text("[")
    assert storage.registry_logins(environ).verdict == "wrong"


def test_hugging_face_offline_without_a_cache_is_wrong(tmp_path):
    """Offline and nothing cached: the job would end at its first model."""

    def found(**environ):
        return storage.hugging_face({"HOME": str(tmp_path), **environ})

    assert found().verdict == "ok" and "online; no token" in found().text
    assert found(HF_HUB_OFFLINE="1").verdict == "wrong" and "prefetch" in found(HF_HUB_OFFLINE="1").fix
    assert found(HF_HUB_OFFLINE="0").verdict == "ok"
    cache = tmp_path / ".cache/huggingface"
    cache.mkdir(parents=True)
    assert "offline: HF_HUB_OFFLINE" in found(HF_HUB_OFFLINE="1").text and found(HF_HUB_OFFLINE="1").verdict == "ok"
    (cache / "token").write_text("hf_x")
    (cache / "token").chmod(0o644)
    assert found().fix == f"chmod 600 {cache}/token"
    (cache / "token").chmod(0o600)
    assert found().text.endswith(f"token in {cache}/token")
    assert found(HF_TOKEN="").text.endswith("no token"), "it keeps the login out of a job"
    own = tmp_path / ".config/runner/secrets"
    own.parent.mkdir(parents=True)
    own.write_text("HF_TOKEN=hf_x\n")
    own.chmod(0o600)
    assert found().text.endswith(f"HF_TOKEN is in {own}")
    assert found(HF_TOKEN="hf_y").text.endswith("HF_TOKEN is set")
    own.chmod(0o644)
    assert found().verdict == "wrong" and found().fix.startswith(f"chmod 600 {own}"), "each launch would refuse it"


def test_a_program_that_does_not_start_is_wrong(tmp_path, monkeypatch):
    """There, but broken: worse than not there."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "enroot", "echo 'enroot: libnvidia-container.so: cannot open' >&2; exit 127")
    found = machine.program("enroot")
    assert found.verdict == "wrong" and "libnvidia-container" in found.text
    program(tmp_path, "enroot", "echo 4.1.2")
    assert (machine.program("enroot").verdict, machine.program("enroot").version) == ("ok", "4.1.2")
    program(tmp_path, "docker", "echo Docker version 28.2.2, build x")
    monkeypatch.setattr(machine, "_SOCKET", str(tmp_path / "docker.sock"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert machine.program("docker").verdict == "missing" and "daemon" in machine.program("docker").text
    monkeypatch.setenv("DOCKER_HOST", "unix:///elsewhere")
    assert machine.program("docker").verdict == "ok"


def test_a_site_whose_plugin_srun_lacks_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "srun", "echo '      --container-image=IMAGE  x'")
    from runner.detection import srun_options

    srun_options.cache_clear()
    try:
        found = machine.plugins(load_site("alps-clariden", {"HOME": "/h"}))
        assert (
            found.verdict == "wrong" and "no --environment" in found.text and "--container-image (pyxis)" in found.text
        )
        assert machine.plugins(load_site("generic-pyxis", {"HOME": "/h"})).verdict == "ok"
    finally:
        srun_options.cache_clear()


@pytest.fixture
def own_slurm(tmp_path, monkeypatch):
    """A folder with a Slurm configuration, and first on PATH, for Slurm's programs."""
    from runner.detection import srun_options

    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    srun_options.cache_clear()
    yield tmp_path
    srun_options.cache_clear()


@pytest.mark.parametrize(
    ("line", "tracking", "verdict"),
    [
        ("required /x/spank_pyxis.so use_squashfuse=1", "proctrack/linuxproc", "wrong"),
        ("required /x/spank_pyxis.so importer=/y use_squashfuse=1", "proctrack/cgroup", "ok"),
        ("required /x/spank_pyxis.so importer=/y", "proctrack/linuxproc", "ok"),
        ("# required /x/spank_pyxis.so use_squashfuse=1", "proctrack/linuxproc", "ok"),
    ],
)
def test_squashfuse_of_pyxis_needs_slurms_cgroups(own_slurm, line, tracking, verdict):
    """Else scancel --signal ends the mount too: the program that wants to save gets errors for its own files."""
    folder = own_slurm / "plugstack.conf.d"
    folder.mkdir()
    (own_slurm / "plugstack.conf").write_text(f"include {folder}/*.conf\n")
    (folder / "pyxis.conf").write_text(f"{line}\n")
    program(own_slurm, "srun", "echo '  --container-image=IMAGE'")
    program(own_slurm, "scontrol", f"echo 'ProctrackType           = {tracking}'")
    found = machine.plugins(load_site("generic-pyxis", {"HOME": "/h"}))
    assert found.verdict == verdict and ("ProctrackType=proctrack/cgroup" in found.fix) == (verdict == "wrong")


def test_a_program_that_hangs_takes_no_other_diagnosis_with_it(own_slurm, monkeypatch):
    """A busy controller, a login node under load."""
    (own_slurm / "plugstack.conf").write_text("required /x/spank_pyxis.so use_squashfuse=1\n")
    monkeypatch.setattr(machine, "_SECONDS", 0.2)
    program(own_slurm, "srun", "echo '  --container-image=IMAGE'")
    for name in ("scontrol", "unshare"):
        program(own_slurm, name, "exec sleep 60")
    found = machine.plugins(load_site("generic-pyxis", {"HOME": "/h"}))
    assert found.verdict == "missing" and "--container-image (pyxis); it is not known" in found.text
    assert "scontrol did not answer" in found.text
    assert machine.namespaces().text.startswith("unshare did not answer")


def test_a_real_cluster_is_seen_with_its_version_and_plugins(slurm: SlurmLab, tmp_path):
    """The lab's Slurm, asked by a process that belongs to it."""
    words = (sys.executable, "-m", "runner", "doctor", "--json", "--site", "generic-slurm")
    for _ in range(5):  # it waits for nobody longer than a second or two, and this machine may be busy
        done = slurm.run(words, check=False, extra_environ={"HOME": str(tmp_path)})
        found = {item["name"]: item for item in json.loads(done.stdout)}
        if "did not answer" not in found["slurm"]["text"]:
            break
    assert found["slurm"]["verdict"] == "ok", found["slurm"]
    assert found["slurm"]["version"][0].isdigit()
    assert "answers" in found["slurm"]["text"]
    assert "--environment (ce)" in found["srun plugins"]["text"]
    assert found["engine"]["text"].startswith("ce: srun has --environment")


def test_what_a_site_does_without_is_not_called_missing(tmp_path, monkeypatch):
    """On a laptop neither Slurm nor a second engine is missing; without any program the same site misses an engine."""
    program(tmp_path / "bin", "podman", "echo podman version 4.3.1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    environ = {"HOME": str(tmp_path), "RUNNER_IMAGES": str(tmp_path)}
    found = examine(LOCAL, "asked for", environ)
    verdicts = {each.name: each.verdict for each in found.diagnoses}
    assert {verdicts[name] for name in ("slurm", "srun plugins", "docker", "enroot", "apptainer")} == {"not needed"}
    assert verdicts["git"] == verdicts["squashfuse"] == "missing"
    assert [each.verdict == "not needed" for each in found.diagnoses] == sorted(
        each.verdict == "not needed" for each in found.diagnoses
    )
    assert found.ready == ("build", "import", "launch and shell on site local (engine podman)") and not found.not_ready
    (tmp_path / "bin/podman").unlink()
    found = examine(LOCAL, "asked for", environ)
    assert found.ready == ("import",)
    assert found.not_ready == (
        "build (podman and docker do not work)",
        "launch and shell on site local (engine host) (engine)",
    )
    clariden = examine(load_site("alps-clariden", environ), "asked for", {**environ, "SCRATCH": str(tmp_path)})
    assert {each.verdict for each in clariden.diagnoses if each.name == "slurm"} == {"wrong"}


MOUNTING = ("squashfuse", "/dev/fuse")
CLUSTER = ("slurm", "srun plugins", "clock", "quota")
ABSENT = {*machine.PROGRAMS, *MOUNTING, *CLUSTER, "namespaces", "subuid", "credentials", "logins", "image folder"}


@pytest.mark.parametrize(
    ("site", "engine", "present", "missing"),
    [
        ("local", "sandbox", (), (*MOUNTING, "bwrap", "unsquashfs", "namespaces", "podman", "docker")),
        ("local", "sandbox", MOUNTING, ("bwrap", "namespaces", "podman", "docker")),
        ("local", "podman", ("podman",), (*MOUNTING, "unsquashfs", "namespaces", "subuid")),
        ("local", "docker", ("podman",), ("docker", "namespaces", "subuid")),
        ("local", "apptainer", ("docker",), ("apptainer",)),
        ("generic-slurm", "enroot", ("docker",), ("enroot", "credentials", *CLUSTER)),
        ("alps-clariden", "ce", ("podman",), ("credentials", "namespaces", "subuid", *CLUSTER)),
    ],
)
def test_only_what_the_site_and_the_engine_use_is_missing(site, engine, present, missing):
    """Of everything that this machine could have, and lacks but for `present`."""
    found = [machine.Diagnosis(name, "ok" if name in present else "missing", "") for name in sorted(ABSENT)]
    needless = examination._not_needed(found, load_site(site, {"HOME": "/h"}), engine)
    assert ABSENT - needless - {*present} == {"git", "image folder", *missing}


@pytest.mark.parametrize(
    ("wrong", "not_ready"),
    [
        ((), ()),
        (
            ("image folder", "slurm"),
            ("import (image folder)", "launch and shell on site local (engine enroot) (image folder, slurm)"),
        ),
        (("quota",), ("import (quota)",)),
        (
            ("run folder", "srun plugins"),
            ("launch and shell on site local (engine enroot) (run folder, srun plugins)",),
        ),
        (("enroot", "git"), ("launch and shell on site local (engine enroot) (enroot)",)),
        (("podman",), ("build (podman and docker do not work)",)),
    ],
)
def test_a_verb_is_ready_where_nothing_that_it_uses_is_wrong(wrong, not_ready):
    names = ("image folder", "run folder", "slurm", "srun plugins", "quota", "enroot", "git", "podman")
    found = [machine.Diagnosis(name, "wrong" if name in wrong else "ok", "") for name in names]
    assert examination._readiness(found, LOCAL, "enroot")[1] == not_ready


def test_what_is_wrong_counts_even_where_it_is_not_needed(tmp_path, monkeypatch):
    """Only what is missing can be not needed."""
    program(tmp_path / "bin", "enroot", "echo broken >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = examine(LOCAL, "given", {"HOME": str(tmp_path)})
    assert {each.name: each.verdict for each in found.diagnoses}["enroot"] == "wrong"
