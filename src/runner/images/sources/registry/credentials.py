"""Logins for a registry, from the files of enroot, podman and docker. No password is ever printed or logged."""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.images.reference import DOCKER_HUB, HUB_NAMES
from runner.machine import process
from runner.machine.folders import home

HUB_SERVER = "https://index.docker.io/v1/"
# hosts that issue a registry's tokens; enroot's file may have the login under their name
TOKEN_HOSTS = {DOCKER_HUB: ("auth.docker.io",), "nvcr.io": ("authn.nvidia.com",)}
HELPER_SECONDS = 30.0
_RUN = Path("/run")


@dataclass(frozen=True)
class Login:
    """A user with a password, or with a token that stands for both."""

    user: str
    password: str = field(repr=False)
    place: str
    """the file or helper that it comes from, for messages"""
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Search:
    """The login found, and the places searched."""

    login: Login | None
    looked: tuple[str, ...]
    """each place in order, with its result"""


def find_login(registry: str, repository: str, user: str, environ: Mapping[str, str]) -> Search:
    """The first login for `registry` (HOST[:PORT]) and `repository`; of `user`, unless that is empty.

    Order: enroot's .credentials, podman's auth.json, docker's config.json with its helpers. Raises RunnerError if
    `user` has no password there.
    """
    looked: list[str] = []
    for place, found in _candidates(registry, repository, user, environ):
        if isinstance(found, Login) and user in ("", found.user):
            return Search(found, (*looked, place))
        looked.append(
            f"{place} ({found if isinstance(found, str) else 'has a login for another user'})"
        )
    if user:
        raise RunnerError(
            f"no password found for user {user!r} at {registry}",
            "looked in:\n" + "\n".join(looked),
            how_to_add(registry, environ, user),
        )
    return Search(None, tuple(looked))


def how_to_add(registry: str, environ: Mapping[str, str], user: str = "") -> str:
    """The advice of an error: where a login for the registry goes."""
    name = user or ("$oauthtoken" if registry == "nvcr.io" else "USER")
    secret = "NGC_API_KEY" if registry == "nvcr.io" else "PASSWORD_OR_TOKEN"
    machine = "registry-1.docker.io" if registry == DOCKER_HUB else without_port(registry)
    return (
        f"add the line `machine {machine} login {name} password {secret}` to {enroot_file(environ)} (mode 600), "
        f"or: podman login {registry}"
    )


def _candidates(
    registry: str, repository: str, user: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, Login | str]]:
    """(place, login or the reason why there is none), in order; each place is read when it is needed."""
    path = enroot_file(environ)
    yield str(path), _from_enroot(path, registry, user, environ)
    for path in auth_files(environ):
        yield from _from_auth_file(path, registry, repository, environ)


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or home(environ) / ".config")


def enroot_file(environ: Mapping[str, str]) -> Path:
    """enroot's file of credentials. Source: enroot 4.1.2, enroot.in."""
    return (
        Path(environ.get("ENROOT_CONFIG_PATH") or _config_home(environ) / "enroot") / ".credentials"
    )


def auth_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The JSON files of podman and docker, in order.

    Without XDG_RUNTIME_DIR, rootless podman sets it to /run/user/UID, and root's podman uses /run/containers/UID.
    Source: containers-auth.json(5); podman, SetXdgDirs; containers/image, config.go; docker's DOCKER_CONFIG.
    """
    docker = Path(environ.get("DOCKER_CONFIG") or home(environ) / ".docker") / "config.json"
    if environ.get("REGISTRY_AUTH_FILE"):
        return Path(environ["REGISTRY_AUTH_FILE"]), docker
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        files = [Path(runtime) / "containers/auth.json"]
    else:
        user = str(os.geteuid())
        guesses = (
            _RUN / "user" / user / "containers/auth.json",
            _RUN / f"containers/{user}/auth.json",
        )
        files = [path for path in guesses if os.access(path, os.R_OK)]
    return *files, _config_home(environ) / "containers/auth.json", docker


def _read(path: Path) -> str | None:
    """The file's text; None if it does not exist. Raises RunnerError if it cannot be read."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(
            f"cannot read the logins in {path}",
            str(error),
            "check the file's content and permissions",
        ) from error


# enroot


def _from_enroot(path: Path, registry: str, user: str, environ: Mapping[str, str]) -> Login | str:
    text = _read(path)
    if text is None:
        return "does not exist"
    names = HUB_NAMES if registry == DOCKER_HUB else (registry,)
    # enroot, and curl for it, look for the host alone; a line with the port can mean only this registry
    machines = dict.fromkeys((*names, *map(without_port, names), *TOKEN_HOSTS.get(registry, ())))
    lines = [fields for fields in map(_netrc_fields, text.splitlines()) if fields]
    for machine in machines:
        for fields in lines:
            if (
                fields.get("machine") == machine
                and user in ("", fields.get("login", ""))
                and "password" in fields
            ):
                password = expand(
                    fields["password"], environ, f"the password of machine {machine} in {path}"
                )
                return Login(fields.get("login", ""), password, str(path))
    return f"has no line with a password for {without_port(registry)}{f' and the login {user}' if user else ''}"


