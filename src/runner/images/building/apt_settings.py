"""apt's mirror and proxy of the host, offered to builds whose base is the same release of the same distribution."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runner.images.building.host_settings import INSIDE, HostSettings
from runner.machine import process

# where the distributions' own packages come from when nobody set up a mirror
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
    """(ID, VERSION_CODENAME) of an os-release file's text."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    return fields.get("ID", "").strip('"'), fields.get("VERSION_CODENAME", "").strip('"')


def host_release() -> tuple[str, str]:
    """(ID, VERSION_CODENAME) of this machine; empty texts where it has no os-release."""
    path = Path("/etc/os-release")
    return release(path.read_text()) if path.is_file() else ("", "")


def read_sources(folder: Path = Path("/etc/apt")) -> tuple[Source, ...]:
    """The package sources of this machine, of both formats. Source: sources.list(5)."""
    found: list[Source] = []
    parts = folder / "sources.list.d"
    for path in (folder / "sources.list", *sorted(parts.glob("*.list"))):
        if path.is_file():
            found += _one_line_sources(path.read_text(errors="replace"))
    for path in sorted(parts.glob("*.sources")):
        found += _deb822_sources(path.read_text(errors="replace"))
    return tuple(found)


def _one_line_sources(text: str) -> Iterator[Source]:
    for match in re.finditer(r"^deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)[ \t]*([^#\n]*)", text, re.MULTILINE):
        yield Source(match[2], match[3], match[4].strip(), (match[1] or "").strip())


def _deb822_sources(text: str) -> Iterator[Source]:
    for block in re.split(r"\n\s*\n", text):
        lines = "\n".join(line for line in block.splitlines() if not line.startswith("#"))
        fields = {key.lower(): value for key, value in re.findall(r"^(\S+):[ \t]*(.*(?:\n[ \t].*)*)", lines, re.M)}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").strip() == "no":
            continue
        key = fields.get("signed-by", "").strip()
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                components = " ".join(fields.get("components", "").split())
                yield Source(uri, suite, components, f"signed-by={key}" if key.startswith("/") else "")


def own_mirror(sources: Iterable[Source], codename: str) -> tuple[Source, ...]:
    """The sources of a release where at least one is not the distribution's public server; else none."""
    ours = [source for source in sources if re.fullmatch(rf"{re.escape(codename)}(-(updates|security))?", source.suite)]
    special = any(not _PUBLIC.fullmatch(urlsplit(source.uri).hostname or "") for source in ours)
    return tuple(ours) if codename and special else ()


def lines(sources: Iterable[Source]) -> str:
    """The sources as the text of a sources.list."""
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
    base: tuple[str, str], host: tuple[str, str], sources: Iterable[Source], proxy: Mapping[str, str]
) -> HostSettings:
    """What apt in the build is offered: the host's mirror and proxy, for a base of the same release. Pure."""
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
    return HostSettings(files, mounts, {"APT_CONFIG": f"{INSIDE}/apt.conf"}, tuple(note for note in notes if note))
