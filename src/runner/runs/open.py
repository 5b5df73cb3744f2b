"""`runner open`: JupyterLab, TensorBoard, VS Code's server or sshd in a run's container, and the tunnel to it.

In an environment, the server is a run of its own. In a running run, it is one more step of the job. open.sh starts it.
"""

from __future__ import annotations

import shlex
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from runner.detection import find_site
from runner.environments.edf import Mount
from runner.environments.engines import choose, engine_of
from runner.environments.environment import Attachment, Environment
from runner.errors import RunnerError
from runner.machine import files, folders, process, sessions, tunnel
from runner.machine.report import Report
from runner.machine.tunnel import Tunnel
from runner.project import Project
from runner.runs import launch, shell, submit
from runner.runs.budget import estimate
from runner.runs.follow import Watch
from runner.runs.hub import shared_cache
from runner.runs.job import command_line, time_limit_minutes
from runner.runs.plan import EDF, Request
from runner.runs.prefetch import PYTHON
from runner.runs.run import Run, is_cancelled, list_runs, reloaded
from runner.runs.schedulers import slurm_commands
from runner.runs.shell import ShellRequest
from runner.runs.snapshot import Snapshot
from runner.runs.status import RunStatus, ask, goes_on
from runner.site_files import load_site

APPS: Mapping[str, str] = {"jupyter": "/lab?token=", "tensorboard": "/?token=", "code": "/?tkn="}
"""the programs with a page -> the path of its URL"""
SSH = "ssh"
IDLE_MINUTES = 60
_START = ("sh", "-c", 'exec sh "$RUNNER_RUN/open/open.sh" "$@"', "sh")
# without a new enough Python on the node, the container's is used
_FAR = (
    "sh",
    "-c",
    'python3 -c "import sys; sys.exit(sys.version_info < (3, 8))" || exit 127; exec python3 "$@"',
    "sh",
)


def started(
    app: str,
    request: ShellRequest,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    idle_seconds: int = 0,
) -> tuple[Run, int]:
    """The run with the server: one that has it already, the running run that the user named, or a new run.

    Also the process that starts the server inside a running run; 0: none.
    """
    site = find_site(request.site, environ)[0]
    runs = site.runs(environ, project)
    run = shell.named_run(request.where, runs, project)
    if run is None:
        name = launch.find_environment(request.where, project, environ, site, report).name
        known = [each for each in list_runs(runs) if each.environment == name]
        own = [each for each in known if _has_server(each, app)][-5:]
        run = next((status.run for status in reversed(ask(own)) if _can_be_opened(status)), None)
    status = ask([run])[0] if run else None
    if status and status.state == "UNKNOWN" and goes_on(status):
        raise _not_known(status)
    if run is None or status is None or not _can_be_opened(status):
        return _launched(app, request, run, project, environ, report, idle_seconds), 0
    if not _has_server(run, app) and not _server(app, status):
        return run, _start_inside(
            app, replace(request, where=str(run.folder)), project, environ, report
        )
    return run, 0


def _has_server(run: Run, app: str) -> bool:
    """Whether the run is one of `runner open`. A job of the user may have the name of a program too."""
    return run.command_line[:2] == ("open", app)


def _can_be_opened(status: RunStatus) -> bool:
    """Whether the job of the run waits or runs, and is not about to end: somebody may just have cancelled it."""
    return status.active and status.state != "COMPLETING" and not is_cancelled(status.run)


def _files() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    sources = (here / "open.sh", Path(tunnel.__file__))
    return {f"open/{path.name}": path.read_text(encoding="utf-8") for path in sources}


def _launched(
    app: str,
    request: ShellRequest,
    ended: Run | None,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    idle_seconds: int,
) -> Run:
    """A new run with the server: in the user's project folder, or in the folder of a run that has ended."""
    engine = request.engine or choose(find_site(request.site, environ)[0])[0]
    packages: tuple[Mount, ...] = ()
    if engine_of(engine).uses_container:
        packages = (Mount("${RUNNER_CACHE}/open", "/opt/runner-packages", ("ro",)),)

    def furnished(environment: Environment) -> Environment:
        if ended is None:
            live = shell.in_live_folder(environment, project, report.say)
            return replace(live, mounts=(*live.mounts, *packages))
        # its emitted EDF has the mounts of every run too, which the new run gets again
        mounts = tuple(mount for mount in environment.mounts if "${RUNNER_" not in mount.source)
        own = Mount(str(ended.folder), str(ended.folder))
        return replace(
            environment,
            name=ended.environment,
            workdir=own.target,
            mounts=(*mounts, own, *packages),
        )

    settings = {
        "name": app,
        "launcher": "none",
        "preflight": False,
        "hang_seconds": 0,
        "trainer": "none",
    }
    plan = launch.prepare(
        Request(
            env=str(ended.folder / EDF) if ended else request.where,
            site=request.site,
            engine=request.engine,
            words=(*_START, app, str(ended.folder if ended else project.start), str(idle_seconds)),
            given={**request.given, **command_line(settings)},
            furnished=furnished,
        ),
        project,
        environ,
        report,
    )
    if (cost := estimate(plan.job)) is not None:
        report.say(f"cost of this run: {cost.text(1)}")
    runs = plan.site.runs(environ, project)
    folders.make(shared_cache(runs / "run", environ) / "open")
    plan = replace(plan, files={**plan.files, **_files()}, snapshot=Snapshot((), None))
    return submit.submit(
        plan, runs, ("open", app, *([request.where] if request.where else [])), report
    )


