"""An engine says all of an environment in its own words, or raises with the field, the engine and the way out."""

import os
import re
import subprocess

import pytest

from runner.environments.edf import Mount
from runner.environments.engines import ENGINES, attach, choose, with_site
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand, literal
from runner.images.importer.enroot_files import metadata_files
from runner.site import Site
from runner.site_files import load_site
from tests.environments.inside import environment_of

SITE = load_site("local")
PLAIN = """\
image = "/images/a.sqsh"
workdir = "/srv"
mounts = ["${RUNNER_RUN}:${RUNNER_RUN}", "/data:/in:ro"]
[env]
TEXT = "it's $HOME and $${NOT} an # expansion"
JOINED = "/extra:${PATH}"
GONE = ""
LC_ALL = "C"
LATER = "${MAYBE:-default}"
"""


def test_ce_takes_the_edf_as_it_is(tmp_path):
    attachment = attach(environment_of(tmp_path, PLAIN), SITE, "ce")
    assert attachment.flags == ("--environment=${RUNNER_RUN}/environment.toml",)
    assert (attachment.prefix, attachment.exports, attachment.notes) == ((), {}, ())
    body = [line for line in attachment.files["environment.toml"].splitlines() if not line.startswith("#")]
    assert body == [
        'image = "/images/a.sqsh"',
        'workdir = "/srv"',
        "entrypoint = false",
        "writable = true",
        "mounts = [",
        '  "${RUNNER_RUN}:${RUNNER_RUN}",',
        '  "/data:/in:ro",',
        "]",
        "",
        "[env]",
        'TEXT = "it\'s $HOME and $${NOT} an # expansion"',
        'JOINED = "/extra:${PATH}"',
        'GONE = ""',
        'LC_ALL = "C"',
        'LATER = "${MAYBE:-default}"',
    ]


def test_pyxis_gets_one_list_of_mounts_and_variables_by_name_or_inside(tmp_path):
    attachment = attach(environment_of(tmp_path, PLAIN), SITE, "pyxis", {})
    assert attachment.flags == (
        "--container-image=/images/a.sqsh",
        "--container-mounts=${RUNNER_RUN}:${RUNNER_RUN},/data:/in:ro",
        "--container-workdir=/srv",
        "--container-writable",
        "--no-container-entrypoint",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--container-env=TEXT",
    )
    assert attachment.exports == {"TEXT": "it's $HOME and $${NOT} an # expansion", "ENROOT_LOGIN_SHELL": "n"}
    words = [expand(word, {}, "a word") for word in attachment.prefix]
    assert words[:2] == ["sh", "-c"] and words[3:] == ["sh", "env", "-u", "GONE", "LC_ALL=C"]
    joined = """'JOINED'="/extra:${PATH?is not defined, and [env] needs it}\""""
    assert words[2] == f"""export {joined} 'LATER'="${{MAYBE:-default}}" && exec "$@\""""
    assert attachment.notes == ()


