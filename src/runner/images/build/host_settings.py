"""The host's package settings (pip's configuration, a company CA, apt's mirror), which a build can use.

Everything is mounted below /dev of the build's containers. /dev is a separate file system in memory, so that neither
files nor empty mount points stay in the image. `ARG` lines name the paths, because `ENV` would stay in the image.
"""

import configparser
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from runner.errors import RunnerError
from runner.machine import process

INSIDE = "/dev/runner"
# the pip options for package sources; all other options are up to the recipe. Source: pip 25, cmdoptions
_PIP_LISTS = ("find-links", "extra-index-url", "trusted-host")
_PIP_KEYS = (
    "index-url",
    "no-index",
    "cert",
    "client-cert",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
)
# the variables with which other programs (curl, git, requests, uv) find a CA bundle
CA_VARIABLES = (
    "PIP_CERT",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
)


@dataclass(frozen=True)
class HostSettings:
    """The settings for a build; empty if the host has no special settings."""

    files: Mapping[str, str] = field(default_factory=dict)
    """file name below INSIDE -> text"""
    mounts: tuple[tuple[str, str], ...] = ()
    """(path on the host, path in the build), read-only"""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """variables that RUN sees, but that the image does not store"""
    notes: tuple[str, ...] = ()
    """what the build uses"""
    missing: tuple[str, ...] = ()
    """places that the host's settings name, but that do not exist"""

    def __bool__(self) -> bool:
        return bool(self.files or self.mounts)


def join(one: HostSettings, two: HostSettings) -> HostSettings:
    """Combine two settings into one."""
    mounts = dict.fromkeys((*one.mounts, *two.mounts))
    arguments = {**one.arguments, **two.arguments}
    return HostSettings(
        {**one.files, **two.files},
        tuple(mounts),
        arguments,
        (*one.notes, *two.notes),
        (*one.missing, *two.missing),
    )


def pip_layers(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """pip's settings, the weakest first: global files, the user's files or PIP_CONFIG_FILE, the variables PIP_*.

    Source: pip's documentation, "Configuration". Raises RunnerError for a file that pip cannot read either.
    """
    home = Path(environ.get("HOME") or "~").expanduser()
    paths = [
        Path(folder) / "pip/pip.conf"
        for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    ]
    paths += [Path("/etc/pip.conf")]
    own = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    named = environ.get("PIP_CONFIG_FILE") or ""
    if named == "/dev/null":
        paths = []
    elif named and Path(named).exists():  # instead of the user's files
        paths += [Path(named)]
    else:
        paths += [home / ".pip/pip.conf", own]
    layers = [_read_pip_file(path) for path in paths if path.is_file()]
    variables = {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_") and value
    }
    return [*layers, variables]


def _read_pip_file(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text())
    except (configparser.Error, OSError, ValueError) as error:
        raise RunnerError(
            f"cannot read pip's configuration {path}",
            str(error),
            f"fix {path}: pip cannot read this file either",
        ) from error
    merged: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            merged.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    return merged


def pip_settings(layers: Sequence[Mapping[str, str]], environ: Mapping[str, str]) -> HostSettings:
    """The host's pip settings as one configuration file for the build, with mounts for local folders and the CA."""
    values: dict[str, str] = {}
    for layer in layers:
        values |= layer
    offered = {*_PIP_LISTS, *_PIP_KEYS}
    values = {key: value for key, value in values.items() if key in offered}
    mounts: dict[str, str] = {}
    notes: list[str] = []
    missing: list[str] = []
    for key in ("find-links", "extra-index-url", "index-url"):
        words = [_offer(word, mounts, missing) for word in values.get(key, "").split()]
        values[key] = "\n    ".join(word for word in words if word)
    arguments: dict[str, str] = {}
    bundle = values.pop("cert", "") or next(
        (environ[name] for name in CA_VARIABLES if environ.get(name)), ""
    )
    if bundle and Path(bundle).is_file():
        mounts[str(Path(bundle).resolve())] = f"{INSIDE}/ca.crt"
        arguments = dict.fromkeys(CA_VARIABLES, f"{INSIDE}/ca.crt")
        notes.append(f"CA bundle {bundle}")
    if "client-cert" in values and Path(values["client-cert"]).is_file():
        mounts[str(Path(values["client-cert"]).resolve())] = f"{INSIDE}/client.pem"
        values["client-cert"] = f"{INSIDE}/client.pem"
    lines = [f"{key} = {value}" for key, value in values.items() if value]
    if not lines and not mounts:
        return HostSettings(missing=tuple(missing))
    # pip's cache would store the mirror's responses in the image
    text = "\n".join(["[global]", "no-cache-dir = true", *lines]) + "\n"
    shown = ", ".join(key for key, value in values.items() if value)
    if shown:
        notes.append(f"pip's {shown}")
    arguments["PIP_CONFIG_FILE"] = f"{INSIDE}/pip.conf"
    return HostSettings(
        {"pip.conf": text}, tuple(mounts.items()), arguments, tuple(notes), tuple(missing)
    )


def _offer(word: str, mounts: dict[str, str], missing: list[str]) -> str:
    """An index or find-links entry as the build sees it: URLs are unchanged, local folders become their mount point."""
    if "://" in word and not word.startswith("file:"):
        return word
    path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word).expanduser()
    if not path.exists():
        missing.append(word)
        return ""
    folder, below = (path, "") if path.is_dir() else (path.parent, path.name)
    if folder.name == "simple" and folder.parent != Path("/"):
        # pages of such an index point to files beside it (../../files/...)
        folder, below = folder.parent, "simple"
    target = mounts.setdefault(str(folder.resolve()), f"{INSIDE}/packages-{len(mounts)}")
    inside = f"{target}/{below}" if below else target
    return f"file://{inside}" if word.startswith("file:") else inside