def _start_inside(
    app: str, request: ShellRequest, project: Project, environ: Mapping[str, str], report: Report
) -> int:
    """Start the server as a step of a running run, and return the process that does. It ends with the attempt."""
    folder = Path(request.where or "")
    folders.fill(folder, _files())
    request = replace(request, command=(*_START, app, str(folder)))
    with shell.prepared(request, project, environ, report) as call:
        return process.detached(call.argv, folder / f"open/{app}.log", cwd=call.cwd, env=call.env)


def _server(app: str, status: RunStatus) -> tuple[str, Path] | None:
    """(node, socket) of the server; None if it does not run."""
    words = status.run.text(f"open/{app}/server").split()
    if len(words) != 3 or words[0] not in ("local", status.job_id.partition("_")[0]):
        return None
    return words[1], Path(words[2]) / "socket"


def wait(app: str, run: Run, pid: int, report: Report) -> tuple[str, Path]:
    """(node, socket) of the server, as soon as it listens. Raises RunnerError if it has ended instead."""
    said = ""
    log = run.folder / f"open/{app}.log" if pid else run.log
    watch, status = Watch(run), ask([reloaded(run)])[0]
    while goes_on(status) and (not pid or sessions.identity(pid)):
        now = f"{run.name} is {status.state} {status.reason}".strip()
        if now != said:
            report.say(now)
            said = now
        found = _server(app, status) if status.state == "RUNNING" else None
        if found:
            return found
        time.sleep(0.2)
        status = watch.status() or status
    if status.state == "UNKNOWN":
        what = f"it is not known whether the server of {run.name} still runs"
        raise RunnerError(what, status.reason, "run the same command again")
    last = "\n".join(files.text_of(log).splitlines()[-8:])
    raise RunnerError(
        f"the server of {run.name} has ended", last or "it printed nothing", f"read {log}"
    )


def connected(
    app: str, run: Run, node: str, server: Path, environ: Mapping[str, str], report: Report
) -> Tunnel:
    """The tunnel to the server. Raises RunnerError if the server does not answer."""
    far = (str(run.folder / "open/tunnel.py"), str(server))
    port = (
        20000 + zlib.crc32(str(run.folder / app).encode()) % 10000
    )  # the same for each `runner open`
    if run.is_local:
        found = Tunnel((sys.executable, *far), port)
    else:
        there = Attachment(flags=(*load_site(run.site).srun, f"--nodelist={node}"))
        found = Tunnel(
            slurm_commands.shell(
                there, (*_FAR, *far), ask([run])[0].job_id or run.job_id, pty=False
            ),
            port,
        )
    code = 0 if found.is_ready else found.close()
    if code == 127:
        given = command_line({"srun": (f"--nodelist={node}",)})
        request = ShellRequest(
            str(run.folder), ("sh", "-c", PYTHON, "sh", *far), run.site, given=given
        )
        with shell.prepared(
            request, Project(None, run.folder, run.folder), environ, report
        ) as call:
            found = Tunnel(call.argv, port, process.environment(call.env))
        code = 0 if found.is_ready else found.close()
    if not found.is_ready:
        folders.discard(run.folder / f"open/{app}/server")
        why = f"the step on {node} ended with exit code {code}; see the message above"
        raise RunnerError(
            f"cannot connect to the server of {run.name}", why, "run the same command again"
        )
    return found


def ssh_config(run: Run, program: Sequence[str]) -> str:
    """The block of an ssh configuration with which `ssh runner-RUN` opens a shell in the container.

    `program`: the words that start runner. In an ssh configuration, `%` must be doubled.
    """
    state, name = run.folder / f"open/{SSH}", f"runner-{run.name}"
    host_key = " ".join(files.text_of(state / "host.pub").split()[:2])
    files.write(state / "known_hosts", f"{name} {host_key}\n", mode=0o600)
    proxy = shlex.join(
        (*program, "open", SSH, str(run.folder), "--stdio", "--site", run.site)
    ).replace("%", "%%")
    lines = (
        f"Host {name}",
        f"    User {files.text_of(state / 'login').strip()}",
        f"    IdentityFile {_in_config(state / 'user')}",
        "    IdentitiesOnly yes",
        f"    UserKnownHostsFile {_in_config(state / 'known_hosts')}",
        f"    HostKeyAlias {name}",
        f"    ProxyCommand {proxy}",
    )
    return "\n".join((*lines, ""))


def running(where: str, site: str | None, project: Project, environ: Mapping[str, str]) -> Run:
    """The run that a word names. Raises RunnerError if it has ended: an editor that connects must not start a job."""
    runs = find_site(site, environ)[0].runs(environ, project)
    run = shell.named_run(where, runs, project)
    status = ask([run])[0] if run else None
    if run is None or status is None or not status.active:
        if status and status.state == "UNKNOWN":
            raise _not_known(status)
        why = f"{run.name} has ended" if run else "it is not a run"
        if status and status.state == "PREPARING":
            why = f"{status.run.name}: {status.reason}"
        raise RunnerError(f"cannot connect to {where}", why, f"runner open {SSH} ENV starts a run")
    if not _has_server(run, SSH) and not _server(SSH, status):
        # it ended with its attempt, and no other starts by itself
        why = f"no sshd of `runner open` runs in {run.name}"
        raise RunnerError(f"cannot connect to {where}", why, f"runner open {SSH} {run.name}")
    return run


def _not_known(status: RunStatus) -> RunnerError:
    name = status.run.name
    why = f"it is not known whether {name} still runs: {status.reason}"
    return RunnerError(f"cannot connect to {name}", why, "run the same command again")


def _in_config(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'


def minutes_left(run: Run) -> int | None:
    """The minutes until the time limit; None if there is no limit or it is not known, -1 if the run does not run."""
    status = ask([reloaded(run)])[0]
    if status.state != "RUNNING":
        return None if status.state == "UNKNOWN" else -1
    with suppress(RunnerError):
        return time_limit_minutes(status.time_left, "the time left")
    return None
