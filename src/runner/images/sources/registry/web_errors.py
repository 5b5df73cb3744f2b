"""Errors between this machine and a server as RunnerErrors; the trusted certificates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runner.errors import RunnerError

if TYPE_CHECKING:
    import ssl

ALLOW_HTTP = "runner import --allow-http, or allow_http in runner-importer's importer.toml"
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class Transient(Exception):
    """A temporary failure: a reset, a stall, a server's 503. `delay` is the wait that the server requested."""

    def __init__(self, why: str, *, delay: float | None = None, status: int = 0) -> None:
        super().__init__(why)
        self.why, self.delay, self.status = why, delay, status


class Unreachable(RunnerError):
    """A server that does not answer."""


class Untrusted(RunnerError):
    """A server whose certificate cannot be verified: it may be an attacker."""


def words(error: BaseException, stall_seconds: float) -> str:
    """One line about a broken connection, without urllib3's object names."""
    from urllib3 import exceptions

    if isinstance(error, exceptions.ReadTimeoutError | TimeoutError):
        return f"no data for {stall_seconds:g} s"
    if isinstance(error, exceptions.IncompleteRead):
        return f"the connection ended early; {error.expected or '?'} bytes were missing"
    if isinstance(error, exceptions.ProtocolError) and len(error.args) > 1:
        return f"the connection broke: {error.args[1]}"
    # urllib3 puts the connection first: HTTPSConnection(host='…', port=…): or <… object at 0x…>:
    return re.sub(r"^(?:<.*?>|\w+\(host=.*?\)): ", "", str(error)) or type(error).__name__


def unreachable(error: BaseException, host: str, proxy: str, *, first: bool) -> RunnerError | None:
    """The error for a server that another attempt cannot reach; None if the failure may be temporary.

    `first`: the server has not answered before. Then a name that is not known, or a refusal, is taken as final, so
    that a node without a network says so at once.
    """
    from urllib3 import exceptions

    cause = error.original_error if isinstance(error, exceptions.ProxyError) else error
    final = None
    if isinstance(cause, exceptions.SSLError):
        final = _tls_error(str(cause), host, first)
    if final:
        return final
    if not first:
        return None
    if isinstance(error, exceptions.ProxyError):
        why = f"the proxy {urlsplit(proxy).netloc.rpartition('@')[2]} does not connect: {words(cause, 0)}"
        fix = "check HTTPS_PROXY and HTTP_PROXY; NO_PROXY lists the hosts to reach without a proxy"
    elif isinstance(cause, exceptions.NameResolutionError):
        why = f"the host name cannot be resolved: {words(cause, 0)}"
        fix = "check the registry's name; if this node has no network, import on a login node or set HTTPS_PROXY"
    elif isinstance(cause, exceptions.NewConnectionError | exceptions.ConnectTimeoutError):
        why = words(cause, 0)
        fix = (
            "check that this node can reach the host and port (a registry may send you to another host for logins "
            "and layers); behind a firewall, import on a login node or set HTTPS_PROXY (for http: HTTP_PROXY)"
        )
    else:
        return None
    return Unreachable(f"cannot reach {host}", why, fix)


def _tls_error(text: str, host: str, first: bool) -> RunnerError | None:
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate" in text.lower():
        return Untrusted(
            f"the certificate of {host} cannot be verified",
            text.partition("CERTIFICATE_VERIFY_FAILED] ")[2].partition(" (_ssl")[0] or text,
            "check the clock; for a company's own CA, export REQUESTS_CA_BUNDLE=CA.pem (it overrides SSL_CERT_FILE)",
        )
    if first:
        fix = f"check the port; to read from a registry without TLS: {ALLOW_HTTP}"
        return RunnerError(f"the TLS handshake with {host} failed", text, fix)
    return None


def tls_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """The certificates that the environment names, else the system's, else the bundle of `certifi`."""
    import ssl

    named = next((name for name in CA_VARIABLES if environ.get(name)), "")
    folder = environ.get("SSL_CERT_DIR") or None
    if named:
        path = Path(environ[named])
        cafile, capath = (None, str(path)) if path.is_dir() else (str(path), folder)
        try:
            return ssl.create_default_context(cafile=cafile, capath=capath)
        except (OSError, ssl.SSLError) as error:
            what = f"cannot read the certificates that {named} points to"
            raise RunnerError(what, f"{path}: {error}", f"correct or unset {named}") from error
    if folder:
        return ssl.create_default_context(capath=folder)
    system = ssl.get_default_verify_paths()
    if system.cafile is None and system.capath is None:  # a Python built on another machine
        import certifi

        return ssl.create_default_context(cafile=certifi.where())
    return ssl.create_default_context()
