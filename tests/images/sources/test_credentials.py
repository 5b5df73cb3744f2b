"""Logins are found where enroot, podman and docker keep them, in a fixed order, and nothing in them is ever run."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.sources.registry.credentials import (
    Login,
    Search,
    auth_files,
    auth_keys,
    enroot_file,
    find_login,
    how_to_add,
)


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


class Home:
    """A home folder with the files of enroot, podman and docker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"HOME": str(folder), "PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(folder / "run")}

    def enroot(self, text: str) -> Path:
        return self._write(".config/enroot/.credentials", text)

    def podman(self, content: object) -> Path:
        return self._write("run/containers/auth.json", json.dumps(content))

    def docker(self, content: object) -> Path:
        return self._write(".docker/config.json", json.dumps(content))

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def find(self, registry: str = "reg.example", repository: str = "team/app", user: str = "") -> Search:
        return find_login(registry, repository, user, self.environ)

    def login(self, registry: str = "reg.example", repository: str = "team/app", user: str = "") -> tuple[str, str]:
        found = self.find(registry, repository, user).login
        return (found.user, found.password) if found else ("", "")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_no_file_is_no_login_and_each_place_is_named(home: Home) -> None:
    search = home.find()
    assert search.login is None
    assert [place.partition(" (")[0].removeprefix(str(home.folder)) for place in search.looked] == [
        "/.config/enroot/.credentials",
        "/run/containers/auth.json",
        "/.config/containers/auth.json",
        "/.docker/config.json",
    ]


def test_enroot_comes_before_podman_and_podman_before_docker(home: Home) -> None:
    home.docker({"auths": {"reg.example": auth("docker", "3")}})
    assert home.login() == ("docker", "3")
    home.podman({"auths": {"reg.example": auth("podman", "2")}})
    assert home.login() == ("podman", "2")
    path = home.enroot("# mine\nmachine other login x password y\nmachine reg.example login enroot password 1\n")
    assert home.login() == ("enroot", "1")
    assert home.find().login == Login("enroot", "1", str(path))


@pytest.mark.parametrize("registry", ["reg.example:5000", "127.0.0.1:5102", "[::1]:5000"])
def test_enroots_file_has_hosts_without_ports(home: Home, registry: str) -> None:
    """enroot, and curl for it, look for the host alone. A line for the host with its port is more specific."""
    host = registry.rpartition(":")[0]
    home.enroot(f"machine {host} login a password 1\n")
    assert home.login(registry) == ("a", "1")
    home.enroot(f"machine {host} login a password 1\nmachine {registry} login b password 2\n")
    assert home.login(registry) == ("b", "2") and home.login(host) == ("a", "1")
    assert f"machine {host} login" in how_to_add(registry, home.environ)
    home.enroot("machine other login a password 1\n")
    assert f"has no line with a password for {host})" in home.find(registry).looked[0]


def test_a_named_user_gets_their_own_login_wherever_it_is(home: Home) -> None:
    home.enroot("machine reg.example login one password 1\nmachine reg.example login two password 2\n")
    home.docker({"auths": {"reg.example": auth("three", "3")}})
    assert home.login(user="two") == ("two", "2")
    assert home.login(user="three") == ("three", "3")
    with pytest.raises(RunnerError) as caught:
        home.login(user="four")
    assert "'four'" in caught.value.what
    assert ".docker/config.json (has a login for another user)" in caught.value.why
    assert "machine reg.example login four password" in caught.value.fix