def without_port(registry: str) -> str:
    """The host of a registry, under which enroot's file has its login. Source: enroot 4.1.2, docker.sh."""
    return re.sub(r":\d+$", "", registry)


def _netrc_fields(line: str) -> dict[str, str]:
    """machine, login and password of one line; the whole line is one entry, as enroot has it."""
    found = line.split()
    if not found or found[0] != "machine":
        return {}
    # $(...) may contain blanks: keep it whole, so that the error can show it
    head, _, password = line.partition(" password ")
    fields = dict(zip(found[::2], found[1::2], strict=False))
    if password.lstrip().startswith(("$(", "`")):
        fields = {
            **dict(zip(head.split()[::2], head.split()[1::2], strict=False)),
            "password": password.strip(),
        }
    return {key: value for key, value in fields.items() if key in ("machine", "login", "password")}


def expand(password: str, environ: Mapping[str, str], what: str) -> str:
    """The password with `${NAME}` (and `$NAME` alone) replaced from the environment; nothing is executed.

    Raises RunnerError for a name that is not set, and for shell code, which enroot would run.
    """
    if password.startswith("`") or "$(" in password:
        raise RunnerError(
            f"{what} is a command",
            "runner replaces ${NAME} with the environment variable NAME, but never runs commands",
            "write ${MY_TOKEN} instead, and run `export MY_TOKEN=$(...)` before the import",
        )

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in environ:
            raise RunnerError(
                f"{what} is ${{{name}}}",
                f"{name} is not set in the environment",
                f"export {name}=...",
            )
        return environ[name]

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|^\$([A-Za-z_][A-Za-z0-9_]*)$", value, password)


# podman and docker


def _from_auth_file(
    path: Path, registry: str, repository: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, Login | str]]:
    text = _read(path)
    if text is None:
        yield str(path), "does not exist"
        return
    settings = _parsed(path, text)
    keys = auth_keys(registry, repository)
    helpers = _normalised(settings.get("credHelpers"))
    helper = next((helpers[key] for key in keys if isinstance(helpers.get(key), str)), "")
    if helper:
        yield f"docker-credential-{helper} of {path}", _from_helper(helper, registry, environ)
    auths = _normalised(settings.get("auths"))
    logins = (_from_entry(auths[key], key, path) for key in keys if key in auths)
    yield str(path), next((login for login in logins if login), f"has no login for {registry}")
    store = settings.get("credsStore")
    if isinstance(store, str) and store and not helper:
        yield f"docker-credential-{store} of {path}", _from_helper(store, registry, environ)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RunnerError(
            f"cannot read the logins in {path}", f"not valid JSON: {error}", "fix the file"
        ) from error
    return settings if isinstance(settings, dict) else {}


def auth_keys(registry: str, repository: str) -> tuple[str, ...]:
    """The keys that may hold a login, the most special first: HOST/GROUP/NAME, HOST/GROUP, HOST.

    Source: containers-auth.json(5).
    """
    parts = repository.split("/")
    hosts = HUB_NAMES if registry == DOCKER_HUB else (registry,)
    return tuple(
        "/".join((host, *parts[:count])) for count in range(len(parts), -1, -1) for host in hosts
    )


def _normalised(table: object) -> dict[str, Any]:
    """The table with docker's older keys (https://index.docker.io/v1/) made into host names."""
    if not isinstance(table, dict):
        return {}
    return {re.sub(r"^https?://|/(v[12]/?)?$", "", str(key)): value for key, value in table.items()}


def _from_entry(entry: object, key: str, path: Path) -> Login | None:
    if not isinstance(entry, dict):
        return None
    token = entry.get("identitytoken") or ""
    user, password = entry.get("username") or "", entry.get("password") or ""
    if entry.get("auth"):
        try:
            user, colon, password = (
                base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
            )
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise RunnerError(
                f"cannot read the login of {key} in {path}",
                "`auth` is not base64 of USER:PASSWORD",
                f"podman login {key}, or docker login {key}",
            )
        password = password.rstrip("\0")  # docker pads it
    if not ((user and password) or token):
        return None
    return Login(str(user), str(password), str(path), str(token))


def _from_helper(name: str, registry: str, environ: Mapping[str, str]) -> Login | str:
    """What `docker-credential-NAME get` answers to the server's name. Source: docker-credential-helpers."""
    program = f"docker-credential-{name}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        return "is not the name of a credential helper"
    if process.which(program) is None:
        return "is not on PATH"
    server = HUB_SERVER if registry == DOCKER_HUB else registry
    done = process.run(
        (program, "get"),
        env=environ,
        text_input=server,
        check=False,
        timeout_seconds=HELPER_SECONDS,
    )
    if done.exit_code != 0:
        output = (done.stdout or done.stderr).strip().splitlines()
        return output[0][:200] if output else f"exit code {done.exit_code}"
    try:
        answer = json.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        return "printed something other than a login"
    return Login("", "", program, secret) if user == "<token>" else Login(user, secret, program)
