"""HTTP for registries: proxies and CAs of the environment, redirects without credentials, sockets that can be ended."""

from __future__ import annotations

import ipaddress
import random
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlencode, urljoin, urlsplit

from runner.errors import RunnerError
from runner.images.sources.registry import web_errors
from runner.images.sources.registry.web_errors import Transient, Unreachable

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager


REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
USER_AGENT = "runner"


@dataclass(frozen=True)
class Patience:
    """How long to wait for servers, and how often to try again."""

    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    """a connection without data for this long is closed"""
    tries: int = 6
    backoff_seconds: float = 0.5
    """before the second attempt; doubled before each further one"""
    longest_wait_seconds: float = 60.0
    """fail if a server asks to wait longer (Retry-After)"""
    whole_seconds: float = float("inf")
    """no request begins later than this after the first one"""


BRIEF = Patience(connect_seconds=2.0, stall_seconds=2.0, tries=1, whole_seconds=3.0)


class Answer:
    """A server's answer: status, headers (any case), the URL that gave it, and a body to read in pieces."""

    def __init__(self, response: BaseHTTPResponse, url: str, web: Web) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.url = url
        self._response = response
        self._web = web

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; b"" at the end. Raises Transient if the connection breaks."""
        import http.client

        from urllib3.exceptions import HTTPError

        try:
            return self._response.read(size, decode_content=False)
        except (HTTPError, OSError, http.client.HTTPException) as error:
            raise Transient(web_errors.words(error, self._web.patience.stall_seconds)) from error
        except (ValueError, AttributeError) as error:
            # errors of a socket that close() has just shut
            if self._web.stopped.is_set():
                raise Transient("stopped") from error
            raise

    def document(self, limit: int) -> bytes:
        """The whole body, which must not be longer than `limit`."""
        pieces, left = [], limit + 1
        while left and (piece := self.read(left)):
            pieces.append(piece)
            left -= len(piece)
        if not left:
            raise RunnerError(
                f"the reply of {host_of(self.url)} is too large: more than {limit:,} bytes",
                "no reply of a registry is that large, except layers, so this is probably not a registry",
                "check the host in the image's name",
            )
        return b"".join(pieces)

    def challenges(self) -> tuple[str, ...]:
        """The WWW-Authenticate headers, one by one."""
        values: list[str] = self._response.headers.getlist("WWW-Authenticate")
        return tuple(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # a body read to its end has returned its connection already
        self._response.close()


class Web:
    """Connections for one image's transfer. Thread-safe; close() ends every connection at once."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        allow_http: int = 0,
        connections: int = 8,
        patience: Patience | None = None,
    ) -> None:
        self.environ = environ
        self.allow_http = allow_http
        self.patience = patience or Patience()
        self.stopped = threading.Event()
        self.connections = connections
        self._managers: dict[tuple[str, bool], PoolManager] = {}
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reached: set[str] = set()
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def get(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        authorization: str = "",
        method: str = "GET",
    ) -> Answer:
        """The answer after redirects; `authorization` goes only to the host, port and scheme of `url` itself.

        Raises Transient for temporary failures, RunnerError for others.
        """
        first = origin(url)
        for _ in range(MAX_REDIRECTS + 1):
            secret = (
                {"Authorization": authorization} if authorization and origin(url) == first else {}
            )
            answer = self._request(method, url, {**(headers or {}), **secret})
            if answer.status not in REDIRECTS or "Location" not in answer.headers:
                return answer
            with answer:
                after = urljoin(url, answer.headers["Location"])
            if url.startswith("https:") and not after.startswith("https:") and not self.allow_http:
                raise RunnerError(
                    f"{host_of(url)} redirects to {host_of(after)} without encryption",
                    "the redirect goes from HTTPS to plain HTTP",
                    f"check the registry's name; to read without encryption: {web_errors.ALLOW_HTTP}",
                )
            url = after
        raise RunnerError(
            f"too many redirects from {first[1]}",
            f"runner follows at most {MAX_REDIRECTS} redirects; the last one led to {host_of(url)}",
            "check the registry's name and HTTPS_PROXY: the answer may come from a login page or a proxy",
        )

    def post(self, url: str, fields: Mapping[str, str]) -> Answer:
        """The answer to a form; redirects are not followed because the form contains a secret."""
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._request("POST", url, headers, urlencode(fields).encode())

    def takes_login(self, url: str) -> bool:
        """Whether a login may be sent there: encrypted, to this machine, or in clear text if the user allowed it."""
        parts = urlsplit(url)
        return parts.scheme == "https" or is_loopback(parts.hostname or "") or self.allow_http > 1

    def close(self) -> None:
        """End every connection, also while another thread reads from it."""
        import socket

        self.stopped.set()
        for held in list(self._sockets):
            with suppress(Exception):
                if isinstance(held, socket.socket):
                    # not SSLSocket.shutdown, which takes the TLS state from under the reader
                    socket.socket.shutdown(held, socket.SHUT_RDWR)
                else:
                    held.shutdown(socket.SHUT_RDWR)
        for manager in list(self._managers.values()):
            manager.clear()

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Answer:
        import http.client

        from urllib3.exceptions import HTTPError

        self._check(url)
        host = host_of(url)
        if time.monotonic() - self._began > self.patience.whole_seconds:
            raise Transient(f"no answer within {self.patience.whole_seconds:g} s")
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        proxy = proxy_for(url, self.environ)
        try:
            response = self._manager(proxy, url.startswith("https:")).request(
                method,
                url,
                headers=sent,
                body=body,
                redirect=False,
                retries=False,
                preload_content=False,
            )
        except (HTTPError, OSError, http.client.HTTPException) as error:
            if self.stopped.is_set():
                raise Transient("stopped") from error
            final = web_errors.unreachable(error, host, proxy, first=host not in self._reached)
            raise final or Transient(
                web_errors.words(error, self.patience.stall_seconds)
            ) from error
        except ValueError as error:  # an invalid address or header
            raise RunnerError(
                f"cannot send a request to {host}", str(error), "check the image's name"
            ) from error
        self._reached.add(host)
        return Answer(response, url, self)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RunnerError(
                f"cannot fetch from {url!r}",
                "a URL must begin with https:// or http://, and name a host",
                "check the registry's name; if it is correct, ask the operators of the registry",
            )
        if parts.scheme == "http" and not self.allow_http and not is_loopback(parts.hostname):
            raise RunnerError(
                f"refusing to contact {host_of(url)} without encryption",
                "plain HTTP is allowed only for this machine's own addresses",
                f"use HTTPS; to read without encryption: {web_errors.ALLOW_HTTP}",
            )

    def _manager(self, proxy: str, tls: bool) -> PoolManager:
        """The pool of connections by that proxy; the TLS context is made on first use (it takes 20 ms)."""
        import urllib3

        with self._lock:
            if (proxy, tls) not in self._managers:
                options: dict[str, Any] = {
                    "maxsize": self.connections + 1,
                    "timeout": urllib3.Timeout(
                        connect=self.patience.connect_seconds, read=self.patience.stall_seconds
                    ),
                    "ssl_context": web_errors.tls_context(self.environ)
                    if tls or proxy.startswith("https")
                    else None,
                }
                manager = (
                    _proxy_manager(proxy, options) if proxy else urllib3.PoolManager(**options)
                )
                manager.pool_classes_by_scheme = _pool_classes(self._keep)
                self._managers[proxy, tls] = manager
            return self._managers[proxy, tls]

    def _keep(self, connected: Any) -> None:
        """Register a new connection's socket for close(); raises OSError after it."""
        if self.stopped.is_set():
            raise OSError("stopped")
        self._sockets.add(connected)


