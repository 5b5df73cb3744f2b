"""cluster: clusters of AWS ParallelCluster and Google Cloud's Cluster Toolkit, each from a file in clusters/."""

import argparse
import os
import re
import shlex
import time
from pathlib import Path

from runner.cluster import tool
from runner.cluster.cluster import Cluster, find_cluster
from runner.cluster.documents import read_yaml, write_own
from runner.cluster.tool import INCOMPLETE, NOT_CREATED, State
from runner.commands.console import Console
from runner.commands.options import Verbs
from runner.environments.environment import quoted
from runner.errors import RunnerError
from runner.machine import folders, process
from runner.project import find_project
from runner.site_files import user_folder

_PAUSE_SECONDS, _PATIENCE_SECONDS = 20.0, 5400.0
_MOST_FAILURES = 5
"""how often in a row the tool may fail to tell the state while runner waits"""
_HELP = {
    "dry-run": "print what would be written or run; change nothing",
    "force": "replace files that you have edited, or that runner did not make",
    "destroy force": "go on even if jobs run or data is lost",
    "yes": "do not ask for confirmation, however high the price",
    "json": "print JSON",
}


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    verb = subparsers.add_parser("cluster", parents=[common])
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, function, text, options in (
        (
            "render",
            render,
            "write what the provider's tool reads, and the site file",
            ("dry-run", "force"),
        ),
        (
            "create",
            create,
            "create the cluster, and wait until Slurm is ready",
            ("dry-run", "force", "yes"),
        ),
        ("list", show, "list the clusters and their states", ("json",)),
        ("status", show, "show the state of a cluster", ("json",)),
        ("ssh", ssh, "log in, or run a command: ssh CLUSTER -- COMMAND", ()),
        (
            "destroy",
            destroy,
            "delete the cluster, after a list of what is lost",
            ("dry-run", "force"),
        ),
        (
            "adopt",
            adopt,
            "make a cluster file and a site file from a configuration or a blueprint",
            ("force",),
        ),
    ):
        action = actions.add_parser(name, parents=[common], help=text)
        action.set_defaults(takes_words=name == "ssh")
        if name == "adopt":
            action.add_argument(
                "file", metavar="FILE", help="a ParallelCluster configuration, or a blueprint"
            )
            action.add_argument(
                "--name",
                help="the name of the cluster in the cloud (default: that in the blueprint)",
            )
        elif name != "list":
            action.add_argument("cluster", metavar="CLUSTER", help="a name in clusters/, or a path")
        for option in options:
            meaning = _HELP.get(f"{name} {option}") or _HELP[option]
            action.add_argument(f"--{option}", action="store_true", help=meaning)
        action.set_defaults(run=function)


