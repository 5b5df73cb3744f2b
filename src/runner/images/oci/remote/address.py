"""Web addresses: what a credential belongs to, which are this machine's own, which proxy serves them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what a credential belongs to."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def host_of(url: str) -> str:
    """HOST[:PORT] of a URL, without a user's name or password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def is_loopback(host: str) -> bool:
    """Whether a host name (no port) means this machine: localhost, 127.0.0.0/8, ::1."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def proxy_for(url: str, environ: Mapping[str, str]) -> str:
    """The proxy's URL for a URL by HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY (small letters win); empty: none."""
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
    """Whether NO_PROXY names the host: by itself, by a domain that it lies in, by an address or network, or by `*`."""
    for entry in exceptions.lower().split(","):
        name = entry.strip().removeprefix("*").removeprefix(".")
        if entry.strip() == "*" or (name and (name in (host, with_port) or host.endswith(f".{name}"))):
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
    return False
