"""Rules over secrets. What an EDF holds is copied into run folders, locks and repositories."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.environments.lint.finding import Finding
from runner.environments.lint.subject import Subject
from runner.expansion import parts

NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|SECRET_?KEY|PRIVATE_?KEY|AUTH_?KEY|CREDENTIALS?)(_|$)",
    re.I,
)
# names that look so, and hold none
_HARMLESS = re.compile(r"TOKENIZERS?_|_FILE$|_PATH$|_DIR$|MAX_TOKEN|TOKEN_(LIMIT|COUNT|TYPE)|_ID$", re.I)
VALUE = re.compile(
    r"\b(hf_|ghp_|gho_|github_pat_|glpat-|nvapi-|sk-|xox[abp]-|AKIA|ya29\.)[A-Za-z0-9_.-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@$]+:[^/\s@$]{3,}@"
)


def looks_secret(name: str, literal: str) -> bool:
    """Whether a variable's name, or the part of its value that is no reference, is that of a secret."""
    named = NAME.search(name) and not _HARMLESS.search(name) and literal.strip() not in {"", "0", "1", "true", "false"}
    return bool(named or VALUE.search(literal))


def secret_value(subject: Subject) -> Iterator[Finding]:
    """A secret written out. The message never repeats it."""
    for name, value in subject.own.env.items():
        literal = "".join(part for part in parts(value, name) if isinstance(part, str))
        if looks_secret(name, literal):
            field = f"env.{name}"
            fix = f"take it out of the file and export {name} where you launch: the host's variables enter"
            yield subject.say("secret-value", field, f"{field} holds a secret as plain text", fix)
    for name, value in subject.own.annotations.items():
        if VALUE.search(value):
            field = f"annotations.{name}"
            yield subject.say("secret-value", field, f"{field} holds a secret as plain text", "take it out of the file")


RULES = (secret_value,)
