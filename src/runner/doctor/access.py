"""What opens doors elsewhere: credentials of registries, Hugging Face's cache and words."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from runner.doctor.diagnosis import Diagnosis

_LINES = "machine nvcr.io and machine authn.nvidia.com, each with: login $oauthtoken password KEY"


def credentials(environ: Mapping[str, str]) -> Diagnosis:
    """enroot's credentials: present, private, and with both machines that nvcr.io asks for."""
    config = environ.get("ENROOT_CONFIG_PATH") or (
        (environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config") + "/enroot"
    )
    path = Path(config) / ".credentials"
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        fix = f"write {path}, mode 0600: {_LINES}"
        return Diagnosis("credentials", "missing", f"no {path}: public images only", fix)
    if mode & 0o077:
        return Diagnosis("credentials", "wrong", f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")
    machines = set(re.findall(r"^\s*machine\s+(\S+)", text, re.MULTILINE))
    for one, other in (("nvcr.io", "authn.nvidia.com"), ("authn.nvidia.com", "nvcr.io")):
        if one in machines and other not in machines:
            text = f"{path} has {one} but not {other}: " + (
                "it hands out the token" if one == "nvcr.io" else "it is the registry itself"
            )
            return Diagnosis("credentials", "wrong", text, f"add the same line for {other}")
    return Diagnosis("credentials", "ok", f"{path} (mode {mode:04o}): {', '.join(sorted(machines)) or 'empty'}")


def registry_logins(environ: Mapping[str, str]) -> Diagnosis:
    """The logins of podman and docker: which registries, and that nobody else can read them. No secret is shown."""
    home = environ.get("HOME", "~")
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    named = environ.get("REGISTRY_AUTH_FILE")
    paths = [Path(named)] if named else [
        Path(runtime, "containers/auth.json"),
        Path(environ.get("XDG_CONFIG_HOME") or f"{home}/.config", "containers/auth.json"),
        Path(environ.get("DOCKER_CONFIG") or f"{home}/.docker", "config.json"),
    ]  # fmt: skip
    found: list[str] = []
    for path in paths:
        try:
            mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="utf-8", errors="replace")
            known = sorted(json.loads(text).get("auths") or {})
        except OSError:
            continue
        except (ValueError, AttributeError):
            return Diagnosis("logins", "wrong", f"{path} is not the JSON that podman writes", "podman login REGISTRY")
        if known and mode & 0o077:
            return Diagnosis("logins", "wrong", f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")
        found += [f"{name} ({path})" for name in known]
    if not found:
        return Diagnosis("logins", "missing", "podman and docker are logged in nowhere: public images only",
                         "podman login nvcr.io")  # fmt: skip
    return Diagnosis("logins", "ok", ", ".join(found))


def hugging_face(environ: Mapping[str, str]) -> Diagnosis:
    """Where models are cached, whether they may be downloaded, and whether a word for gated ones is there."""
    cache = environ.get("HF_HOME") or (
        (environ.get("XDG_CACHE_HOME") or environ.get("HOME", "~") + "/.cache") + "/huggingface"
    )
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
               if environ.get(name, "0").lower() not in {"", "0", "false", "no", "off"}]  # fmt: skip
    folder = Path(cache)
    token = Path(environ.get("HF_TOKEN_PATH") or folder / "token")
    text = f"cache {cache}{'' if folder.is_dir() else ' (not there yet)'}; "
    text += f"offline: {', '.join(offline)}" if offline else "online"
    if offline and not folder.is_dir():
        return Diagnosis("Hugging Face", "wrong", text, "runner prefetch, where the network is; or unset " + offline[0])
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(nearest, os.W_OK) and not offline:
        return Diagnosis("Hugging Face", "wrong", f"{text}; this user may not write to {nearest}", "set HF_HOME")
    if token.is_file() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        return Diagnosis("Hugging Face", "wrong", f"{token} can be read by others", f"chmod 600 {token}")
    known = "HF_TOKEN is set" if environ.get("HF_TOKEN") else f"token in {token}" if token.is_file() else "no token"
    return Diagnosis("Hugging Face", "ok", f"{text}; {known}")
