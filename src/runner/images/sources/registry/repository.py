"""One repository of a registry: its manifests, blobs and tags. Source: OCI distribution-spec 1.1."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace

from runner.errors import RunnerError
from runner.images.layers.layer import LayeredImage, Reader
from runner.images.reference import DOCKER_HUB, Reference
from runner.images.sources.manifest import (
    INDEX_TYPES,
    MANIFEST_BYTES,
    MANIFEST_TYPES,
    Descriptor,
    read_image,
    verified,
)
from runner.images.sources.registry.credentials import Search, find_login
from runner.images.sources.registry.tokens import Tokens, describe, error_message
from runner.images.sources.registry.transfer import Downloads
from runner.images.sources.registry.web import (
    BRIEF,
    Answer,
    Tries,
    Web,
    check_passing,
    host_of,
    is_loopback,
    origin,
    site_of,
)
from runner.images.sources.registry.web_errors import Transient, Untrusted

_ACCEPT = {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}
ERROR_LIMIT = 1 << 20
TAGS_LIMIT = 4 << 20


class Repository:
    """What `reference` names, asked with the login of `search`. Thread-safe."""

    def __init__(self, reference: Reference, web: Web, search: Search) -> None:
        self.reference = reference
        self._web = web
        self._base = f"{self._scheme()}://{reference.host}/v2/{reference.repository}/"
        self._tokens = Tokens(web, reference.registry, reference.repository, search, self._base)
        self._locations: dict[str, str] = {}
        """digest -> the registry's redirect, so that not every range asks again"""

    def manifest(self, version: str) -> tuple[bytes, Mapping[str, str]]:
        """The manifest or index with that tag or digest, and the headers of the answer."""
        return self._document(
            f"manifests/{version}", f"manifest {version}", _ACCEPT, MANIFEST_BYTES
        )

    def digest(self, tag: str) -> str:
        """The digest that a tag has now. Docker Hub counts a GET as a pull, and a HEAD not."""
        with suppress(Transient), self._get(f"manifests/{tag}", _ACCEPT, "HEAD") as answer:
            announced = answer.headers.get("Docker-Content-Digest", "")
            if answer.status == 200 and re.fullmatch("sha256:[0-9a-f]{64}", announced):
                return announced
        return verified(self.manifest(tag)[0], "", tag)

    def config(self, digest: str, limit: int) -> bytes:
        """A small blob as a whole."""
        return self._document(f"blobs/{digest}", f"configuration {digest}", {}, limit)[0]

    def blob(self, digest: str, start: int, end: int, size: int) -> Answer:
        """206 with the bytes from `start` to before `end`, or 200 with the whole blob.

        Raises Transient for temporary failures, RunnerError for others.
        """
        headers = {} if (start, end) == (0, size) else {"Range": f"bytes={start}-{end - 1}"}
        location = self._locations.get(digest)
        if location:
            answer = self._web.get(location, headers)
            if answer.status in (200, 206):
                return answer
            with answer:  # most often a signed address that is too old by now
                self._locations.pop(digest, None)
                check_passing(answer.status, answer.headers, host_of(answer.url))
        answer = self._get(f"blobs/{digest}", headers)
        if answer.status in (200, 206):
            if origin(answer.url) != origin(self._base):
                self._locations[digest] = answer.url
            return answer
        with answer:
            raise self._refused(answer, f"blob {digest}")

    def tags(self) -> tuple[str, ...]:
        """Tags of the repository, the first thousand; none where the registry does not say."""
        try:
            with self._get("tags/list?n=1000", {}) as answer:
                body = answer.document(TAGS_LIMIT) if answer.status == 200 else b"{}"
            return tuple(str(tag) for tag in json.loads(body).get("tags") or ())
        except (Transient, RunnerError, ValueError, AttributeError, TypeError, RecursionError):
            return ()

    def _scheme(self) -> str:
        """https; for this machine's own addresses, or where plain http is allowed, what the server speaks."""
        host = self.reference.host
        own = is_loopback(
            host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        )
        if not own and not self._web.allow_http:
            return "https"
        # try TLS first on other machines; servers on this machine rarely have it
        first, second = ("http", "https") if own else ("https", "http")
        try:
            with self._web.get(f"{first}://{host}/v2/") as answer:
                if answer.status != 400:  # what a server of TLS says to plain http
                    return origin(answer.url)[0]
        except Untrusted:
            raise  # the server may be an attacker: do not fall back to plain http
        except (Transient, RunnerError):
            pass
        with suppress(Transient), self._web.get(f"{second}://{host}/v2/") as answer:
            return origin(answer.url)[0]
        return first

    def _get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """The answer to a request that carries the authorization which the registry asks for."""
        refused = 0
        while True:
            sent = self._tokens.header
            answer = self._web.get(self._base + path, headers, authorization=sent, method=method)
            if answer.status != 401 or origin(answer.url) != origin(self._base) or refused == 2:
                return answer
            with answer:
                answer.document(ERROR_LIMIT)
                self._tokens.renew(answer.challenges(), sent)
            refused += 1

    def _document(
        self, path: str, what: str, headers: Mapping[str, str], limit: int
    ) -> tuple[bytes, Mapping[str, str]]:
        tries = Tries(self._web, what, self.reference.registry)
        while True:
            try:
                with self._get(path, headers) as answer:
                    if answer.status != 200:
                        raise self._refused(answer, what)
                    body = answer.document(limit)
                    kind = answer.headers.get("Content-Type", "").lower()
                    if kind.startswith("text/html") or describe(body) == "a web page":
                        raise RunnerError(
                            f"{host_of(answer.url)} returned a web page",
                            f"runner expected the {what}; "
                            "the page may come from a proxy, or the host is not a registry",
                            f"open {site_of(answer.url)} in a browser to see it; "
                            "check the registry's name and HTTPS_PROXY",
                        )
                    return body, answer.headers
            except Transient as trouble:
                tries.failed(trouble)

    def _refused(self, answer: Answer, what: str) -> RunnerError:
        """The error for a failure status; raises Transient for a temporary one."""
        body = answer.document(ERROR_LIMIT)
        error_text = error_message(body)
        check_passing(answer.status, answer.headers, error_text)
        own = origin(answer.url) == origin(self._base)
        if answer.status in (401, 403) and own:
            return self._tokens.denied(answer.status, error_text)
        if answer.status == 404 and own:
            return self._missing(what, error_text)
        return RunnerError(
            f"cannot fetch {what} of {self.reference}",
            f"{host_of(answer.url)} returned HTTP status {answer.status}{f': {error_text}' if error_text else ''}",
            "check the image's name; if it is correct, ask the operators of the registry"
            if own
            else "check the proxy and the firewall: the registry stores its layers on that host",
        )

    def _missing(self, what: str, error_text: str) -> RunnerError:
        reference = self.reference
        if not what.startswith("manifest"):
            return RunnerError(
                f"{reference} is incomplete",
                f"the registry has no {what}{f': {error_text}' if error_text else ''}",
                "push the image again, or ask its owner to do so",
            )
        import difflib

        tags = self.tags() if reference.tag else ()
        close = difflib.get_close_matches(reference.tag, tags, n=5, cutoff=0.5)
        why = f"the registry has {'no such tag of this image' if tags else 'no such image or tag'}"
        fix = f"did you mean {', '.join(close)}?" if close else "check the name and the tag"
        if reference.registry == DOCKER_HUB and not tags:
            fix += "; for an image of another registry, write docker://REGISTRY#IMAGE:TAG, for example docker://nvcr.io#nvidia/pytorch:24.06-py3"
        return RunnerError(
            f"{reference} does not exist", f"{why}{f': {error_text}' if error_text else ''}", fix
        )


