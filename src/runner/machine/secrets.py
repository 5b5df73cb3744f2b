"""The user's secrets: where they are stored, how to recognize them, and a check that no record contains one.

Secrets come from the environment, or from a file of NAME=VALUE lines that only the user can read. For a line
NAME=!COMMAND, the value is the output of the command, such as a query to a keyring. The batch script reads the file on
the node (payload/secrets.sh), so that no value becomes part of a script, a command line or a record.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from runner.errors import RunnerError

VARIABLE = "RUNNER_SECRETS"
LEAST_LENGTH = 8
"""shorter values are ignored, because they occur in unrelated text by chance"""

_COMMAND_SECONDS = 10.0
_NAME = re.compile(
    r"(^|[-_.])(token|secret|passwd|password|passphrase|credentials?|api_?key|access_?key|private_?key|auth|key|webhook)s?$",
    re.IGNORECASE,
)
# names that look like a secret's but are not
_HARMLESS = re.compile(
    r"(max|min|num|n|pad|eos|bos|new|sort|group|primary|foreign|per|gpg)[-_]?(tokens?|keys?)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[opsru]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    # not in the middle of a word, such as "multi-task-finetuning-on-everything"
    r"|(?<![A-Za-z0-9])sk-[\w-]{20,}"
    r"|ya29\.[\w-]{12,}|xox[abpr]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|nvapi-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----|://[^/\s:@]{1,200}:[^/\s@]{1,200}@"
)

# what examples have in the place of a secret: <your-token>, hf_your_token_here, CHANGE_THIS, hf_xxxx
_PLACEHOLDER = re.compile(
    r"^<|^\[[^\]\"]*\]$|^\{+[\w .-]*\}+$"
    r"|(^|[\W_])your([\W_]|$)|^(change|replace)[\W_]?(this|me|it)\b|[\W_]here$|(^|[\W_])x{3,}$|\.\.\.$"
    r"|^<?redacted",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or option with this name holds a secret. payload/secrets.sh uses the same rules."""
    return bool(_NAME.search(name) and not _HARMLESS.search(name))


def looks_secret(name: str, value: str) -> bool:
    """Whether a value must stay out of records, judged by its name or by its form. All of runner uses this function."""
    # a number, a switch or a path is not a secret, whatever its name
    harmless = (
        value.isdigit()
        or value.lower() in {"", "true", "false"}
        or value.startswith(("/", "~", "./"))
    )
    return bool(_VALUE.search(value)) or (is_secret_name(name) and not harmless)


def is_placeholder(value: str) -> bool:
    """Whether an example's author wrote this value in the place of a secret."""
    return bool(_PLACEHOLDER.search(value))


def path(environ: Mapping[str, str] = os.environ) -> Path:
    """The path of the user's file of secrets, which may not exist. payload/secrets.sh uses the same path."""
    settings = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or '~'}/.config"
    return Path(environ.get(VARIABLE) or f"{settings}/runner/secrets").expanduser()


def check(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names in the user's file. Raises RunnerError if others can read it, or if a line is not NAME=VALUE."""
    file = path(environ)
    try:
        mode = file.stat().st_mode & 0o777
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(
            f"cannot read the secrets in {file}",
            str(error),
            f"it must be a UTF-8 text file; if you may not read it: chmod 600 {file}",
        ) from error
    if mode & 0o077:
        raise RunnerError(
            f"others can read the secrets in {file}",
            f"its mode is {mode:04o}",
            f"chmod 600 {file}, then replace the secrets with new ones",
        )
    for number, line in enumerate(lines, 1):
        if (
            line.strip()
            and not line.startswith("#")
            and not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", line)
        ):
            raise RunnerError(
                f"{file}:{number}: cannot read a secret from this line",
                "each line must be NAME=VALUE, without quotes, `export` or spaces around `=`; `#` begins a comment",
                "write a line like HF_TOKEN=…",
            )
    return tuple(_pairs(lines))


def known(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Secret value -> its name, from the file and the environment, without short values."""
    try:
        own = _pairs(path(environ).read_text(errors="replace").splitlines())
    except OSError:
        own = {}
    own = {
        name: _printed(value[1:]) if value.startswith("!") else value for name, value in own.items()
    }
    named = {
        name: value
        for name, value in environ.items()
        if is_secret_name(name) and looks_secret(name, value)
    }
    # the same name may have several values
    found = [*_logins(environ).items(), *own.items(), *named.items()]
    return {
        value: name
        for name, value in found
        if len(value) >= LEAST_LENGTH and not value.startswith(("/", "~", "./"))
    }


def value_for_job(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value that a job gets for a variable: the exported one, or else that of the user's file, or else of a login;
    empty if there is none. payload/secrets.sh uses the same rules."""
    if environ.get(name):
        return environ[name]
    file = path(environ)
    with suppress(OSError):
        if not file.stat().st_mode & 0o077:
            pairs = _pairs(file.read_text(errors="replace").splitlines())
            value = pairs.get(name, "")
            if name in pairs and not value.startswith("!"):
                return value  # also an empty one: the job then gets no login
            if value.startswith("!") and (printed := _printed(value[1:])):
                return printed
    return "" if name in environ else _logins(environ).get(name, "")


def refuse(content: bytes, where: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise RunnerError if `content` contains the value of a known secret. The error does not repeat the value."""
    for value, name in known(environ).items():
        if value.encode(errors="surrogateescape") in content:
            raise RunnerError(
                f"{where} would contain the value of the secret {name}",
                "everyone who can read that file, or a copy of it, could read the secret",
                f"let your program read the variable {name} instead: export {name}, or set {name} in {path(environ)}",
            )


def _logins(environ: Mapping[str, str]) -> dict[str, str]:
    """The logins in the user's home folder. payload/secrets.sh gives them to the job, by the same rules."""
    home = Path(environ.get("HOME") or "~").expanduser()
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    host = re.split("[:/]", (environ.get("WANDB_BASE_URL") or "api.wandb.ai").rpartition("://")[2])[
        0
    ]
    found = {}
    with suppress(OSError):
        token = Path(
            environ.get("HF_TOKEN_PATH") or Path(environ.get("HF_HOME") or cache) / "token"
        )
        found["HF_TOKEN"] = token.read_text(errors="replace").strip()
    with suppress(OSError):
        words = Path(environ.get("NETRC") or home / ".netrc").read_text(errors="replace").split()
        of_host = words[words.index(host) :] if host in words else []
        found["WANDB_API_KEY"] = (
            of_host[of_host.index("password") + 1] if "password" in of_host[:-1] else ""
        )
    return found


def _pairs(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@cache
def _printed(command: str) -> str:
    """The output of a command in the user's file; "" if it fails, for example because this machine has no keyring."""
    from runner.machine import process

    try:
        done = process.run(("bash", "-c", command), check=False, timeout_seconds=_COMMAND_SECONDS)
    except RunnerError:
        return ""
    return done.stdout.rstrip("\n") if done.exit_code == 0 else ""