def _proxy_manager(proxy: str, options: dict[str, Any]) -> PoolManager:
    import urllib3

    parts = urlsplit(proxy)
    if parts.scheme.startswith("socks"):
        try:
            from urllib3.contrib.socks import SOCKSProxyManager
        except ImportError as error:
            raise RunnerError(
                f"cannot use the proxy {host_of(proxy)}",
                "a SOCKS proxy needs the Python package PySocks",
                "install PySocks beside runner: uv tool install --with PySocks …, or pip install PySocks",
            ) from error
        return SOCKSProxyManager(proxy, **options)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=user)
    return urllib3.ProxyManager(
        f"{parts.scheme}://{host_of(proxy)}", proxy_headers=headers, **options
    )


def _pool_classes(keep: Any) -> dict[str, Any]:
    """urllib3's pools, with connections that pass each new socket to `keep`."""
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def kept(pool: Any) -> Any:
        class Kept(pool.ConnectionCls):  # type: ignore[misc]  # a class of each of the two
            def connect(self) -> None:
                super().connect()
                keep(self.sock)

        return type(pool.__name__, (pool,), {"ConnectionCls": Kept})

    return {"http": kept(HTTPConnectionPool), "https": kept(HTTPSConnectionPool)}


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: the scope of a credential."""
    parts = urlsplit(url)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or (443 if parts.scheme == "https" else 80),
    )


def host_of(url: str) -> str:
    """HOST[:PORT] of a URL, without a user's name or password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def site_of(url: str) -> str:
    """SCHEME://HOST[:PORT] of a URL."""
    return f"{urlsplit(url).scheme}://{host_of(url)}"


