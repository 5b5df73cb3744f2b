"""An image in a registry is found, believed by its digest only, and read with the login that belongs to it."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.images.reference import Reference, registry_reference
from runner.images.sources.registry.credentials import find_login
from runner.images.sources.registry.repository import (
    LayeredImage,
    Repository,
    ask_digest,
    open_registry_image,
)
from runner.images.sources.registry.tokens import parse_challenges
from runner.images.sources.registry.web import Patience, Web, is_loopback, proxy_for
from runner.machine import probe
from tests.conftest import need
from tests.images.handmade import INDEX_TYPE, MANIFEST_TYPE, describe, digest_of, make_config, make_index, make_manifest
from tests.images.sources.hostile import Hostile, Request, download_threads
from tests.lab.podman import Podman
from tests.lab.registry import Registry
from tests.waiting import until

QUICK = Patience(tries=3, backoff_seconds=0.01, longest_wait_seconds=1)
USER, PASSWORD = "alice", "open sesame"
# bcrypt of PASSWORD, cost 5
USERS = f"{USER}:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


class Made:
    """A small image: two layers, a configuration, a manifest for each architecture, an index of both."""

    def __init__(self) -> None:
        layers = (b"lower" * 1000, b"upper" * 2_000_000)
        self.layers = [digest_of(data) for data in layers]
        self.blobs = dict(zip(self.layers, layers, strict=True))
        self.manifests: dict[str, tuple[str, bytes]] = {}
        entries = [self._image(architecture, layers) for architecture in ("arm64", "amd64")]
        self.index = self._manifest("1", INDEX_TYPE, make_index(*entries))

    def _manifest(self, tag: str, kind: str, data: bytes) -> str:
        self.manifests[tag] = self.manifests[digest_of(data)] = kind, data
        return digest_of(data)

    def _image(self, architecture: str, layers: Sequence[bytes]) -> dict[str, Any]:
        runtime = {"Env": ["A=1"], "Entrypoint": ["/entry"]}
        config = make_config(layers, architecture=architecture, config=runtime)
        manifest = make_manifest(config, layers)
        self.blobs[digest_of(config)] = config
        self._manifest(architecture, MANIFEST_TYPE, manifest)
        return describe(manifest, MANIFEST_TYPE, platform={"architecture": architecture, "os": "linux"})

    def serve(self, request: Request) -> None:
        """What a registry answers."""
        kind, _, name = request.path.partition("/v2/team/app/")[2].partition("/")
        if request.path == "/v2/":
            request.answer(200, b"{}")
        elif kind == "manifests" and name in self.manifests:
            media_type, data = self.manifests[name]
            request.answer(200, data, Content_Type=media_type, Docker_Content_Digest=digest_of(data))
        elif kind == "blobs" and name in self.blobs:
            request.blob(self.blobs[name])
        elif kind == "tags":
            request.answer(200, json.dumps({"tags": ["1", "amd64", "arm64", "24.06-py3"]}).encode())
        else:
            request.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}')

    def push(self, address: str, authorization: str = "") -> None:
        """Put the image into a real registry."""
        host = http.client.HTTPConnection(address)
        login = {"Authorization": authorization} if authorization else {}

        def ask(method: str, path: str, body: bytes = b"", **headers: str) -> http.client.HTTPResponse:
            host.request(method, path, body, {**login, **headers})
            answer = host.getresponse()
            answer.read()
            assert answer.status in (201, 202), f"{method} {path}: {answer.status}"
            return answer

        for digest, data in self.blobs.items():
            place = ask("POST", "/v2/team/app/blobs/uploads/").headers["Location"].partition(address)[2]
            ask("PUT", f"{place}&digest={digest}", data)
        # an index only after what it lists
        for tag in ("arm64", "amd64", "1"):
            kind, data = self.manifests[tag]
            ask("PUT", f"/v2/team/app/manifests/{tag}", data, **{"Content-Type": kind})
        host.close()


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def add_login(environ: dict[str, str], machine: str, user: str = USER, password: str = PASSWORD) -> None:
    path = Path(environ["HOME"], ".docker/config.json")
    path.parent.mkdir(exist_ok=True)
    auths = json.loads(path.read_text())["auths"] if path.exists() else {}
    auths[machine] = {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
    path.write_text(json.dumps({"auths": auths}))


def image_of(reference: str, environ: dict[str, str], **options: Any) -> tuple[LayeredImage, list[bytes]]:
    """The image and its layers' bytes, the uppermost first, as the import reads them."""
    options = {"patience": QUICK, **options}
    name = replace(registry_reference(reference), user=options.pop("user", ""))
    architecture = options.pop("architecture", "amd64")
    with open_registry_image(name, Web(environ, **options), architecture) as image:
        image.expect(image.layers[::-1])
        bodies = []
        for layer in image.layers[::-1]:
            with layer.open() as reader:
                bodies.append(reader.read())
        return image, bodies


