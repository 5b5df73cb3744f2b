"""HOST of `--on HOST`: a Host of ~/.ssh/config, or ~/.config/runner/hosts/NAME.toml."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from runner.errors import RunnerError
from runner.located_toml import read_toml, refuse_unknown_keys, typed
from runner.site_files import user_folder


class Host(NamedTuple):
    """`name` is what the user typed, `target` what ssh is given. `site` sets RUNNER_SITE there. runner and code are
    installed in `folder`."""

    name: str
    target: str
    site: str = ""
    folder: str = "${HOME}/.local/share/runner/on"
    key: str = ""
    """the file of the private key for the login; empty: those that ssh would use"""
    certificate: str = ""
    """the file of the certificate for the login; empty: those that ssh would use"""
    renew: str = ""
    """the command that gets a new one"""


def host_names(environ: Mapping[str, str]) -> list[str]:
    """The hosts that have a file."""
    return sorted(path.stem for path in user_folder(environ).parent.glob("hosts/*.toml"))


def find_host(name: str, environ: Mapping[str, str]) -> Host:
    """The host with this name. Raises RunnerError for a word that ssh would take for an option, or a wrong file."""
    if not re.fullmatch(r"[\w.@:%\[\]][\w.@:%\[\]-]*", name):
        raise RunnerError(
            f"{name!r} is not a host",
            "a host's name contains only letters, digits and _ . @ : % [ ] -, and does not begin with -",
            "runner --on HOST …",
            exit_code=2,
        )
    path = user_folder(environ).parent / "hosts" / f"{name}.toml"
    if not environ or not path.is_file():
        return Host(name, name)
    document = read_toml(path)
    refuse_unknown_keys(document, (), ("host", "site", "folder", "login"), "host")
    typed(document, ("login",), dict)
    refuse_unknown_keys(document, ("login",), ("key", "certificate", "renew"), "host")
    try:
        target = find_host(typed(document, ("host",), str, name), {}).target
    except RunnerError as error:
        error.what, error.fix = (
            f"{document.place('host')}: {error.what}",
            'host = "login.example.org"',
        )
        raise
    folder = typed(document, ("folder",), str, Host._field_defaults["folder"])
    folder = re.sub("^~/", "${HOME}/", folder)
    if not folder.startswith(("/", "${")):
        what = f"{document.place('folder')}: folder cannot be {folder!r}"
        raise RunnerError(
            what, "it must be an absolute path on that machine", 'folder = "~/runner"', exit_code=2
        )
    return Host(
        name=name,
        target=target,
        site=typed(document, ("site",), str, ""),
        folder=folder,
        key=typed(document, ("login", "key"), str, ""),
        certificate=typed(document, ("login", "certificate"), str, ""),
        renew=typed(document, ("login", "renew"), str, ""),
    )
