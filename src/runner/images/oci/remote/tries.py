"""Trying again, with growing pauses, until it works, is hopeless, or nobody waits any more."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.errors import RunnerError
from runner.images.oci.remote.web_errors import Transient

if TYPE_CHECKING:
    from runner.images.oci.remote.web import Web

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Tries:
    """The tries for one thing: `failed` waits before the next one, or raises when there were enough."""

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
            # the threads that one event broke do not come back all at once
            delay = patience.backoff_seconds * 2 ** (self.count - 1) * random.uniform(0.75, 1.25)
        if self.count >= patience.tries or delay > patience.longest_wait_seconds:
            raise self._enough(trouble)
        if self._web.stopped.wait(delay):
            raise Transient("stopped")

    def _enough(self, trouble: Transient) -> RunnerError:
        what = f"cannot fetch {self._what} from {self._registry}"
        if trouble.status == 429:
            return _too_many(what, self._registry, trouble)
        often = "once" if self.count == 1 else f"{self.count} times"
        return RunnerError(
            what, f"tried {often}, the last time: {trouble.why}", "try again later; the network or the registry is ill"
        )


def _too_many(what: str, registry: str, trouble: Transient) -> RunnerError:
    if registry == "docker.io":
        return RunnerError(
            what,
            f"Docker Hub's limit on pulls is reached for this address or account: {trouble.why}",
            "log in (runner import docker://USER@IMAGE, or podman login docker.io), or wait some hours",
        )
    return RunnerError(what, f"the registry asks for fewer requests: {trouble.why}", "try again later, or log in")


def check_passing(status: int, headers: Mapping[str, str], said: str) -> None:
    """Raise Transient for a status that may pass."""
    if status in PASSING:
        words = f"{status} {said}".strip()
        raise Transient(words, delay=retry_after(headers.get("Retry-After", "")), status=status)


def retry_after(text: str) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None where it says nothing readable."""
    import time
    from email.utils import parsedate_to_datetime

    if text.strip().isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