@pytest.mark.uses("busybox")
@pytest.mark.parametrize("shell", [("dash",), ("bash", "--posix"), ("busybox", "sh")])
def test_a_value_that_refers_to_a_variable_is_no_word_of_a_command_line(tmp_path, shell):
    """No entry sees another. What a shell itself reads, such as PATH, becomes a word of `env`."""
    text = '[env]\nTOKEN = "${SECRET}"\nA = "${B}"\nB = "${A}"\nPATH = "/extra:${PATH}"\nLC_ALL = "${A}"\nGONE = ""\n'
    prefix = attach(environment_of(tmp_path, f'image = "/i.sqsh"\n{text}'), SITE, "pyxis", {}).prefix
    words = [expand(word, {}, "a word") for word in prefix]
    (tmp_path / "env").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/words\nexec /usr/bin/env "$@"\n')
    (tmp_path / "env").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}", "SECRET": "a b", "A": "1", "B": "2", "GONE": "x"}
    done = subprocess.run((*shell, *words[1:], "/usr/bin/env"), env=environ, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    path = f"/extra:{environ['PATH']}"
    wanted = {"TOKEN": "a b", "A": "2", "B": "1", "PATH": path, "LC_ALL": "1", "SECRET": "a b"}
    assert {name: found[name] for name in (*environ, *wanted) if name in found} == wanted
    if shell[0] != "busybox":  # it has its own `env`
        assert (tmp_path / "words").read_text().splitlines()[0].startswith(f"PATH={path} LC_ALL=1 env -u GONE")


@pytest.mark.parametrize("engine", ["pyxis", "enroot", "apptainer"])
def test_the_default_of_a_mount_is_decided_where_it_is_launched(tmp_path, engine):
    environment = environment_of(tmp_path, 'image = "/a.sqsh"\nmounts = ["${MAYBE:-/x}/y:/z"]\n')
    unset, put = attach(environment, SITE, engine, {}), attach(environment, SITE, engine, {"MAYBE": "/m"})
    assert any("/x/y:/z" in word for word in (*unset.flags, *unset.prefix))
    assert unset.notes == ("mounts.0: ${MAYBE:-…} becomes '/x': MAYBE is not set here",)
    assert any("${MAYBE}/y:/z" in word for word in (*put.flags, *put.prefix))


@pytest.mark.parametrize("engine", ["pyxis", "apptainer"])
def test_a_working_directory_that_the_image_names_is_entered_inside(tmp_path, engine):
    environment = environment_of(tmp_path, 'image = "/a.sqsh"\nworkdir = "${HERE}/x"\n')
    attachment = attach(environment, SITE, engine, {})
    assert not any(
        word.startswith(("--container-workdir", "--pwd")) for word in (*attachment.flags, *attachment.prefix)
    )
    enter = expand(attachment.prefix[-2], {}, "a word")
    assert enter == 'cd -- "${HERE?is not defined, and workdir needs it}/x" && exec "$@"'


def test_sarus_wants_commas_slashes_and_its_own_flag(tmp_path):
    text = (
        'image = "nvcr.io#nvidia/pytorch:24.06-py3"\nmounts = ["/a:/b:ro+private"]\ndevices = ["nvidia.com/gpu=all"]\n'
    )
    attachment = attach(environment_of(tmp_path, text), SITE, "sarus")
    emitted = attachment.files["environment.toml"]
    assert attachment.flags == ("--edf=${RUNNER_RUN}/environment.toml",)
    assert 'image = "nvcr.io/nvidia/pytorch:24.06-py3"' in emitted and '"/a:/b:ro,private"' in emitted
    assert 'devices = ["nvidia.com/gpu=all"]' in emitted and "--edf" in emitted


OFI = 'com.hooks.aws_ofi_nccl.enabled = "true"\n'


@pytest.mark.parametrize(
    ("annotations", "cxi"),
    [
        (OFI, '"true"'),
        (OFI + 'com.hooks.cxi.enabled = "false"\n', '"false"'),
        ('com.hooks.dcgm.enabled = "true"\n', ""),
    ],
)
def test_sarus_gets_the_slingshot_hook_where_the_environment_uses_slingshot(tmp_path, annotations, cxi):
    environment = environment_of(tmp_path, f'image = "a/b"\n[annotations]\n{annotations}')
    lines = attach(environment, SITE, "sarus").files["environment.toml"].splitlines()
    assert [line for line in lines if ".cxi." in line] == ([f"com.hooks.cxi.enabled = {cxi}"] if cxi else [])


def test_sarus_reports_annotations_that_have_no_effect(tmp_path):
    text = 'image = "a/b"\n[annotations.com.hooks]\naws_ofi_nccl.variant = "cuda12"\nnetstack.source = "host"\n'
    assert attach(environment_of(tmp_path, text), SITE, "sarus").notes == (
        "com.hooks.aws_ofi_nccl.variant has no effect: Sarus Suite's plugin fits every CUDA",
        "com.hooks.netstack.source has no effect: Sarus Suite uses a fixed network stack artifact",
    )


def test_sarus_sets_inside_what_srun_would_expand_with_the_hosts_variables(tmp_path):
    text = 'image = "a/b"\nworkdir = "${HERE}"\n[env]\nA = "1"\nB = "${A}"\nC = "plain"\nGONE = ""\n'
    attachment = attach(environment_of(tmp_path, text), SITE, "sarus")
    written = attachment.files["environment.toml"]
    assert 'C = "plain"' in written and "workdir" not in written and "${" not in written
    words = [expand(word, {}, "a word") for word in attachment.prefix]
    assert words[3:] == ["sh", "env", "-u", "GONE", "A=1"]
    assert words[2].startswith('cd -- "${HERE?is not defined, and workdir needs it}"')


def test_enroot_and_apptainer_are_words_in_front_of_the_command(tmp_path):
    text = 'image = "/a.sqsh"\nworkdir = "/w"\nmounts = ["/a:/b:ro"]\n[env]\nA = "1"\n'
    enroot = attach(environment_of(tmp_path, text), SITE, "enroot")
    assert enroot.prefix == (
        "enroot", "start", "--conf", "${RUNNER_RUN}/payload/enroot.conf", "--rw",
        "--mount", "/a:/b:none:x-create=auto,rbind,ro", "/a.sqsh",
        "sh", "-c", 'cd -- "/w" && exec "$@"', "sh", "env", "A=1",
    )  # fmt: skip
    apptainer = attach(environment_of(tmp_path, text), SITE, "apptainer")
    assert apptainer.prefix[:9] == (
        "apptainer", "exec", "--no-home", "--writable-tmpfs", "--pwd", "/w", "--bind", "/a:/b:ro", "/a.sqsh",
    )  # fmt: skip
    assert apptainer.exports == {"APPTAINERENV_A": "1"}
    assert set(enroot.exports.values()) == {"n"} and "ENROOT_LOGIN_SHELL" in enroot.exports


@pytest.mark.uses("busybox")
@pytest.mark.parametrize("shell", [("dash",), ("bash", "--posix"), ("busybox", "sh")])
def test_apptainer_gets_variables_and_the_folder_from_the_files_of_an_imported_image(tmp_path, shell):
    """The EDF's variables override the image's, which override the host's. Nothing of the entrypoint runs."""
    config = {
        "Env": [
            "PATH=/opt/venv/bin:/bin",
            "A=image",
            'B=" it\'s $(x) "',
            "UID=7",
            "NO",
            "ENROOT_X=1",
            "LD_LIBRARY_PATH=/cuda",
        ],
        "WorkingDir": f"{tmp_path}/it's",
        "Entrypoint": ["/bin/false"],
    }
    for name, (text, _) in metadata_files(config).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    edf = 'image = "/a.sqsh"\n[env]\nA = "edf"\nC = "${B}!"\nPATH = "/mine:${PATH}"\n'

    def seen(text: str) -> dict[str, str]:
        attachment = attach(environment_of(tmp_path, text), SITE, "apptainer", {})
        prefix = attachment.prefix[attachment.prefix.index("/a.sqsh") + 1 :]
        words = [expand(word, {}, "a word").replace("/etc/", f"{tmp_path}/etc/") for word in prefix]
        own = {name.removeprefix("APPTAINERENV_"): value for name, value in attachment.exports.items()}
        environ = {"PATH": os.defpath, "B": "host", "H": "host", **own}
        done = subprocess.run(
            (*shell, *words[1:], "/usr/bin/env"), env=environ, cwd="/", capture_output=True, text=True, check=True
        )
        assert not done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    found = seen(edf)
    assert {name: found[name] for name in ("A", "B", "C", "H", "UID", "PATH", "LD_LIBRARY_PATH", "PWD")} == {
        **{"A": "edf", "B": " it's $(x) ", "C": " it's $(x) !", "H": "host", "UID": "7"},
        **{"PATH": "/mine:/opt/venv/bin:/bin", "LD_LIBRARY_PATH": "/cuda:/.singularity.d/libs"},
        "PWD": f"{tmp_path}/it's",
    }
    assert not {"NO", "ENROOT_X", "runner_line"} & set(found)
    assert seen(f'workdir = "/tmp"\n{edf}')["PWD"] == "/"  # --pwd enters it
    for name in ("environment", "rc"):
        (tmp_path / "etc" / name).unlink()
    assert seen('image = "/a.sqsh"\n[env]\nA = "edf"\n')["A"] == "edf"


def test_the_host_engine_sets_variables_and_says_that_there_is_no_container(tmp_path):
    text = 'image = "/a.sqsh"\nworkdir = "/w"\nmounts = ["/a"]\n[env]\nA = "${B}/1"\nC = ""\n'
    attachment = attach(environment_of(tmp_path, text), SITE, "host")
    assert attachment.prefix == ("env", "--chdir=/w", "-u", "C", "A=${B}/1")
    assert attachment.notes == ("running without a container: the image '/a.sqsh' is not used",)


SSH = "com.hooks.ssh.enabled"
IMAGE = 'image = "/a.sqsh"\n'
ANNOTATED = IMAGE + '[annotations]\ncom.hooks.cxi.enabled = "true"\n'
REFUSED = [
    # engine, EDF, the field that is named, a word of the reason
    ("ce", IMAGE + 'devices = ["x"]\n', "devices", "does not read `devices`"),
    ("ce", 'image = "a.sqsh"\n', "image", "registry"),
    ("ce", IMAGE + 'mounts = ["${A:-/x}:/y", "/a\\n:/b"]\n', "mounts.1", "newline"),
    ("ce", IMAGE + "[env]\nA = 'x $${ y'\n", "env.A", "without a closing brace"),
    ("sarus", IMAGE, "image", "squashfs files"),
    ("sarus", 'image = "a/b"\nmounts = ["/a:/b:sqsh"]\n', "mounts.0", "squashfs files"),
    ("sarus", 'image = "a/b"\n[env]\nA = "$(id)"\n', "env.A", "$("),
    ("sarus", f'image = "a/b"\n[annotations]\n{SSH} = "true"\n', f"annotations.{SSH}", "SSH"),
    ("sarus", 'image = "a/b"\nworkdir = "/a;b"\n', "workdir", ";"),
    ("pyxis", IMAGE + 'mounts = ["/a,b:/c"]\n', "mounts.0", "a comma"),
    ("pyxis", IMAGE + 'mounts = ["/a:/b c"]\n', "mounts.0", "a space"),
    ("pyxis", IMAGE + 'mounts = ["/a:/b:sqsh"]\n', "mounts.0", "only the Container Engine"),
    *[(engine, "workdir = '/w'\n", "image", "is empty")
      for engine in ("sarus", "pyxis", "enroot", "apptainer", "podman", "docker", "sandbox")],
    ("pyxis", 'image = "foo.sqsh"\n', "image", "registry"),
    ("enroot", 'image = "ubuntu"\n', "image", "squashfs files"),
    ("enroot", IMAGE + 'mounts = ["/a:/b:sqsh"]\n', "mounts.0", "only the Container Engine"),
    ("enroot", IMAGE + 'mounts = ["/a b:/c"]\n', "mounts.0", "a space"),
    ("apptainer", IMAGE + "entrypoint = true\n", "entrypoint", "never runs the entrypoint"),
    ("apptainer", IMAGE + 'mounts = ["/a,b:/c"]\n', "mounts.0", "comma"),
    ("podman", IMAGE + 'mounts = ["/a,b:/c"]\n', "mounts.0", "comma"),
    ("pyxis", IMAGE + 'mounts = ["/a`b:/c"]\n', "mounts.0", "`"),
    ("sandbox", IMAGE + '[env]\nPWD = "/x"\n', "env.PWD", "sets PWD itself"),
    ("podman", IMAGE + '[env]\n"a.b" = "x"\n', "env.a.b", "shells drop"),
    ("podman", IMAGE + 'mounts = ["/a:/b:sqsh"]\n', "mounts.0", "squashfs"),
    ("podman", IMAGE + 'mounts = ["/a:/b:private"]\n', "mounts.0", "private"),
    ("docker", IMAGE, "image", "only images from its storage"),
    ("sandbox", 'image = "ubuntu:24.04"\n', "image", "registry"),
    ("sandbox", IMAGE + 'devices = ["hpe.com/cxi=all"]\n', "devices.0", "supports nvidia.com/gpu="),
    ("sandbox", IMAGE + 'mounts = ["/a:/b:rslave"]\n', "mounts.0", "rslave"),
    ("host", IMAGE + 'mounts = ["/a:/b"]\n', "mounts.0", "cannot be mounted at"),
    ("host", IMAGE + "entrypoint = true\n", "entrypoint", "no entrypoint to run"),
    *[(engine, ANNOTATED.replace("/a.sqsh", "a/b" if engine == "docker" else "/a.sqsh"), "annotations", "hooks")
      for engine in ("pyxis", "enroot", "apptainer", "podman", "docker", "sandbox")],
]  # fmt: skip


@pytest.mark.parametrize(("engine", "text", "field", "reason"), REFUSED)
def test_what_an_engine_cannot_express_raises_and_nothing_is_dropped(tmp_path, engine, text, field, reason):
    with pytest.raises(RunnerError) as caught:
        attach(environment_of(tmp_path, text), SITE, engine, {})
    assert f"the engine '{engine}' cannot use the value of {field}" in caught.value.what
    if field.partition(".")[0] in text:
        assert re.search(r"\.toml:\d+: the engine", caught.value.what)
    assert reason in caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("mount", "fix"),
    [("/a:/b c", "choose another target"), ("/a b:/c", "mount a symlink"), ("/a b:/a b", "mount a symlink")],
)
def test_a_target_that_cannot_be_mounted_is_to_be_changed_and_not_the_folder(tmp_path, mount, fix):
    with pytest.raises(RunnerError) as caught:
        attach(environment_of(tmp_path, f'{IMAGE}mounts = ["{mount}"]\n'), SITE, "pyxis", {})
    assert fix in caught.value.fix


