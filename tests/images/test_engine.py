"""Which engine is chosen and why; where podman's defaults fail it gets a private containers.conf, the user's wins."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tomllib
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.engine import (
    choose_engine,
    docker_refusal,
    needed_settings,
    podman_environment,
    read_configuration,
)
from tests.images.bench import TINY, Bench
from tests.lab.ordinary_user import ordinary_user


def test_podman_is_first_and_needs_no_daemon() -> None:
    engine = choose_engine(None, os.environ)
    assert (engine.name, engine.why) == ("podman", "it is on PATH and needs no daemon")


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RunnerError) as caught:
        choose_engine("podmn", os.environ)
    assert caught.value.why == "the known names are docker, podman"


def test_neither_engine_says_why_of_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runner.machine.process.which", lambda program: None)
    with pytest.raises(RunnerError) as caught:
        choose_engine(None, {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert "podman: it is not on PATH" in caught.value.why
    assert f"docker: there is no socket {tmp_path}/none.sock" in caught.value.why
    assert "podman" in caught.value.fix


def test_docker_is_taken_where_podman_is_not(docker_socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.machine.process.which", lambda program: None)
    engine = choose_engine(None, {"DOCKER_HOST": docker_socket})
    assert (engine.name, engine.why) == ("docker", "podman: it is not on PATH; docker's daemon answers")


@pytest.mark.parametrize("chosen", ["currentContext", "DOCKER_CONTEXT"])
def test_dockers_current_context_names_its_socket(tmp_path: Path, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker context use colima` leaves it; DOCKER_HOST wins, as with docker's own command."""
    name, host = "colima", f"unix://{tmp_path}/colima.sock"
    folder = tmp_path / ".docker/contexts/meta" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    meta = {"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    monkeypatch.setenv("HOME", str(tmp_path))
    current = {} if chosen == "DOCKER_CONTEXT" else {"currentContext": name}
    (tmp_path / ".docker/config.json").write_text(json.dumps(current))
    environ = {"DOCKER_CONTEXT": name} if chosen == "DOCKER_CONTEXT" else {}
    assert f"there is no socket {tmp_path}/colima.sock" in docker_refusal(environ)
    assert "there is no socket /x" in docker_refusal({**environ, "DOCKER_HOST": "unix:///x"})
    (folder / "meta.json").write_text("{")
    assert "docker does not answer" in docker_refusal(environ)


def test_a_socket_that_refuses_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    assert "does not answer" in docker_refusal({"DOCKER_HOST": f"unix://{path}"})  # nobody listens behind it
    server.close()
    if os.geteuid() == 0:
        with ordinary_user() as user:
            path.chmod(0o600)
            tmp_path.chmod(0o755)
            code = f"import os; print(os.access({str(path)!r}, os.R_OK | os.W_OK))"
            assert user.run("python3", "-c", code).stdout == "False\n"  # what the next line asks, as that user
    path.unlink()
    assert "there is no socket" in docker_refusal({"DOCKER_HOST": f"unix://{path}"})


def test_a_machine_without_limits_of_its_own_needs_nothing() -> None:
    assert needed_settings(True, 1024, 1024, False) == []
    assert needed_settings(False, 1024, 1 << 20, False) == []


def test_limits_and_runtime_are_set_where_they_must_be() -> None:
    found = {key: value for _, key, value, _ in needed_settings(False, 1024, 20000, True)}
    assert found["default_ulimits"] == ["nofile=1024:20000"]
    assert found.get("runtime", "runc") == "runc"


def test_the_users_own_configuration_wins_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.images.engine._has_resource_capability", lambda: False)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 20000))
    monkeypatch.setattr("runner.images.engine._is_hybrid", lambda: True)
    own = tmp_path / "own.conf"
    own.write_text('[engine]\nruntime = "mine"\n[containers]\nenv = ["A=1"]\n')
    environ = {"CONTAINERS_CONF": str(own), "HOME": str(tmp_path), "STORAGE_DRIVER": "overlay"}
    env, notes = podman_environment(environ)
    written = tomllib.loads(Path(env["CONTAINERS_CONF"]).read_text())
    assert written["engine"]["runtime"] == "mine"
    assert written["containers"] == {"env": ["A=1"], "default_ulimits": ["nofile=1024:20000"]}
    assert len(notes) == 1 and "default_ulimits: root without CAP_SYS_RESOURCE" in notes[0]
    assert own.read_text().startswith("[engine]")
    # a configuration that says all of it itself is left alone
    own.write_text(Path(env["CONTAINERS_CONF"]).read_text())
    assert podman_environment(environ) == ({}, ())


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.conf").write_text("[engine\n")
    with pytest.raises(RunnerError, match=r"cannot read .*c\.conf"):
        read_configuration({"CONTAINERS_CONF": str(tmp_path / "c.conf")})


@pytest.mark.uses("podman", "busybox")
def test_a_build_works_with_what_this_machine_has(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lab's containers.conf: only what the tool itself adds."""
    monkeypatch.delenv("CONTAINERS_CONF")
    bench.write("defaults", TINY + "ENV DEFAULTS=1\n")
    assert bench.build("defaults").architecture