def test_environment_variables_move_the_files(home: Home, tmp_path: Path) -> None:
    """ENROOT_CONFIG_PATH, XDG_CONFIG_HOME, REGISTRY_AUTH_FILE and DOCKER_CONFIG."""
    assert enroot_file({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/enroot/.credentials")
    assert enroot_file({"HOME": "/h", "ENROOT_CONFIG_PATH": "/e"}) == Path("/e/.credentials")
    assert auth_files({"HOME": "/h"}) == (Path("/h/.config/containers/auth.json"), Path("/h/.docker/config.json"))
    assert auth_files({"HOME": "/h", "REGISTRY_AUTH_FILE": "/r.json", "DOCKER_CONFIG": "/d"}) == (
        Path("/r.json"),
        Path("/d/config.json"),
    )


def test_podmans_own_places_serve_where_the_variable_is_missing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """podman sets XDG_RUNTIME_DIR itself. /run/containers of root's podman may be closed to others."""
    del home.environ["XDG_RUNTIME_DIR"]
    monkeypatch.setattr("runner.images.sources.registry.credentials._RUN", home.folder)
    after = auth_files(home.environ)
    assert len(after) == 2
    user = os.geteuid()
    names = (f"user/{user}/containers/auth.json", f"containers/{user}/auth.json")
    paths = tuple(home._write(name, json.dumps({"auths": {"reg.example": auth(name, "1")}})) for name in names)
    assert auth_files(home.environ) == (*paths, *after)
    assert home.login() == (names[0], "1")
    paths[0].unlink()
    assert home.login() == (names[1], "1")
    assert auth_files({**home.environ, "XDG_RUNTIME_DIR": "/r"}) == (Path("/r/containers/auth.json"), *after)


def test_a_password_takes_variables_but_runs_nothing(home: Home, tmp_path: Path) -> None:
    """enroot hands the line to a shell; here ${NAME} is put in and that is all."""
    home.environ |= {"KEY": "s3cret$(touch x)`id`", "NGC": "n"}
    home.enroot("machine reg.example login $oauthtoken password a-${KEY}-b\n")
    assert home.login() == ("$oauthtoken", "a-s3cret$(touch x)`id`-b")
    home.enroot("machine reg.example login u password $NGC\n")
    assert home.login() == ("u", "n")
    home.enroot("machine reg.example login u password pa$NGC$word\n")
    assert home.login() == ("u", "pa$NGC$word")
    home.enroot("machine reg.example login u password ${NOT_THERE}\n")
    with pytest.raises(RunnerError, match="NOT_THERE"):
        home.login()
    for code in (f"$(touch {tmp_path}/ran)", f"`touch {tmp_path}/ran`", f"x$(touch {tmp_path}/ran)"):
        home.enroot(f"machine reg.example login u password {code}\n")
        with pytest.raises(RunnerError, match="is a command") as caught:
            home.login()
        assert "touch" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_secrets_are_not_in_the_words_for_a_login() -> None:
    assert "secret" not in repr(Login("user", "secret1", "file", "secret2"))


@pytest.mark.parametrize(
    "line",
    [
        "machine nvcr.io login $oauthtoken password key",
        "machine authn.nvidia.com login $oauthtoken password key",
        "  machine   nvcr.io   login\t$oauthtoken  password key  ",
    ],
)
def test_nvidia_registry_under_either_of_its_names(home: Home, line: str) -> None:
    home.enroot(line + "\n")
    assert home.login("nvcr.io", "nvidia/pytorch") == ("$oauthtoken", "key")


@pytest.mark.parametrize("machine", ["docker.io", "registry-1.docker.io", "auth.docker.io", "index.docker.io"])
def test_docker_hub_under_each_of_its_names(home: Home, machine: str) -> None:
    home.enroot(f"machine {machine} login u password p\n")
    assert home.login("docker.io", "library/debian") == ("u", "p")


def test_a_token_host_is_taken_for_its_own_registry_only(home: Home) -> None:
    """A registry that sends us to another's token server does not get that one's login."""
    home.enroot("machine authn.nvidia.com login $oauthtoken password key\n")
    assert home.find("evil.example").login is None


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
        ("https://reg.example", "reg.example"),
        ("https://reg.example/v2/", "reg.example"),
        ("reg.example", "reg.example"),
        ("reg.example/team", "reg.example"),
        ("reg.example/team/app", "reg.example"),
        ("127.0.0.1:5000", "127.0.0.1:5000"),
    ],
)
def test_keys_of_auth_files(home: Home, key: str, registry: str) -> None:
    home.docker({"auths": {key: auth("u", "pass:with:colons"), "reg.example/tea": auth("wrong", "x")}})
    assert home.login(registry) == ("u", "pass:with:colons")


