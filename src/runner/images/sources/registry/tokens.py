"""The Authorization header for one repository, made from the registry's challenge and renewed when it is refused.

Source: the distribution project, docs/spec/auth/token.md and oauth.md; RFC 7617 (Basic).
"""

import base64
import json
import re
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from runner.errors import RunnerError
from runner.images.sources.registry.credentials import Login, Search, how_to_add
from runner.images.sources.registry.web import Answer, Tries, Web, check_passing, host_of, site_of
from runner.images.sources.registry.web_errors import Transient

LIMIT = 1 << 20


class Tokens:
    """The header that the registry takes; thread-safe."""

    def __init__(self, web: Web, registry: str, repository: str, search: Search, base: str) -> None:
        self._web = web
        self._registry = registry
        self._repository = repository
        self._search = search
        self._base = base  # the address that the header is sent to
        self._withheld = ""  # the host that was not sent the login
        self._lock = threading.Lock()
        self.header = ""

    def renew(self, challenges: Sequence[str], refused: str) -> None:
        """Answer a 401: make a new header, unless another thread has replaced the refused one already.

        Raises RunnerError where there is nothing to answer with.
        """
        with self._lock:
            if self.header != refused:
                return
            schemes = {
                scheme: fields for text in challenges for scheme, fields in parse_challenges(text)
            }
            login = self._login_for(self._base)
            if "bearer" in schemes:
                self.header = f"Bearer {self._fetch(schemes['bearer'])}"
            elif "basic" in schemes and login and login.password and not refused:
                self.header = basic(login)
            else:
                raise self.denied(
                    401,
                    "" if "basic" in schemes else "it offers no login method that runner supports",
                )

    def denied(self, status: int, error_text: str) -> RunnerError:
        """The error for a registry that does not let us in."""
        login, name = self._search.login, f"{self._registry}/{self._repository}"
        error_text = f": {error_text}" if error_text else ""
        if self._withheld:
            why = f"it requires a login ({status}){error_text}, and the connection to {self._withheld} is not encrypted"
            fix = (
                "use a registry with TLS; "
                "with runner import, --allow-http --allow-http (twice) sends the password in clear text"
            )
        elif login:
            who = f"user {login.user!r}" if login.user else "the identity token"
            why = f"it refuses {who} from {login.place} ({status}){error_text}"
            fix = f"check the image's name, your access to it, and the password; {self._advice()}"
        else:
            places = "\n".join(self._search.looked)
            why = f"it requires a login ({status}){error_text}, but runner found none in\n{places}"
            fix = f"check the image's name (many registries answer like this if it is wrong); {self._advice()}"
        return RunnerError(f"{self._registry} denied access to {name}", why, fix)

    def _login_for(self, *urls: str) -> Login | None:
        """The login, if each of the addresses may have it."""
        exposed = [url for url in urls if not self._web.takes_login(url)]
        if self._search.login and exposed:
            self._withheld = host_of(exposed[0])
            return None
        return self._search.login

    def _advice(self) -> str:
        return how_to_add(
            self._registry, self._web.environ, self._search.login.user if self._search.login else ""
        )

    def _fetch(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm", "")
        if not realm:
            raise self.denied(401, "its answer does not name a token server")
        tries = Tries(self._web, f"a token for {self._repository}", self._registry)
        while True:
            try:
                with self._ask(realm, challenge) as answer:
                    return self._read(answer)
            except Transient as trouble:
                tries.failed(trouble)

    def _ask(self, realm: str, challenge: Mapping[str, str]) -> Answer:
        login = self._login_for(self._base, realm)
        fields = {"scope": challenge.get("scope") or f"repository:{self._repository}:pull"}
        if challenge.get("service"):
            fields["service"] = challenge["service"]
        if login and login.identity_token:
            secret = {
                "grant_type": "refresh_token",
                "client_id": "runner",
                "refresh_token": login.identity_token,
            }
            return self._web.post(realm, {**secret, **fields})
        url = realm + ("&" if "?" in realm else "?") + urlencode(fields)
        return self._web.get(url, authorization=basic(login) if login else "")

    def _read(self, answer: Answer) -> str:
        body = answer.document(LIMIT)
        check_passing(answer.status, answer.headers, error_message(body))
        if answer.status in (400, 401, 403):
            raise self.denied(answer.status, error_message(body) or host_of(answer.url))
        try:
            data = json.loads(body)
            token = data.get("token") or data.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if answer.status != 200 or not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise RunnerError(
                f"{host_of(answer.url)} did not issue a token for {self._registry}",
                f"the host returned status {answer.status} and {describe(body)}",
                f"open {site_of(answer.url)} in a browser (it may be a login page), and check HTTPS_PROXY",
            )
        return token


def basic(login: Login) -> str:
    """The header of Basic authentication."""
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()


def parse_challenges(text: str) -> list[tuple[str, dict[str, str]]]:
    """(scheme in small letters, parameters) for each challenge of a WWW-Authenticate header."""
    found: list[tuple[str, dict[str, str]]] = []
    token = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
    for match in re.finditer(
        rf'({token})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))|({token})', text[:8192]
    ):
        if match[4]:
            found.append((match[4].lower(), {}))
        elif found:
            value = match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
            found[-1][1][match[1].lower()] = value
    return found


def error_message(body: bytes) -> str:
    """The words of a registry's JSON error (`errors`: [{code, message}]), in one line; empty for anything else."""
    try:
        data = json.loads(body)
        errors = data["errors"] if isinstance(data, dict) and "errors" in data else [data]
        messages = [
            str(error.get("message") or error.get("details") or error.get("code") or "")
            for error in errors
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return " ".join("; ".join(filter(None, messages)).split())[:300]


def describe(body: bytes) -> str:
    """What a body is, where a JSON document was due."""
    start = body[:512].lstrip().lower()
    if not start:
        return "nothing"
    return (
        "a web page"
        if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<"))
        else "something other than JSON"
    )