@pytest.mark.parametrize("engine", ["podman", "docker", "apptainer", "sarus"])
def test_an_image_has_the_registry_with_a_slash_and_no_user_where_enroots_form_is_not_known(tmp_path, engine):
    named = environment_of(tmp_path, 'image = "nvcr.io#nvidia/pytorch:24.06-py3"\nentrypoint = false\n')
    attachment = attach(named, SITE, engine)
    text = "\n".join((*attachment.files.values(), *attachment.prefix))
    assert "nvcr.io/nvidia/pytorch:24.06-py3" in text
    digest = f"quay.io#me/a@sha256:{'0' * 64}"
    attach(environment_of(tmp_path, f'image = "{digest}"\nentrypoint = false\n'), SITE, engine)
    with pytest.raises(RunnerError) as caught:
        user = environment_of(tmp_path, 'image = "me@nvcr.io#nvidia/pytorch:24.06-py3"\nentrypoint = false\n')
        attach(user, SITE, engine)
    assert "contains a user name for the login" in caught.value.why
    assert caught.value.fix.endswith("nvcr.io/nvidia/pytorch:24.06-py3")


@pytest.mark.parametrize("engine", ["pyxis", "enroot", "podman", "docker", "apptainer"])
def test_an_annotation_that_switches_a_hook_off_asks_for_nothing(tmp_path, engine):
    image = "quay.io#a/b" if engine == "docker" else "/a.sqsh"
    head = f'image = "{image}"\nentrypoint = false\n[annotations]\n'
    attach(environment_of(tmp_path, head + 'com.hooks.cxi.enabled = "false"\n'), SITE, engine)
    with pytest.raises(RunnerError) as caught:
        attach(environment_of(tmp_path, head + 'com.hooks.cxi.enabled = "false"\na.b = "1"\n'), SITE, engine)
    assert "annotations (a.b)" in caught.value.why


