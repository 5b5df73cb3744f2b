"""The provider's own tool: its commands, from providers.toml, the state of a cluster, and the meaning of messages."""

import json
import re
import shlex
from typing import NamedTuple

from runner.cluster.cluster import Cluster, facts
from runner.errors import RunnerError
from runner.machine import process
from runner.machine.report import Report


class State(NamedTuple):
    """The state of a cluster, in the cloud's own word. `address` and `zone` are those of the node to log in to."""

    word: str
    is_ready: bool = False
    address: str = ""
    zone: str = ""
    reason: str = ""


NOT_CREATED = State("NOT_CREATED")
INCOMPLETE = State("INCOMPLETE", reason="the toolkit has begun, but there is no node")


def commands(cluster: Cluster, action: str, state: State = NOT_CREATED) -> list[tuple[str, ...]]:
    """The commands of an action. Raises RunnerError if the tool is missing, or does not know where to work."""
    provider, values = cluster.provider, cluster.values
    program = next(filter(process.which, provider["programs"]), "")
    if not program:
        what = f"{' or '.join(provider['programs'])} is not installed"
        why = f"`runner cluster` uses it: it is the command of {provider['title']}"
        raise RunnerError(what, why, provider["install"])
    for name, (variable, _) in provider["needs"].items():
        if not values[name]:
            why = f"neither {cluster.path.name} nor {variable} sets it"
            raise RunnerError(f"{cluster.name} has no {name}", why, f"export {variable}=…")
    own = cluster.folder / provider["document"]
    if values["document"]:
        own = cluster.path.parent / values["document"]
    names = {**values, "program": program, "folder": cluster.folder, "document": own.resolve()}
    names |= {
        "address": state.address,
        "node_zone": state.zone,
        "user": provider["users"].get(values["os"]),
    }
    identity = provider["identity"] if values["key"] else ""
    lines = (line.replace("{identity}", identity) for line in provider["commands"][action])
    return [tuple(word.format(**names) for word in shlex.split(line)) for line in lines]


def check_version(cluster: Cluster) -> None:
    """Raise RunnerError if the tool has a version that runner was not written for."""
    (command,), provider = commands(cluster, "version"), cluster.provider
    done = process.run(command, check=False)
    if done.exit_code:
        raise process.failed(done, provider["install"])
    if not re.search(provider["version_like"], done.stdout + done.stderr):
        what = f"{command[0]} has an unsuitable version: {' '.join(done.stdout.split())[:60]}"
        raise RunnerError(what, provider["version_wanted"], provider["install"])


def ask(cluster: Cluster) -> State:
    """The state of the cluster. Raises RunnerError if the tool does not know it."""
    (command,) = commands(cluster, "status")
    done = process.run(command, check=False)
    if re.search(cluster.provider["absent"], done.stdout):
        return (
            INCOMPLETE if (cluster.folder / cluster.values["deployment"]).is_dir() else NOT_CREATED
        )
    try:
        answer = json.loads(done.stdout) if done.exit_code == 0 else []
        found = answer[0] if isinstance(answer, list) else answer
        word, reason = found["status"], "; ".join(found.get("reason") or ())
    except (LookupError, TypeError, ValueError):
        raise explained(
            f"cannot get the state of {cluster.name}", done.stdout + done.stderr
        ) from None
    is_ready = re.fullmatch(cluster.provider["ready"], word) is not None
    return State(
        word,
        is_ready,
        found.get("name") or "",
        (found.get("zone") or "").rpartition("/")[2],
        reason,
    )


def run(cluster: Cluster, action: str, report: Report) -> None:
    """Carry out an action, and show what the tool prints. Raises RunnerError, with its meaning, if it fails."""
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        report.passing(line)

    for command in commands(cluster, action):
        report.say(shlex.join(command))
        # on Ctrl-C, terraform needs time to write down what it has made
        if process.follow(command, show, grace_seconds=600):
            raise explained(f"cannot {action} {cluster.name}", "\n".join(lines))


def explained(what: str, text: str) -> RunnerError:
    """The error for messages of the tool, with their meaning."""
    known = [each for each in facts("providers")["failures"] if re.search(each["find"], text)]
    meaning = (
        known[0]
        if known
        else {
            "why": "the last messages of the tool are:",
            "fix": "correct what the messages name, and run the command again",
        }
    )
    return RunnerError(
        what, "\n".join((meaning["why"], *text.strip().splitlines()[-15:])), meaning["fix"]
    )


def remote(cluster: Cluster, state: State, text: str = "") -> tuple[str, ...]:
    """The ssh command for a shell, or for a command, on the node to log in to."""
    configured = process.run(("ssh", "-G", cluster.name), check=False).stdout
    (command,), before = commands(cluster, "ssh", state), cluster.provider["remote_command"]
    if not re.search(f"^hostname {re.escape(cluster.name)}$", configured, re.M | re.I):
        command, before = ("ssh", cluster.name), ""  # a Host of ~/.ssh/config
    return (*command, before + text) if text else command


def run_there(cluster: Cluster, state: State, text: str) -> tuple[int, str]:
    """(exit code, output) of a command on the node to log in to; ssh asks nothing."""
    try:
        done = process.run(
            remote(cluster, state, text), check=False, own_session=True, timeout_seconds=60
        )
        return done.exit_code, done.stderr.strip() if done.exit_code else done.stdout
    except RunnerError as error:
        return 255, error.why