def is_loopback(host: str) -> bool:
    """Whether a host name (no port) means this machine: localhost, 127.0.0.0/8, ::1."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def proxy_for(url: str, environ: Mapping[str, str]) -> str:
    """The proxy's URL for a URL by HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY (lower case first); empty: none."""
    parts = urlsplit(url)
    host = parts.hostname or ""

    def setting(name: str) -> str:
        return (environ.get(f"{name}_proxy") or environ.get(f"{name}_proxy".upper()) or "").strip()

    proxy = setting(parts.scheme) or setting("all")
    if not proxy or is_loopback(host):
        return ""
    if _excepted(host, host_of(url).lower(), setting("no")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _excepted(host: str, with_port: str, exceptions: str) -> bool:
    """Whether NO_PROXY names the host: by name, domain, address or network, or by `*`."""
    for entry in exceptions.lower().split(","):
        name = entry.strip().removeprefix("*").removeprefix(".")
        if entry.strip() == "*" or (
            name and (name in (host, with_port) or host.endswith(f".{name}"))
        ):
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
    return False


PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Tries:
    """The attempts for one request: `failed` waits before the next one, or raises after the last."""

    def __init__(self, web: Web, what: str, registry: str) -> None:
        self._web = web
        self._what = what
        self._registry = registry
        self.count = 0

    def failed(self, trouble: Transient) -> None:
        """Wait as long as the server asked, or twice as long as the last time. Raises RunnerError at the end."""
        patience = self._web.patience
        self.count += 1
        delay = trouble.delay
        if delay is None:
            # random: threads that one event interrupted should not all return at once
            delay = patience.backoff_seconds * 2 ** (self.count - 1) * random.uniform(0.75, 1.25)
        if self.count >= patience.tries or delay > patience.longest_wait_seconds:
            raise self._enough(trouble)
        if self._web.stopped.wait(delay):
            raise Transient("stopped")

    def _enough(self, trouble: Transient) -> RunnerError:
        what = f"cannot fetch {self._what} from {self._registry}"
        if trouble.status == 429 and self._registry == "docker.io":
            why = f"Docker Hub's pull limit has been reached for this address or account: {trouble.why}"
            fix = "log in (podman login docker.io), or wait a few hours"
            return RunnerError(what, why, fix)
        if trouble.status == 429:
            why = f"the registry is rate-limiting requests: {trouble.why}"
            return RunnerError(what, why, "try again later, or log in")
        often = "1 attempt" if self.count == 1 else f"{self.count} attempts"
        return Unreachable(
            what,
            f"gave up after {often}; last error: {trouble.why}",
            "try again when the network and the registry work",
        )


def check_passing(status: int, headers: Mapping[str, str], error_text: str) -> None:
    """Raise Transient for a temporary status."""
    if status in PASSING:
        words = f"{status} {error_text}".strip()
        raise Transient(words, delay=retry_after(headers.get("Retry-After", "")), status=status)


def retry_after(text: str) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None if it is not readable."""
    from email.utils import parsedate_to_datetime

    if text.strip().isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