def ask_digest(
    reference: Reference, environ: Mapping[str, str], allow_http: int, *, briefly: bool = False
) -> str:
    """The digest that a tag has in its registry now. With `briefly`, a registry that is silent gets a few seconds."""
    with closing(Web(environ, allow_http=allow_http, patience=BRIEF if briefly else None)) as web:
        login = find_login(reference.registry, reference.repository, reference.user, environ)
        return Repository(reference, web, login).digest(reference.tag)


@contextmanager
def open_registry_image(
    reference: Reference, web: Web, architecture: str
) -> Iterator[LayeredImage]:
    """The image in its registry, its layers readable inside `with`; on leaving, every thread and connection ends."""
    with closing(web):
        search = find_login(reference.registry, reference.repository, reference.user, web.environ)
        repository = Repository(reference, web, search)
        with closing(Downloads(repository.blob, web, reference.registry)) as downloads:
            yield read(reference, repository, downloads, architecture=architecture)


def read(
    name: Reference, repository: Repository, downloads: Downloads, *, architecture: str
) -> LayeredImage:
    """The image of `name`: its manifest found by tag or digest, its layers opened through `downloads`."""
    body, headers = repository.manifest(name.version)
    if (
        headers.get("Content-Type", "")
        .lower()
        .startswith("application/vnd.docker.distribution.manifest.v1+")
    ):
        raise RunnerError(
            f"cannot read {name}",
            "the registry has it only as `schema 1`, an obsolete format without a configuration",
            f"skopeo copy docker://{name} docker-archive:image.tar, then: runner import docker-archive:image.tar",
        )
    blobs = RegistryBlobs(repository, downloads)
    announced = headers.get("Docker-Content-Digest", "")
    digest = name.digest or (announced if announced.startswith("sha256:") else "")
    image = read_image(body, digest, blobs, architecture=architecture, reference=str(name))
    return replace(
        image,
        expect=lambda layers: downloads.expect([(one.digest, one.size_bytes) for one in layers]),
    )


class RegistryBlobs:
    """The blobs of an image in a registry, for read_image."""

    def __init__(self, repository: Repository, downloads: Downloads) -> None:
        self._repository = repository
        self._downloads = downloads

    def read(self, descriptor: Descriptor, limit: int) -> bytes:
        """A manifest of an index, or a configuration, which registries keep among the blobs."""
        if descriptor.media_type in ("", *INDEX_TYPES, *MANIFEST_TYPES):
            return self._repository.manifest(descriptor.digest)[0]
        return self._repository.config(descriptor.digest, limit)

    def opener(self, descriptor: Descriptor) -> Callable[[], AbstractContextManager[Reader]]:
        """A function that opens a layer's blob."""
        return lambda: self._downloads.open(descriptor.digest, descriptor.size_bytes)
