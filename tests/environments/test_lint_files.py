"""All faults of a file are found at once, whether or not it loads; and what is known is said once, in order."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.environments.lint.check import Linter
from runner.environments.lint.finding import Setting, fixed
from runner.project import Project
from runner.site_files import load_site
from tests.environments.lint_cases import CASES
from tests.environments.lint_scripts import SCRIPTS


@pytest.fixture
def check(tmp_path):
    """check(text, engine): the findings in an EDF, on a machine that is not of the site."""

    def run(text: str | bytes, engine: str = "ce", name: str = "it.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        environ = {"HOME": str(tmp_path), "RUNNER_IMAGES": str(tmp_path)}
        setting = Setting(load_site("alps-clariden"), engine, environ, here=False)
        (checked,) = Linter(Project(None, tmp_path, tmp_path), setting).check(str(path))
        return checked.findings

    return run


def lines(findings) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.place.line) for finding in findings]


def test_every_fault_of_the_syntax_is_found_not_only_the_first(check):
    text = 'image = x\nworkdir = "/w"\nworkdir = "/v"\n[env]\nA = 1\nB = yes\n[env]\nC = "c"\nD = "d\n'
    assert lines(check(text)) == [
        ("toml-syntax", 1),
        ("key-twice", 3),
        ("env-not-text", 5),
        ("toml-syntax", 6),
        ("table-twice", 7),
        ("toml-syntax", 9),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('mounts = ["/a:/b",\n  "/c:/c"\n  "/d:/e"]\nworkdir = "/w"\n', 3),
        ('mounts = ["/a:/b"\nworkdir = "/w"\n', 2),
        ('mounts = [\n  "/a:/b"\n\n[env]\nA = "1"\n', 4),
        ('mounts = [\n  "/a:/b",\n[env]\nA = "1"\n', 3),
    ],
)
def test_a_missing_comma_or_bracket_is_one_fault(check, text, line):
    assert lines(check('image = "/a.sqsh"\n' + text)) == [("toml-syntax", line + 1)]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('[env]\nA = "a",\n', "remove the comma at the end: only elements of an array are separated by commas"),
        ('[[mounts]]\nsource = "/a"\n', 'write an array of texts: mounts = ["…"]'),
        ("mounts = [3]\n", 'write "3"'),
    ],
)
def test_the_advice_fits_what_was_written(check, text, fix):
    assert [finding.fix for finding in check('image = "/a.sqsh"\n' + text)] == [fix]


def test_every_fault_of_keys_and_values_is_found_not_only_the_first(check):
    text = """\