def render(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster render`: print the path of each file that is written."""
    cluster = find_cluster(args.cluster, find_project(), os.environ)
    name, site = cluster.provider["document"], cluster.text("site.toml.j2")
    # the site file is also where --site finds it
    texts = {
        cluster.folder / "site.toml": site,
        user_folder(os.environ) / f"{cluster.name}.toml": site,
    }
    if not cluster.values["document"]:
        texts = {cluster.folder / name: cluster.text(f"{name}.j2"), **texts}
    for path, text in texts.items():
        console.answer(
            f"# {path}\n{text}" if args.dry_run else write_own(path, text, force=args.force)
        )
    return 0


def create(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster create`: print the paths of the files that were written."""
    cluster = find_cluster(args.cluster, find_project(), os.environ)
    name, cost, budget = (
        cluster.name,
        cluster.values["most_per_hour"],
        cluster.values["budget_per_hour"],
    )
    console.say(cluster.text("plan.txt.j2").rstrip())
    if args.dry_run:
        console.answer("\n".join(map(shlex.join, tool.commands(cluster, "create"))))
        return 0
    tool.check_version(cluster)
    state, host_file = tool.ask(cluster), user_folder(os.environ).parent / "hosts" / f"{name}.toml"
    is_new = state in (NOT_CREATED, INCOMPLETE)
    # the host file comes last: an earlier `create` has written the site file and was stopped while it waited
    goes_on = (cluster.folder / "site.toml").is_file() and not host_file.exists()
    if not is_new and not (goes_on and (state.is_ready or state.word == "CREATE_IN_PROGRESS")):
        why = f"the name {cluster.values['deployment']} is taken: {state.word}"
        raise RunnerError(f"cannot create {name}", why, f"runner cluster status {name}")
    what = f"{name} may cost {cost:,.2f} per hour, above the budget of {budget:,.2f}"
    if (
        budget
        and cost > budget
        and not (args.yes or console.confirm(what, "confirm with --yes, or reduce `count`"))
    ):
        return 1
    # the toolkit continues what it has begun; ParallelCluster refuses a second request
    again = is_new or (cluster.folder / cluster.values["deployment"]).is_dir()
    if again:
        render(args, console)
    try:
        if again:
            tool.run(cluster, "create", console)
        state = _wait(cluster, console)
    except BaseException:
        console.warn(
            f"what was created so far may still exist and cost money; to continue: runner cluster create {name}; "
            f"if that is refused, or to remove it: runner cluster destroy {name}"
        )
        raise
    command = tool.remote(cluster, state)
    # `gcloud compute config-ssh` gives nodes these names
    google = f"{state.address}.{state.zone}.{cluster.values['project']}"
    host = f'host = "{google if command[0] == "gcloud" else command[-1]}"\nsite = "{name}"\n'
    # a Host of ~/.ssh/config would name the key itself
    if cluster.values["key"] and command[-1] != name:
        host += f'[login]\nkey = "~/.ssh/{cluster.values["key"]}.pem"\n'
    try:
        console.answer(write_own(host_file, host, force=args.force))
    except RunnerError as error:  # the cluster exists, so `create --force` would refuse
        lines = "; ".join(host.splitlines())
        console.warn(f"{error.what}: {error.why}; for --on {name}, it must contain: {lines}")
    console.say(f"Slurm is ready; next: runner cluster ssh {name}, or runner --on {name} status")
    return 0


def _wait(cluster: Cluster, console: Console, *, gone: bool = False) -> State:
    """Wait until Slurm is ready, or the cluster is gone. Raises RunnerError if that fails or takes too long."""
    began, last, asks_slurm = time.monotonic(), "", cluster.provider["asks_slurm"]
    failures = 0
    while time.monotonic() < began + _PATIENCE_SECONDS:
        try:
            state, failures = tool.ask(cluster), 0
        except RunnerError as error:  # the network may fail for a moment
            failures += 1
            if failures > _MOST_FAILURES:
                raise
            console.say(f"{error.what}; asking again")
            time.sleep(_PAUSE_SECONDS)
            continue
        if state.word != last:
            console.say(
                f"{cluster.name}: {state.word}{'' if gone else '; do not ssh before Slurm is ready'}"
            )
        last = state.word
        console.passing(f"{last}, {(time.monotonic() - began) / 60:.0f} min")
        if re.search("DELETE_FAILED" if gone else "FAILED|ROLLBACK|INCOMPLETE", last):
            events = [
                process.run(command, check=False).stdout
                for command in tool.commands(cluster, "events")
            ]
            raise tool.explained(f"{cluster.name}: {last}", "\n".join((state.reason, *events)))
        slow = asks_slurm and state.is_ready and tool.run_there(cluster, state, "sinfo")[0] != 0
        if state == NOT_CREATED if gone else state.is_ready and not slow:
            return state
        time.sleep(_PAUSE_SECONDS)
    what = f"{cluster.name} is still {last} after {_PATIENCE_SECONDS / 60:.0f} minutes"
    why = "runner has stopped waiting; the cloud may still be working on it"
    raise RunnerError(what, why, f"runner cluster status {cluster.name}")


def show(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster list`, `runner cluster status`: list asks the tools only about what was rendered here."""
    one, records = args.action == "status", []
    for name in (args.cluster,) if one else find_project().names("clusters"):
        record = dict.fromkeys(("provider", "deployment", "region", "zone"), "")
        try:
            cluster = find_cluster(name, find_project(), os.environ)
            record = {key: cluster.values[key] for key in record}
            name = cluster.name
            state = tool.ask(cluster) if one or cluster.folder.is_dir() else NOT_CREATED
        except RunnerError as error:  # the other clusters may cost money
            if one:
                raise
            state = State("UNKNOWN", reason=f"{error.what}: {error.why.splitlines()[0]}")
        more = {
            "state": state.word,
            "ready": state.is_ready,
            "address": state.address,
            "reason": state.reason,
        }
        records.append({"name": name, **record, **more})
    if args.json:
        console.answer_json(records[0] if one else records)
        return 0
    keys = ("name", "provider", "state", "address", "reason")
    console.table(
        [key.upper() for key in keys], [[str(record[key]) for key in keys] for record in records]
    )
    return 0


def ssh(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster ssh CLUSTER [-- COMMAND]`: the exit code is that of ssh."""
    cluster = find_cluster(args.cluster, find_project(), os.environ)
    state = tool.ask(cluster)
    if not state.address:
        raise RunnerError(
            f"{cluster.name} has no node to log in to",
            f"its state is {state.word}" + (f": {state.reason}" if state.reason else ""),
            f"runner cluster {'create' if state in (NOT_CREATED, INCOMPLETE) else 'status'} {cluster.name}",
        )
    if not state.is_ready:
        console.warn(f"{cluster.name} is {state.word}: Slurm may not be there yet")
    return process.attached(tool.remote(cluster, state, shlex.join(args.rest)))


def destroy(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster destroy`: first list what is lost."""
    cluster = find_cluster(args.cluster, find_project(), os.environ)
    name, state, reasons = (
        cluster.name,
        tool.ask(cluster),
        [*filter(None, cluster.text("lost.txt.j2").splitlines())],
    )
    if state == NOT_CREATED:
        raise RunnerError(
            f"there is no {name} to destroy", "the cloud does not have it", "runner cluster list"
        )
    console.say("\n  ".join((f"lost with {name}:", "the disks of all nodes", *reasons)))
    if args.dry_run:
        console.answer("\n".join(map(shlex.join, tool.commands(cluster, "destroy"))))
        return 0
    if state.address and not args.force:
        # jobs run during an update of the cluster too
        code, output = tool.run_there(cluster, state, "squeue --noheader")
        if code == 0:
            reasons += [f"job {line.strip()}" for line in output.splitlines()]
        elif state.is_ready:
            reasons += [f"cannot see whether jobs run: {output}"]
    if reasons and not args.force:
        fix = "save the data and wait for the jobs, then add --force"
        raise RunnerError(f"{name} was not destroyed", "\n".join(reasons), fix)
    tool.run(cluster, "destroy", console)
    folders.remove(
        cluster.folder / cluster.values["deployment"]
    )  # the toolkit's record of what is gone
    _wait(cluster, console, gone=True)
    return 0


def adopt(args: argparse.Namespace, console: Console) -> int:
    """`runner cluster adopt FILE`: a cluster file that refers to FILE, and the site file."""
    path, project = Path(args.file).absolute(), find_project()
    data = read_yaml(path)
    variables = data.get("vars")
    own = variables.get("deployment_name") if isinstance(variables, dict) else None
    name = str(args.name or own or "")
    if not re.fullmatch(r"[\w-]+", name):
        why, fix = (
            f"its name would be {name!r}, but a name has only letters, digits, _ and -",
            "--name NAME, as you typed it when you created the cluster",
        )
        raise RunnerError(f"cannot adopt {args.file}", why, fix, exit_code=2)
    target = (project.root or project.start) / "clusters" / f"{name}.toml"
    text = f'provider = "{"google" if "deployment_groups" in data else "aws"}"\ndeployment = "{name}"\n'
    text += f"document = {quoted(os.path.relpath(path, target.parent))}\n"
    fix = f"to keep this file: runner cluster render {name}\nto replace it: add --force"
    console.answer(write_own(target, text, force=args.force, fix=fix))
    args.cluster, args.dry_run = str(target), False
    return render(args, console)