def without_credentials(text: str) -> str:
    """The text with `user:password@` of every URL replaced by `***@`."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


def proxy_settings(environ: Mapping[str, str]) -> str:
    """The host's proxy as a line to print, without credentials. podman itself passes the variables to the build."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    found = next((environ[name] for name in names if environ.get(name)), "")
    parts = urlsplit(found)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if found else ""


# the distributions' public package servers
_PUBLIC = re.compile(
    r"(deb|security|ftp(\.\w\w)?)\.debian\.org|((\w\w\.)?archive|security|ports)\.ubuntu\.com|snapshot\.(debian|ubuntu)\.\w+"
)
_PROXIES = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CAInfo")


@dataclass(frozen=True)
class Source:
    """One line of a sources.list."""

    uri: str
    suite: str
    components: str
    options: str = ""


def release(os_release: str) -> tuple[str, str]:
    """(ID, VERSION_CODENAME) from the text of an os-release file."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    return fields.get("ID", "").strip('"'), fields.get("VERSION_CODENAME", "").strip('"')


def read_sources(folder: Path = Path("/etc/apt")) -> tuple[Source, ...]:
    """The package sources of this machine, in both formats. Source: sources.list(5)."""
    found: list[Source] = []
    parts = folder / "sources.list.d"
    for path in (folder / "sources.list", *sorted(parts.glob("*.list"))):
        if path.is_file():
            found += _one_line_sources(path.read_text(errors="replace"))
    for path in sorted(parts.glob("*.sources")):
        found += _deb822_sources(path.read_text(errors="replace"))
    return tuple(found)


def _one_line_sources(text: str) -> Iterator[Source]:
    for match in re.finditer(
        r"^deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)[ \t]*([^#\n]*)", text, re.MULTILINE
    ):
        yield Source(match[2], match[3], match[4].strip(), (match[1] or "").strip())


def _deb822_sources(text: str) -> Iterator[Source]:
    for block in re.split(r"\n\s*\n", text):
        lines = "\n".join(line for line in block.splitlines() if not line.startswith("#"))
        fields = {
            key.lower(): value
            for key, value in re.findall(r"^(\S+):[ \t]*(.*(?:\n[ \t].*)*)", lines, re.M)
        }
        if (
            "deb" not in fields.get("types", "").split()
            or fields.get("enabled", "yes").strip() == "no"
        ):
            continue
        key = fields.get("signed-by", "").strip()
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                components = " ".join(fields.get("components", "").split())
                yield Source(
                    uri, suite, components, f"signed-by={key}" if key.startswith("/") else ""
                )


def own_mirror(sources: Iterable[Source], codename: str) -> tuple[Source, ...]:
    """The sources of a release, if at least one is not the distribution's public server; else empty."""
    ours = [
        source
        for source in sources
        if re.fullmatch(rf"{re.escape(codename)}(-(updates|security))?", source.suite)
    ]
    special = any(not _PUBLIC.fullmatch(urlsplit(source.uri).hostname or "") for source in ours)
    return tuple(ours) if codename and special else ()


def lines(sources: Iterable[Source]) -> str:
    """The text of a sources.list with these sources."""
    rows = []
    for source in sources:
        options = f" [{source.options}]" if source.options else ""
        rows.append(f"deb{options} {source.uri} {source.suite} {source.components}".rstrip())
    return "".join(f"{row}\n" for row in rows)


def proxies() -> dict[str, str]:
    """apt's proxy settings of this machine."""
    if not process.which("apt-config"):
        return {}
    done = process.run(("apt-config", "dump", "--format", "%f=%v%n", *_PROXIES), check=False)
    pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {key: value for key, value in pairs if value and key in _PROXIES}


def apt_settings(
    base: tuple[str, str],
    host: tuple[str, str],
    sources: Iterable[Source],
    proxy: Mapping[str, str],
) -> HostSettings:
    """The settings for apt in the build: the host's mirror and proxy, if the base has the same release. Pure."""
    mirror = own_mirror(sources, host[1]) if base == host and base[1] else ()
    proxied = proxy if base[0] in ("debian", "ubuntu") else {}
    settings = [f'{key} "{value}";' for key, value in proxied.items() if not key.endswith("CAInfo")]
    mounts: tuple[tuple[str, str], ...] = ()
    bundle = proxied.get("Acquire::https::CAInfo")
    if bundle and Path(bundle).is_file():
        mounts = ((str(Path(bundle).resolve()), f"{INSIDE}/ca.crt"),)
        settings.append(f'Acquire::https::CAInfo "{INSIDE}/ca.crt";')
    files: dict[str, str] = {}
    if mirror:
        files["sources.list"] = lines(mirror)
        settings += [f'Dir::Etc::SourceList "{INSIDE}/sources.list";', 'Dir::Etc::SourceParts "-";']
    if not settings:
        return HostSettings()
    files["apt.conf"] = "\n".join(settings) + "\n"
    notes = ("apt's mirror" if mirror else "", "apt's proxy" if proxied else "")
    return HostSettings(
        files, mounts, {"APT_CONFIG": f"{INSIDE}/apt.conf"}, tuple(note for note in notes if note)
    )
