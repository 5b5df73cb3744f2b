"""The host's package settings reach a build, rewritten for it, and leave no trace in its image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.build.host_settings import (
    Source,
    apt_settings,
    own_mirror,
    pip_layers,
    pip_settings,
    read_sources,
    release,
    without_credentials,
)
from tests.images.bench import Bench

DEBIAN = ("debian", "bookworm")


def settings(environ: dict[str, str], home: Path):
    environ = {"HOME": str(home), "XDG_CONFIG_DIRS": str(home / "none"), "PIP_CONFIG_FILE": "/dev/null", **environ}
    return pip_settings(pip_layers(environ), environ)


def test_a_host_without_settings_offers_nothing(tmp_path: Path) -> None:
    assert not settings({}, tmp_path)


def test_variables_beat_files_and_only_what_says_where_packages_are_is_taken(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex_url = https://file.example/simple\ntimeout = 7\nuser = true\ntarget = /x\n"
        "[install]\ntrusted-host = a.example\n b.example\n[list]\nformat = json\n"
    )
    environ = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_INDEX_URL": "https://env.example/simple"}
    text = settings({**environ, "PIP_REQUIRE_VIRTUALENV": "1"}, tmp_path).files["pip.conf"]
    assert "index-url = https://env.example/simple" in text
    assert "timeout = 7" in text
    assert "b.example" in text
    assert not any(word in text for word in ("user", "target", "virtualenv", "format", "file.example"))
    assert "no-cache-dir = true" in text


def test_pip_config_file_replaces_the_users_own_files(tmp_path: Path) -> None:
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text("[global]\nindex-url = https://own.example/simple\n")
    (tmp_path / "named.conf").write_text("[global]\ntimeout = 7\n")
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "named.conf")}
    assert "own.example" not in settings(environ, tmp_path).files["pip.conf"]
    absent = settings({**environ, "PIP_CONFIG_FILE": str(tmp_path / "absent.conf")}, tmp_path)
    assert "own.example" in absent.files["pip.conf"]


def test_local_folders_and_file_indexes_are_mounted_and_rewritten(tmp_path: Path) -> None:
    for name in ("wheels", "pypi/simple", "pypi/files"):
        (tmp_path / name).mkdir(parents=True)
    environ = {
        "PIP_FIND_LINKS": f"{tmp_path}/wheels https://far.example/whl {tmp_path}/absent",
        "PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/pypi/simple",
    }
    found = settings(environ, tmp_path)
    assert found.mounts == (
        (f"{tmp_path}/wheels", "/dev/runner/packages-0"),
        (f"{tmp_path}/pypi", "/dev/runner/packages-1"),
    )
    assert "find-links = /dev/runner/packages-0\n    https://far.example/whl\n" in found.files["pip.conf"]
    assert "extra-index-url = file:///dev/runner/packages-1/simple\n" in found.files["pip.conf"]
    assert str(tmp_path) not in found.files["pip.conf"]
    assert any(place.endswith("absent") for place in found.missing)


@pytest.mark.parametrize("name", ["PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_ca_bundle_is_offered_to_every_program(tmp_path: Path, name: str) -> None:
    bundle = tmp_path / "company.crt"
    bundle.write_text("CA")
    found = settings({name: str(bundle)}, tmp_path)
    assert found.mounts == ((str(bundle), "/dev/runner/ca.crt"),)
    assert set(found.arguments) >= {"PIP_CERT", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"}
    assert set(found.arguments.values()) == {"/dev/runner/ca.crt", "/dev/runner/pip.conf"}


def test_a_pip_conf_that_pip_cannot_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("no section\n")
    with pytest.raises(RunnerError, match="cannot read pip's configuration"):
        settings({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}, tmp_path)


def test_credentials_are_not_shown() -> None:
    assert without_credentials("x = https://me:s3cret@h.example/simple\n") == "x = https://***@h.example/simple\n"


SOURCES = """\
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