DEBIAN_PROFILE = """\
if [ "$(id -u)" -eq 0 ]; then
  PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
else
  PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
fi
export PATH
"""


@pytest.mark.uses("unsquashfs")
@pytest.mark.parametrize(
    ("profile", "path", "lost"),
    [
        (DEBIAN_PROFILE, "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin", True),
        (DEBIAN_PROFILE, "/usr/local/bin:/usr/bin:/bin", False),
        ('PATH="/mine:$PATH"\n', "/opt/venv/bin:/usr/bin", False),
        ("# Ubuntu's says nothing of PATH\n", "/opt/venv/bin:/usr/bin", False),
    ],
)
def test_a_path_that_the_login_shell_of_the_container_engine_drops_is_told(tmp_path, profile, path, lost):
    etc = tmp_path / "root/etc"
    etc.mkdir(parents=True)
    (etc / "profile").write_text(profile)
    (etc / "environment").write_text(f'LANG="C"\nPATH="{path}"\n')
    image = tmp_path / "a.sqsh"
    subprocess.run(("mksquashfs", tmp_path / "root", image, "-quiet"), check=True, capture_output=True)
    notes = attach(environment_of(tmp_path, f'image = "{image}"\n'), SITE, "ce").notes
    assert any("PATH of the image is lost" in note and path in note for note in notes) is lost
    kept = environment_of(tmp_path, f'image = "{image}"\n[env]\nPATH = "/mine:${{PATH}}"\n')
    assert not attach(kept, SITE, "ce").notes