# the real registry


@pytest.fixture(scope="module")
def locked(made: Made) -> Iterator[Registry]:
    """A real registry that asks for a login."""
    need("docker-registry")
    with Registry(USERS) as server:
        made.push(server.address, "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
        yield server


def test_an_image_from_a_real_registry(made: Made, registry: Registry, environ: dict[str, str]) -> None:
    """By tag, by tag of the index (the platform chosen), by digest; layers as they were pushed."""
    made.push(registry.address)
    expected = [made.blobs[digest] for digest in made.layers[::-1]]
    for version in (":amd64", ":1", f"@{made.index}", f":wrong@{made.index}"):
        image, bodies = image_of(f"{registry.address}/team/app{version}", environ)
        assert bodies == expected
        assert image.digest == digest_of(made.manifests["amd64"][1])
        assert (image.architecture, image.config["Entrypoint"]) == ("amd64", ["/entry"])
        assert [layer.digest for layer in image.layers] == made.layers
    image, _ = image_of(f"{registry.address}/team/app:1", environ, architecture="arm64")
    assert image.digest == digest_of(made.manifests["arm64"][1])


def test_an_image_that_podman_has_pushed(
    podman: Podman, registry: Registry, busybox_image: str, environ: dict[str, str]
) -> None:
    """Its gzip layers are the bytes that their digests name."""
    remote = f"{registry.address}/lab/read:1"
    podman.run("push", "--quiet", busybox_image, remote)
    image, bodies = image_of(remote, environ, architecture=probe.architecture())
    assert image.layers and all(body.startswith(b"\x1f\x8b") for body in bodies)
    assert [digest_of(body) for body in bodies] == [layer.digest for layer in image.layers[::-1]]
    assert [len(body) for body in bodies] == [layer.size_bytes for layer in image.layers[::-1]]


def test_basic_authentication_of_a_real_registry(made: Made, locked: Registry, environ: dict[str, str]) -> None:
    """The right password opens it; a wrong one and none are errors that say where it was looked for."""
    reference = f"{locked.address}/team/app:1"
    with pytest.raises(RunnerError, match="denied access to") as caught:
        image_of(reference, environ)
    assert ".docker/config.json (does not exist)" in caught.value.why
    assert f"machine {locked.address.rpartition(':')[0]} login" in caught.value.fix
    add_login(environ, locked.address)
    assert len(image_of(reference, environ)[1]) == 2
    assert len(image_of(reference, environ, user=USER)[1]) == 2
    add_login(environ, locked.address, password="wrong one")
    with pytest.raises(RunnerError, match="denied access to") as caught:
        image_of(reference, environ)
    assert "'alice' from" in caught.value.why and "wrong one" not in str(caught.value)


def test_the_secret_of_a_login_is_never_logged(
    locked: Registry, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    add_login(environ, locked.address)
    with caplog.at_level("DEBUG"):
        image_of(f"{locked.address}/team/app:1", environ)
    assert "/team/app/" in caplog.text, "urllib3 logs each request"
    assert PASSWORD not in caplog.text
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in caplog.text


@pytest.mark.parametrize(
    ("tags", "fix"),
    [
        (("24.05-py3", "1"), "did you mean 24.05-py3?"),
        (("1",), "check the name and the tag"),
        (
            (),
            "check the name and the tag; for an image of another registry, write docker://REGISTRY#IMAGE:TAG, "
            "for example docker://nvcr.io#nvidia/pytorch:24.06-py3",
        ),
    ],
)
def test_an_image_that_docker_hub_has_is_not_of_another_registry(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tags: tuple[str, ...], fix: str
) -> None:
    """Without tags, the hub may not have the image at all."""
    reference = registry_reference("docker.io/team/app:24.5-py3")
    with closing(Web(environ)) as web:
        login = find_login(reference.registry, reference.repository, reference.user, environ)
        repository = Repository(reference, web, login)
        monkeypatch.setattr(repository, "tags", lambda: tags)
        assert repository._missing("manifest 24.5-py3", "").fix == fix


def test_a_missing_tag_is_an_error_with_those_nearby(made: Made, registry: Registry, environ: dict[str, str]) -> None:
    made.push(registry.address)
    with pytest.raises(RunnerError, match="does not exist") as caught:
        image_of(f"{registry.address}/team/app:amd46", environ)
    assert "amd64" in caught.value.fix and "no such tag" in caught.value.why
    with pytest.raises(RunnerError, match="does not exist") as caught:
        image_of(f"{registry.address}/team/nothing:1", environ)
    assert "no such image or tag" in caught.value.why


def test_another_architecture_is_refused(made: Made, registry: Registry, environ: dict[str, str]) -> None:
    made.push(registry.address)
    with pytest.raises(RunnerError, match="amd64"):
        image_of(f"{registry.address}/team/app:amd64", environ, architecture="arm64")
    with pytest.raises(RunnerError, match="no image for linux/s390x"):
        image_of(f"{registry.address}/team/app:1", environ, architecture="s390x")


# tokens


class Guarded:
    """A registry with bearer tokens: its token server, and tokens that hold for `uses` requests."""

    def __init__(self, made: Made, *, uses: int = 10**9, field: str = "token") -> None:
        self.made = made
        self.uses = uses
        self.field = field
        self.left: dict[str, int] = {}
        self.given = count()
        self.lock = Lock()
        self.tokens = Hostile(self._token)
        self.registry = Hostile(self._serve)

    def __enter__(self) -> Guarded:
        self.tokens.__enter__()
        self.registry.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self.tokens.__exit__(None, None, None)
        self.registry.__exit__(None, None, None)

    def _token(self, request: Request) -> None:
        token = f"token-{next(self.given)}"
        self.left[token] = self.uses
        request.answer(200, json.dumps({self.field: token}).encode())

    def _serve(self, request: Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.lock:
            self.left[token] = self.left.get(token, 0) - 1
            allowed = self.left[token] >= 0
        if allowed or request.path == "/v2/":
            return self.made.serve(request)
        challenge = f'Bearer realm="{self.tokens.url}/token",service="lab",scope="repository:team/app:pull"'
        return request.answer(401, b'{"errors":[]}', WWW_Authenticate=challenge)


@pytest.mark.parametrize("field", ["token", "access_token"])
def test_a_token_is_fetched_without_a_login_where_there_is_none(
    made: Made, environ: dict[str, str], field: str
) -> None:
    with Guarded(made, field=field) as server:
        assert len(image_of(f"{server.registry.address}/team/app:1", environ)[1]) == 2
        (asked,) = server.tokens.requests
    assert asked.path == "/token?scope=repository%3Ateam%2Fapp%3Apull&service=lab"
    assert "Authorization" not in asked.headers


def test_the_login_goes_to_the_token_server_and_the_token_to_the_registry(made: Made, environ: dict[str, str]) -> None:
    with Guarded(made) as server:
        add_login(environ, server.registry.address)
        image_of(f"{server.registry.address}/team/app:1", environ)
        assert all(seen.headers["Authorization"].startswith("Basic ") for seen in server.tokens.requests)
        sent = {seen.headers.get("Authorization", "") for seen in server.registry.requests}
    assert sent == {"", "Bearer token-0"}


def test_the_digest_of_a_tag_needs_a_token_and_no_pull(made: Made, environ: dict[str, str]) -> None:
    """Docker Hub counts each GET of a manifest."""
    with Guarded(made) as server:
        name = f"{server.registry.address}/team/app:1"
        assert ask_digest(registry_reference(name), environ, 0) == made.index
        asked = [(seen.method, seen.path) for seen in server.registry.requests]
    assert ("HEAD", "/v2/team/app/manifests/1") in asked and ("GET", "/v2/team/app/manifests/1") not in asked


def test_a_token_that_has_run_out_is_renewed(made: Made, environ: dict[str, str]) -> None:
    """In the middle of the parallel ranges too, once for all threads that were refused."""
    with Guarded(made, uses=3) as server:
        _, bodies = image_of(f"{server.registry.address}/team/app:1", environ)
        assert bodies == [made.blobs[digest] for digest in made.layers[::-1]]
        assert 1 < len(server.tokens.requests) <= 4


def test_an_identity_token_is_sent_as_a_form(made: Made, environ: dict[str, str]) -> None:
    with Guarded(made) as server:
        path = Path(environ["HOME"], ".docker/config.json")
        path.parent.mkdir()
        path.write_text(json.dumps({"auths": {server.registry.address: {"identitytoken": "refresh me"}}}))
        image_of(f"{server.registry.address}/team/app:1", environ)
        (asked,) = server.tokens.requests
    assert "refresh_token=refresh+me" in asked.form and "grant_type=refresh_token" in asked.form
    assert "refresh" not in asked.path


def test_a_refused_token_names_the_login(made: Made, environ: dict[str, str]) -> None:
    with Guarded(made) as server:
        server.tokens.behave = lambda request: request.answer(401, b'{"details":"incorrect username or password"}')
        add_login(environ, server.registry.address)
        with pytest.raises(RunnerError, match="denied access to") as caught:
            image_of(f"{server.registry.address}/team/app:1", environ)
    assert "incorrect username or password" in caught.value.why and "'alice'" in caught.value.why


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b"{}", b'{"token": 3}', b'{"token": "a\\r\\nX: y"}', b"[" * 99999]
)
def test_what_is_no_token_is_refused(made: Made, environ: dict[str, str], body: bytes) -> None:
    with Guarded(made) as server:
        server.tokens.behave = lambda request: request.answer(200, body)
        with pytest.raises(RunnerError, match="did not issue a token"):
            image_of(f"{server.registry.address}/team/app:1", environ)


def test_a_registry_that_refuses_every_token_ends(made: Made, environ: dict[str, str]) -> None:
    with Guarded(made, uses=0) as server, pytest.raises(RunnerError, match="denied access to"):
        image_of(f"{server.registry.address}/team/app:1", environ)
    assert len(server.tokens.requests) <= 3


def test_challenges_are_taken_apart() -> None:
    text = 'Basic realm="a, b", Bearer realm="https://x/t",service="s",scope="repository:a/b:pull,push",error=none'
    assert parse_challenges(text) == [
        ("basic", {"realm": "a, b"}),
        ("bearer", {"realm": "https://x/t", "service": "s", "scope": "repository:a/b:pull,push", "error": "none"}),
    ]
    assert parse_challenges("") == [] == parse_challenges('="')


# secrets stay where they belong


@pytest.mark.parametrize("same_host", [False, True])
def test_a_redirect_to_another_host_or_port_carries_no_login(
    made: Made, environ: dict[str, str], same_host: bool
) -> None:
    """Blobs often lie in another store; neither the password nor the token goes there."""
    with Guarded(made) as server, Hostile(made.serve, host="127.0.0.1" if same_host else "127.0.0.2") as store:
        add_login(environ, server.registry.address)
        inner = server.registry.behave

        def redirecting(request: Request) -> None:
            if "/blobs/" in request.path and "Authorization" in request.headers:
                return request.answer(307, b"", Location=store.url + request.path)
            return inner(request)

        server.registry.behave = redirecting
        _, bodies = image_of(f"{server.registry.address}/team/app:1", environ)
        assert bodies == [made.blobs[digest] for digest in made.layers[::-1]]
        assert len(store.requests) >= 4
        assert not [seen for seen in store.requests if "Authorization" in seen.headers]


def test_a_token_server_that_redirects_takes_no_login_along(made: Made, environ: dict[str, str]) -> None:
    with Guarded(made) as server, Hostile(lambda request: request.answer(200, b'{"token":"x"}')) as thief:
        add_login(environ, server.registry.address)
        server.tokens.behave = lambda request: request.answer(302, b"", Location=thief.url)
        with pytest.raises(RunnerError):
            image_of(f"{server.registry.address}/team/app:1", environ)
        assert thief.requests and not [seen for seen in thief.requests if "Authorization" in seen.headers]


def test_plain_http_to_other_machines_is_refused(made: Made, environ: dict[str, str]) -> None:
    """As the registry's own address (https is spoken there), as a redirect, and as a server of tokens."""
    with Guarded(made) as server:
        add_login(environ, server.registry.address)
        server.registry.behave = lambda request: request.answer(307, b"", Location="http://192.0.2.1/x")
        with pytest.raises(
            RunnerError, match=r"(?s)refusing to contact 192\.0\.2\.1 .*: runner import --allow-http, or "
        ):
            image_of(f"{server.registry.address}/team/app:1", environ)
        challenge = 'Bearer realm="http://192.0.2.1/token"'
        server.registry.behave = lambda request: request.answer(401, b"", WWW_Authenticate=challenge)
        with pytest.raises(
            RunnerError, match=r"(?s)refusing to contact 192\.0\.2\.1 .*: runner import --allow-http, or "
        ):
            image_of(f"{server.registry.address}/team/app:1", environ)


def test_a_registry_elsewhere_is_asked_in_plain_http_only_when_allowed(made: Made, environ: dict[str, str]) -> None:
    """Through a proxy, which answers for the name of the registry."""

    def proxy(request: Request) -> None:
        host = "http://registry.example:5000"
        if not request.path.startswith(host):
            return request.answer(502, b"")
        request.path = request.path.removeprefix(host)
        return made.serve(request)

    with Hostile(proxy) as server:
        environ |= {"HTTP_PROXY": f"http://me:pw@{server.address}", "HTTPS_PROXY": server.address}
        with pytest.raises(RunnerError, match=r"cannot reach registry\.example:5000") as caught:
            image_of("registry.example:5000/team/app:1", environ)
        assert server.address in caught.value.why and "pw" not in str(caught.value)
        assert len(image_of("registry.example:5000/team/app:1", environ, allow_http=True)[1]) == 2
        login = "Basic " + base64.b64encode(b"me:pw").decode()
        plain = server.asked("http://registry.example:5000/v2/team")
        assert {seen.headers.get("proxy-authorization") for seen in plain} == {login}


def test_a_login_goes_over_plain_http_only_by_a_second_word(made: Made, environ: dict[str, str]) -> None:
    """Basic, and a token server's: --allow-http reads without encryption, and still keeps the password."""
    host = "http://registry.example:5000"
    login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    challenges = ['Basic realm="lab"', f'Bearer realm="{host}/token",service="lab"']

    def proxy(request: Request) -> None:
        if request.path.startswith(f"{host}/token"):
            return request.answer(200, b'{"token": "for-nobody"}')
        if not request.path.startswith(host):
            return request.answer(502, b"")
        request.path = request.path.removeprefix(host)
        if request.path != "/v2/" and request.headers.get("Authorization") not in (login, "Bearer for-a-user"):
            return request.answer(401, b"", WWW_Authenticate=challenges[0])
        return made.serve(request)

    with Hostile(proxy) as server:
        environ |= {"HTTP_PROXY": server.address, "HTTPS_PROXY": server.address}
        add_login(environ, "registry.example:5000")
        for _ in challenges:
            challenges.reverse()
            with pytest.raises(RunnerError, match="denied access to") as caught:
                image_of("registry.example:5000/team/app:1", environ, allow_http=1)
            assert "is not encrypted" in caught.value.why
            assert "with runner import, --allow-http --allow-http (twice)" in caught.value.fix
            assert login not in {seen.headers.get("authorization") for seen in server.requests}
        assert len(image_of("registry.example:5000/team/app:1", environ, allow_http=2)[1]) == 2


class BothWays(Hostile):
    """A server that speaks TLS and plain http on one port."""

    def __init__(self, behave: Callable[[Request], None], certificate: str) -> None:
        super().__init__(behave)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        listening = self._server.socket

        def get_request() -> tuple[socket.socket, Any]:
            connection, peer = listening.accept()
            hello = connection.recv(1, socket.MSG_PEEK) == b"\x16"
            return (context.wrap_socket(connection, server_side=True) if hello else connection), peer

        self._server.get_request = get_request  # type: ignore[method-assign]


def test_a_bad_certificate_is_never_answered_by_plain_http(
    made: Made, environ: dict[str, str], certificate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stands between us and the registry can show a certificate of their own."""
    monkeypatch.setattr("runner.images.sources.registry.repository.is_loopback", lambda host: False)
    monkeypatch.setattr("runner.images.sources.registry.web.is_loopback", lambda host: False)
    with BothWays(made.serve, certificate) as server:
        add_login(environ, server.address)
        for allowed in (1, 2):
            with pytest.raises(RunnerError, match="cannot be verified"):
                image_of(f"{server.address}/team/app:1", environ, allow_http=allowed)
        assert server.requests == []


# what else users meet


def lying(made: Made, change: Callable[[Request], bool]) -> Hostile:
    return Hostile(lambda request: None if change(request) else made.serve(request))


def test_a_manifest_that_does_not_hash_to_its_digest_is_refused(made: Made, environ: dict[str, str]) -> None:
    """The one asked for by digest, the one that the registry announces, one of an index, and the configuration."""
    config = next(digest for digest, data in made.blobs.items() if b'"amd64"' in data)
    chosen = digest_of(made.manifests["amd64"][1])
    for lie in (f"manifests/{made.index}", f"manifests/{chosen}", f"blobs/{config}"):

        def change(request: Request, lie: str = lie) -> bool:
            if not request.path.endswith(lie):
                return False
            name = lie.partition("/")[2]
            data = made.manifests[name][1] if name in made.manifests else made.blobs[name]
            request.answer(200, data + b" ", Content_Type=MANIFEST_TYPE)
            return True

        with lying(made, change) as server, pytest.raises(RunnerError, match="cannot read") as caught:
            image_of(f"{server.address}/team/app@{made.index}", environ)
        assert "hash" in caught.value.why

    def announce(request: Request) -> bool:
        if request.path.endswith("manifests/1"):
            request.answer(200, made.manifests["1"][1], Content_Type=INDEX_TYPE, Docker_Content_Digest=chosen)
            return True
        return False

    with lying(made, announce) as server, pytest.raises(RunnerError, match="cannot read"):
        image_of(f"{server.address}/team/app:1", environ)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"<!DOCTYPE html><title>Please log in to the WiFi</title>", "text/html", "may come from a proxy"),
        (b"  <html>", "application/json", "runner expected the manifest 1; the page may come from a proxy"),
        (b"", "application/json", "not JSON"),
        (b"{}", MANIFEST_TYPE, "neither"),
        (b"[]", MANIFEST_TYPE, "not a JSON object"),
        (b'{"schemaVersion":1}', "application/vnd.docker.distribution.manifest.v1+prettyjws", "schema 1"),
        (b'{"schemaVersion":1,"fsLayers":[]}', "application/json", "schema 1"),
        (b" " * (5 << 20), MANIFEST_TYPE, "is that large"),
        (b"[" * 100000, MANIFEST_TYPE, "nested too deeply"),
    ],
)
def test_what_is_no_manifest_is_refused(
    made: Made, environ: dict[str, str], body: bytes, kind: str, words: str
) -> None:
    def change(request: Request) -> bool:
        if "manifests" in request.path:
            request.answer(200, body, Content_Type=kind)
        return "manifests" in request.path

    with lying(made, change) as server, pytest.raises(RunnerError) as caught:
        image_of(f"{server.address}/team/app:1", environ)
    assert words in str(caught.value)
    if "proxy" in words:
        assert f"open http://{server.address} in a browser" in caught.value.fix


def test_a_circle_of_redirects_ends(environ: dict[str, str]) -> None:
    with Hostile(lambda request: request.answer(302, b"", Location=request.path)) as server:
        with pytest.raises(RunnerError, match="too many redirects"):
            image_of(f"{server.address}/team/app:1", environ)
        assert len(server.requests) < 30


def test_docker_hubs_limit_is_explained(made: Made, environ: dict[str, str]) -> None:
    """Its Retry-After is not waited for."""
    body = b'{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your unauthenticated pull rate limit."}]}'

    def change(request: Request) -> bool:
        if "manifests" in request.path:
            request.answer(429, body, Retry_After="21600")
        return "manifests" in request.path

    with lying(made, change) as server, pytest.raises(RunnerError) as caught:
        image_of(f"{server.address}/team/app:1", environ)
    assert "pull rate limit" in caught.value.why
    assert len([request for request in server.requests if "manifests" in request.path]) == 1


def test_a_busy_registry_is_asked_again_for_the_manifest(made: Made, environ: dict[str, str]) -> None:
    refused: list[str] = []

    def change(request: Request) -> bool:
        if "manifests" in request.path and len(refused) < 2:
            refused.append(request.path)
            request.answer(503, b"", Retry_After="0")
            return True
        return False

    with lying(made, change) as server:
        assert len(image_of(f"{server.address}/team/app:1", environ)[1]) == 2


def test_a_layer_that_the_registry_has_lost(made: Made, environ: dict[str, str]) -> None:
    def change(request: Request) -> bool:
        if request.path.endswith(made.layers[0]):
            request.answer(404, b'{"errors":[{"code":"BLOB_UNKNOWN","message":"blob unknown"}]}')
        return request.path.endswith(made.layers[0])

    with lying(made, change) as server, pytest.raises(RunnerError, match="is incomplete") as caught:
        image_of(f"{server.address}/team/app:1", environ)
    assert made.layers[0] in caught.value.why


def test_an_unknown_host_is_said_at_once(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is looked up once."""
    looked_up, look_up = [], socket.getaddrinfo

    def counted(host: str, *words: Any, **named: Any) -> Any:
        looked_up.append(host)
        return look_up(host, *words, **named)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    with pytest.raises(RunnerError, match=r"cannot reach registry\.invalid") as caught:
        image_of("registry.invalid/team/app:1", environ)
    assert "the host name cannot be resolved" in caught.value.why and "login node" in caught.value.fix
    assert looked_up.count("registry.invalid") == 1


def test_a_closed_port_is_said_at_once(environ: dict[str, str]) -> None:
    with Hostile(lambda request: None) as server:
        pass
    with pytest.raises(RunnerError, match=f"cannot reach {server.address}") as caught:
        image_of(f"{server.address}/team/app:1", environ)
    assert "refused" in caught.value.why
    assert "check that this node can reach the host and port" in caught.value.fix


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Key and certificate of a registry at 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lab -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        (*command.split(), "-keyout", folder / "key", "-out", folder / "certificate"), check=True, capture_output=True
    )
    (folder / "both").write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return str(folder / "both")


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_companys_own_ca(made: Made, environ: dict[str, str], certificate: str, variable: str) -> None:
    """Refused by default, with the variable that helps; taken where it is named; and the layers come over TLS."""
    with Hostile(made.serve, certificate=certificate) as server:
        with pytest.raises(RunnerError, match="cannot be verified") as caught:
            image_of(f"{server.address}/team/app:1", environ)
        assert "SSL_CERT_FILE" in caught.value.fix
        environ[variable] = certificate
        _, bodies = image_of(f"{server.address}/team/app:1", environ)
        assert bodies == [made.blobs[digest] for digest in made.layers[::-1]]
    environ[variable] = "/no/such/file.pem"
    with Hostile(made.serve, certificate=certificate) as server, pytest.raises(RunnerError, match=variable):
        image_of(f"{server.address}/team/app:1", environ)


def test_leaving_early_over_tls_leaves_no_thread(made: Made, environ: dict[str, str], certificate: str) -> None:
    """Reads that hang in TLS are ended too."""

    def change(request: Request) -> bool:
        if request.path.endswith(made.layers[1]):
            request.stall()
        return request.path.endswith(made.layers[1])

    environ["SSL_CERT_FILE"] = certificate
    serve = lying(made, change).behave
    with (
        Hostile(serve, certificate=certificate) as server,
        pytest.raises(KeyboardInterrupt),
        open_registry_image(registry_reference(f"{server.address}/team/app:1"), Web(environ), "amd64") as image,
        image.layers[1].open(),
    ):
        until(lambda: any(request.path.endswith(made.layers[1]) for request in server.requests))
        raise KeyboardInterrupt
    until(lambda: not download_threads(), seconds=Patience().stall_seconds - 5)


# words


def test_references() -> None:
    digest = "sha256:" + "0" * 64
    assert registry_reference("docker.io/debian") == Reference("docker.io", "library/debian", "latest")
    assert registry_reference("index.docker.io/library/debian:12").host == "registry-1.docker.io"
    assert registry_reference("nvcr.io/nvidia/pytorch:24.06-py3") == Reference("nvcr.io", "nvidia/pytorch", "24.06-py3")
    assert registry_reference(f"[::1]:5000/a@{digest}") == Reference("[::1]:5000", "a", "", digest)
    assert registry_reference(f"localhost:5000/a/b:t@{digest}").version == digest


@pytest.mark.parametrize(
    "text",
    [
        "debian",
        "/debian",
        "docker.io/",
        "docker.io/Debian",
        "r.example/a/../b",
        "r.example/a:b/c",
        "r.example/a@sha256:12",
        "r.example/a:",
        "user@r.example/a",
        "r.example/a?x",
        "r.example/a\n",
        "r ex/a",
        "r.example:x/a",
        "r.example/a@",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(RunnerError, match="invalid image reference"):
        registry_reference(text)


def test_proxies() -> None:
    environ = {"HTTPS_PROXY": "http://p:1", "http_proxy": "q:2", "NO_PROXY": "corp.example,.lan,10.0.0.0/8,h:5000"}
    assert proxy_for("https://nvcr.io/v2/", environ) == "http://p:1"
    assert proxy_for("http://nvcr.io/v2/", environ) == "http://q:2"
    for host in ("corp.example", "a.corp.example", "x.lan", "10.1.2.3", "h:5000", "127.0.0.1:5000", "localhost"):
        assert proxy_for(f"https://{host}/v2/", environ) == "", host
    for host in ("notcorp.example", "h:5001", "11.1.2.3"):
        assert proxy_for(f"https://{host}/v2/", environ) == "http://p:1", host
    assert proxy_for("https://nvcr.io/", {"ALL_PROXY": "http://a", "no_proxy": "*"}) == ""
    assert proxy_for("https://nvcr.io/", {"ALL_PROXY": "http://a"}) == "http://a"


def test_what_is_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("10.0.0.1", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "")))