# Types: deb
Enabled: no
Types: deb
URIs: http://off.example
Suites: bookworm
Components: main
"""


def test_sources_of_both_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("# no\ndeb [arch=amd64] http://a.example/debian bookworm main # x\n")
    (tmp_path / "sources.list.d/debian.sources").write_text(SOURCES)
    key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    assert read_sources(tmp_path) == (
        Source("http://a.example/debian", "bookworm", "main", "arch=amd64"),
        Source("http://mirror.example/debian", "bookworm", "main contrib", key),
        Source("http://mirror.example/debian", "bookworm-updates", "main contrib", key),
    )


def test_public_servers_are_no_mirror_and_other_suites_stay_out() -> None:
    public = Source("http://deb." + "debian.org/debian", "bookworm", "main")
    other = Source("http://apt.example", "cloud-sdk-bookworm", "main")
    mirror = Source("http://mirror.example/debian", "bookworm", "main")
    assert own_mirror((public, other), "bookworm") == ()
    assert own_mirror((public, other, mirror), "bookworm") == (public, mirror)


def test_apt_is_offered_only_to_the_same_release() -> None:
    mirror = (Source("http://mirror.example/debian", "bookworm", "main"),)
    same = apt_settings(DEBIAN, DEBIAN, mirror, {})
    assert same.files["sources.list"] == "deb http://mirror.example/debian bookworm main\n"
    assert 'Dir::Etc::SourceList "/dev/runner/sources.list";' in same.files["apt.conf"]
    assert same.arguments == {"APT_CONFIG": "/dev/runner/apt.conf"}
    assert not apt_settings(("ubuntu", "noble"), DEBIAN, mirror, {})
    proxied = apt_settings(("ubuntu", "noble"), DEBIAN, mirror, {"Acquire::http::Proxy": "http://p.example:3128"})
    assert proxied.files == {"apt.conf": 'Acquire::http::Proxy "http://p.example:3128";\n'}
    assert release('ID=debian\nVERSION_CODENAME=bookworm\nNAME="x"\n') == DEBIAN


def test_apt_itself_understands_what_is_written(tmp_path: Path) -> None:
    mirror = (Source("http://mirror.example/debian", "bookworm", "main", "signed-by=/k.gpg"),)
    texts = apt_settings(DEBIAN, DEBIAN, mirror, {"Acquire::http::Proxy": "http://p.example:3128"}).files
    for file, text in texts.items():
        (tmp_path / file).write_text(text.replace("/dev/runner", str(tmp_path)))
    environ = {"PATH": "/usr/bin:/bin", "APT_CONFIG": str(tmp_path / "apt.conf")}
    asked = ("apt-get", "update", "--print-uris")
    shown = subprocess.run(asked, env=environ, text=True, capture_output=True, check=True).stdout.splitlines()
    assert "'http://mirror.example/debian/dists/bookworm/InRelease'" in [line.split()[0] for line in shown]
    assert all(line.startswith("'http://mirror.example/debian/dists/bookworm/") for line in shown)


TRACES = ("index.secret.example", "company-ca-text", "only-wheel", "/dev/runner", "packages-0")


@pytest.mark.uses("podman", "busybox")
def test_a_build_sees_the_settings_and_its_image_keeps_no_trace(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config, every file and every layer of the finished image are searched; no mount point is left either."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/only-wheel.whl").write_text("wheel")
    (tmp_path / "ca.crt").write_text("company-ca-text")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@index.secret.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.crt"))
    # the patterns do not match themselves: this text stands in the image's history
    words = ("index.secre[t] $PIP_CONFIG_FILE", "company-c[a] $SSL_CERT_FILE")
    seen = " && ".join([*(f"grep -q {word}" for word in words), "ls /dev/runne[r]/* | grep o[n]ly"])
    lines = ["FROM scratch AS one"]
    lines += ["COPY containers/busybox /bin/busybox", 'RUN ["/bin/busybox", "--install", "-s", "/bin"]', f"RUN {seen}"]
    lines += ["FROM one", f"RUN {seen} && touch /made", "ENV A=b"]
    bench.write("trace", "\n".join(lines) + "\n")
    image = bench.build("trace")
    assert bench.said("the build uses these settings of this machine, but does not store them in the image: CA bundle")
    assert not bench.said("me:secret")
    saved = tmp_path / "saved"
    bench.engine("save", "--format=docker-dir", "--output", str(saved), image.reference)
    listed: list[str] = []
    for path in saved.iterdir():
        unpacked = subprocess.run(("gzip", "-dc", str(path)), capture_output=True, check=False).stdout
        data = unpacked or path.read_bytes()
        # the one ARG instruction and its names stand in the history; what they stand for does not
        found = [
            trace
            for trace in TRACES
            if trace.encode() in data and not (trace == "/dev/runner" and b"created_by" in data)
        ]
        assert not found, (path.name, found)
        names = subprocess.run(("tar", "t"), input=data, capture_output=True, check=False).stdout.decode().split()
        listed += names
    assert "made" in listed
    assert not [name for name in listed if "runner" in name or "pip" in name or "ca.crt" in name]
    assert not [name for name in listed if name.startswith("dev/") and name != "dev/"]
    config = bench.engine("image", "inspect", "--format={{json .Config}}", image.id)
    assert not any(word in config for word in (*TRACES, "PIP_", "SSL_CERT"))