image = "/a.sqsh"
mount = ["/x:/x"]
writable = "yes"
mounts = ["/x:/y:ro,private", 3, "y:/y"]
[env]
A = 1
B = "${C"
entrypoint = true
[annotations]
com.hooks.cxi.enabled = false
"""
    assert lines(check(text)) == [
        ("unknown-key", 2),
        ("wrong-type", 3),
        ("wrong-type", 4),
        ("mount-flag-separator", 4),
        ("mount-syntax", 4),
        ("env-not-text", 6),
        ("broken-reference", 7),
        ("key-after-table", 8),
        ("annotation-not-text", 10),
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("mount", "mounts"),
        ("volumes", "mounts"),
        ("enviroment", "env"),
        ("environment", "env"),
        ("annotation", "annotations"),
        ("workDir", "workdir"),
        ("base-environment", "base_environment"),
        ("container_image", "image"),
        ("writeable", "writable"),
    ],
)
def test_a_misspelt_key_is_told_which_one_is_meant(check, key, meant):
    (finding,) = check(f'image = "/a.sqsh"\n{key} = ""\n')
    assert (finding.code, finding.fix) == ("unknown-key", f"did you mean {meant!r}?")


def test_a_table_opened_twice_names_both_places(check):
    (finding,) = check('image = "/a.sqsh"\n[env]\nA = "1"\n[annotations]\n[env]\nB = "1"\n')
    assert finding.reason == "the table [env] is opened a second time: it was opened in line 2"


def test_a_file_that_is_no_text_is_said_so_with_its_line(check):
    assert lines(check(b'image = "/a.sqsh"\nworkdir = "\xff"\n')) == [("file-unreadable", 2)]


def test_what_only_the_reader_refuses_is_still_an_error(check, monkeypatch):
    """Whatever the reader of EDFs learns to refuse, the linter never calls such a file clean."""
    from runner.environments.lint import check as module
    from runner.errors import RunnerError

    def refuse(*_words):
        raise RunnerError("it.toml:1: cannot be", "a new rule", "mend it")

    monkeypatch.setattr(module, "load_environment", refuse)
    (finding,) = check('image = "/a.sqsh"\n')
    assert (finding.code, finding.reason) == ("cannot-load", "it.toml:1: cannot be: a new rule")


def test_a_fault_in_a_base_is_found_in_its_own_file(check, tmp_path):
    (tmp_path / "base.toml").write_text('[env]\nNCCL_PROTO = "^LL128"\nHF_TOKEN = "hf_x"\n')
    found = check('base_environment = "./base.toml"\nimage = "/a.sqsh"\nmount = []\n')
    assert [(finding.code, finding.place.path.name, finding.place.line) for finding in found] == [
        ("unknown-key", "it.toml", 3)
    ]
    found = check('base_environment = "./base.toml"\nimage = "/a.sqsh"\n')
    assert [(finding.code, finding.place.path.name, finding.place.line) for finding in found] == [
        ("secret-value", "base.toml", 3),
        ("stale-tuning", "base.toml", 2),
    ]


def test_a_secret_is_never_repeated(check):
    found = check('image = "/a.sqsh"\n[env]\nHF_TOKEN = "hunter2hunter2"\nX = "hf_abcdefghijklmnopqrst"\n')
    assert [finding.code for finding in found] == ["secret-value", "secret-value"]
    assert not any(word in str(finding) for finding in found for word in ("hunter2", "abcdefghij"))


def test_every_field_that_an_engine_refuses_is_named_once_by_the_rule_that_knows_why(check):
    found = check(
        'image = "/a.sqsh"\nmounts = ["/a,b:/x", "/ok:/ok", "/c:/y:sqsh"]\n[annotations]\na.b = "c"\n', "pyxis"
    )
    assert [(finding.code, finding.field) for finding in found] == [
        ("mount-separator", "mounts.0"),
        ("mount-flag-unknown", "mounts.2"),
        ("engine-refuses", "annotations.a.b"),
    ]


def test_a_target_that_cannot_be_mounted_is_to_be_changed_and_not_the_folder(check):
    found = check('image = "/a.sqsh"\nmounts = ["/ok:/a,b", "/a,b:/x"]\n', "pyxis")
    separators = [finding.fix for finding in found if finding.code == "mount-separator"]
    assert separators == [
        "choose another target",
        "rename it, or mount a symlink to it: ln -s SOURCE LINK",
    ]


def test_away_from_the_site_nothing_is_said_about_this_machine(check):
    """An EDF for a cluster is checked on a laptop: image, mounts, logins and the cluster's variables are not there."""
    text = 'image = "nvcr.io#nvidia/pytorch:25.01-py3"\nmounts = ["${SCRATCH}/x:/x", "/capstor:/capstor"]\n'
    assert [finding.code for finding in check(text)] == ["nccl-over-tcp"]


def test_what_the_site_says_for_every_environment_counts(check, tmp_path):
    """The variant of Alps for extended images switches cxi off and sets PMIX_MCA_psec for all."""
    image = 'image = "jfrog.svc.cscs.ch#docker-group-csstaff/alps-images/ngc-pytorch:26.02-py3-alps6"\n'
    path = tmp_path / "it.toml"
    path.write_text(f"{image}entrypoint = true\n")
    codes = {}
    for name in ("alps-clariden", "alps-extended-images"):
        setting = Setting(load_site(name), "ce", {"HOME": str(tmp_path)}, here=False)
        (checked,) = Linter(Project(None, tmp_path, tmp_path), setting).check(str(path))
        codes[name] = [finding.code for finding in checked.findings]
    assert codes == {
        "alps-clariden": ["extended-image-cxi", "extended-image-pmix"],
        "alps-extended-images": [],
    }