def test_every_engine_writes_the_emitted_edf_as_a_record(tmp_path):
    for name in ENGINES:
        image = "a/b" if name in {"sarus", "docker"} else "/a.sqsh"
        attachment = attach(environment_of(tmp_path, f'image = "{image}"\n'), SITE, name)
        assert f'image = "{image}"' in attachment.files["environment.toml"], name


def test_text_that_looks_like_a_variable_stays_text_in_every_word(tmp_path):
    value = 'a ${B} ${ $C "q" `id` \\'
    environment = Environment("x", None, "/a.sqsh", env={"A": literal(value), "PATH": literal(value)})
    pyxis = attach(environment, SITE, "pyxis", {})
    assert expand(pyxis.exports["A"], {}, "A") == value
    assert expand(pyxis.prefix[-1], {}, "word") == f"PATH={value}"
    host = attach(environment, SITE, "host", {})
    assert [expand(word, {}, "word") for word in host.prefix] == ["env", f"A={value}", f"PATH={value}"]


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(RunnerError, match="did you mean 'podman'"):
        attach(Environment("x", None, "/a.sqsh"), SITE, "podmam")


def test_the_sites_variables_and_mounts_lie_under_the_environments_own():
    site = Site("x", "", "slurm", "ce", "/i", env={"A": "site", "B": "site"}, mounts=("/fsx:/fsx", "/d:/d"))
    merged = with_site(Environment("x", None, "/a.sqsh", mounts=(Mount("/e", "/d"),), env={"A": "own"}), site)
    assert merged.env == {"A": "own", "B": "site"}
    assert merged.mounts == (Mount("/e", "/d"), Mount("/fsx", "/fsx"))


def test_the_site_names_the_engine_where_it_is_known():
    assert choose(load_site("alps-clariden")) == ("ce", "set by site alps-clariden")
    assert choose(load_site("local"))[0] in {"sandbox", "podman", "apptainer", "host"}