def test_the_key_of_a_repository_wins_over_the_registrys(home: Home) -> None:
    home.podman(
        {"auths": {"reg.example": auth("all", "1"), "reg.example/team": auth("team", "2"), "reg.example/team/app": {}}}
    )
    assert home.login() == ("team", "2")
    assert home.login(repository="else/app") == ("all", "1")
    assert auth_keys("r", "a/b") == ("r/a/b", "r/a", "r")


def test_an_identity_token(home: Home) -> None:
    home.docker({"auths": {"reg.example": {**auth("00000000-0000", ""), "identitytoken": "token"}}})
    found = home.find().login
    assert found is not None and found.identity_token == "token"


def helper(home: Home, name: str, script: str) -> None:
    folder = home.folder / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def helpers(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    home.environ["PATH"] = f"{home.folder}/bin:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", home.environ["PATH"])
    return home


def test_a_credential_helper_is_asked_by_the_registrys_name(helpers: Home) -> None:
    """credHelpers for one registry, credsStore for the rest; Docker Hub by its old address."""
    helper(helpers, "one", 'read s; echo "{\\"ServerURL\\":\\"$s\\",\\"Username\\":\\"one\\",\\"Secret\\":\\"$s\\"}"')
    helper(helpers, "rest", 'read s; echo "{\\"Username\\":\\"rest\\",\\"Secret\\":\\"$s\\"}"')
    helpers.docker({"credHelpers": {"reg.example": "one"}, "credsStore": "rest", "auths": {"reg.example": {}}})
    assert helpers.login() == ("one", "reg.example")
    assert helpers.login("other.example") == ("rest", "other.example")
    assert helpers.login("docker.io") == ("rest", "https://index.docker.io/v1/")


def test_a_helpers_identity_token(helpers: Home) -> None:
    helper(helpers, "t", 'echo \'{"Username":"<token>","Secret":"abc"}\'')
    helpers.docker({"credsStore": "t"})
    found = helpers.find().login
    assert found is not None and (found.user, found.identity_token) == ("", "abc")


@pytest.mark.parametrize(
    ("name", "script", "said"),
    [
        ("absent", None, "is not on PATH"),
        ("empty", "echo 'credentials not found in native keychain'; exit 1", "credentials not found"),
        ("mad", "echo no json", "printed something other than a login"),
        ("../../bin/sh", None, "is not the name of a credential helper"),
    ],
)
def test_a_helper_that_does_not_help_is_passed_over_and_named(
    helpers: Home, name: str, script: str | None, said: str
) -> None:
    """A public image can still be read, and an error for a private one says what the helper said."""
    if script:
        helper(helpers, name, script)
    helpers.docker({"credsStore": name})
    search = helpers.find()
    assert search.login is None
    assert said in search.looked[-1] and f"docker-credential-{name}" in search.looked[-1]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"auths": 3}', '{"auths": {"reg.example": 3}}', "[" * 10**5])
def test_damaged_files_are_an_error_or_nothing(home: Home, text: str) -> None:
    path = home.docker({})
    path.write_text(text)
    try:
        assert home.find().login is None
    except RunnerError as error:
        assert str(path) in error.what


def test_an_auth_that_is_no_base64_is_named_without_being_shown(home: Home) -> None:
    home.docker({"auths": {"reg.example": {"auth": "hunter2!"}}})
    with pytest.raises(RunnerError, match=r"reg\.example") as caught:
        home.find()
    assert "hunter2" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_an_error(home: Home) -> None:
    path = home.enroot("")
    path.unlink()
    path.mkdir()
    with pytest.raises(RunnerError, match="cannot read the logins"):
        home.find()