PIECES = st.sampled_from(
    ['"', "'", "[", "]", "${", "$", "}", "\n", "\\", "=", "#", ":", ",", "<<E\n", "image", "[env]\n", "\0"]
)


def test_settings_of_nccls_network_show_that_it_is_used(tmp_path):
    """Any image: NCCL_SOCKET_IFNAME without the hook means TCP between nodes."""
    site = replace(load_site("local", {}), gpus_per_node=4)
    path = tmp_path / "it.toml"
    found = {}
    for name in ("NCCL_SOCKET_IFNAME", "FI_PROVIDER"):
        path.write_text(f'image = "quay.io#x/mine:1"\n[env]\n{name} = "hsn"\n')
        linter = Linter(Project(tmp_path, tmp_path, tmp_path), Setting(site, "ce", {}, here=False))
        found[name] = [one.code for checked in linter.check(str(path)) for one in checked.findings]
    assert found == {"NCCL_SOCKET_IFNAME": ["nccl-over-tcp", "stale-tuning"], "FI_PROVIDER": ["stale-tuning"]}


def test_mounts_without_a_target_share_one_note_and_one_fix(tmp_path):
    path = tmp_path / "it.toml"
    path.write_text('image = "quay.io#x/mine:1"\nmounts = ["/a", "/b:/b", "/c"]\n')
    linter = Linter(Project(tmp_path, tmp_path, tmp_path), Setting(load_site("local", {}), "ce", {}, here=False))
    [[one]] = [checked.findings for checked in linter.check(str(path))]
    assert one.code == "mount-without-target" and "'/a', '/c'" in one.reason
    text, done = fixed(path.read_text(), path, [one])
    assert text.splitlines()[1] == 'mounts = ["/a:/a", "/b:/b", "/c:/c"]' and done == (one,)


ENGINES = st.sampled_from(["ce", "sarus", "pyxis", "enroot", "podman", "docker", "apptainer", "sandbox", "host"])


@settings(max_examples=120)
@example(text='[env]\nB = "1"\n', cuts=[(2, 0, "image")], engine="sarus")
@example(text="[annotations]\ncom.hooks.cxi.enabled = true\n", cuts=[], engine="sarus")
@given(
    text=st.sampled_from([case.broken for case in CASES] + ["#!/bin/sh\n" + case.broken for case in SCRIPTS]),
    cuts=st.lists(st.tuples(st.integers(2, 300), st.integers(0, 4), PIECES), max_size=4),
    engine=ENGINES,
)
def test_any_text_gives_findings_and_never_a_fault_of_our_own(tmp_path, text, cuts, engine):
    """Whatever is cut out of a file or put into it: an EDF that does not load has an error, at a place in the file.

    Of what Sarus itself accepts and runner does not load, the finding is a warning.
    """
    for at, length, piece in cuts:
        text = text[:at] + piece + text[at + length :]
    path = tmp_path / "it.toml"
    path.write_text(text)
    setting = Setting(load_site("generic-pyxis"), engine, {"HOME": str(tmp_path)})
    linter = Linter(Project(None, tmp_path, tmp_path), setting)
    checked = linter.check(str(path))
    places = [finding.place for one in checked for finding in one.findings if finding.place]
    assert all(isinstance(place.path, Path) and (place.line or 1) <= text.count("\n") + 1 for place in places)
    if not text.startswith("#!"):
        loads = linter.environment(path)[1] is not None
        told = {finding.severity for finding in checked[0].findings}
        assert loads or "error" in told or (engine == "sarus" and "warning" in told)
