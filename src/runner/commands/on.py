"""`--on HOST`: run the verb on another machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from runner import __version__
from runner.commands.console import Console
from runner.errors import RunnerError
from runner.machine import files, folders, process
from runner.project import Project, find_project, is_shared_place
from runner.remote import code
from runner.remote.host import find_host, host_names
from runner.remote.ssh import Connection

_HERE = ("cluster", "completion", "connect", "importer", "init", "skill")
_PAUSE_SECONDS, _PATIENCE_SECONDS = (
    2,
    600,
)  # between two attempts to connect again; until it gives up


def run_on(
    names: Sequence[str], words: Sequence[str], args: argparse.Namespace, console: Console
) -> int:
    """Run the command line on each host, and return its exit code. `args` is the same command line, parsed."""
    name = names[0]
    if args.verb in _HERE:
        raise RunnerError(
            f"{args.verb} does not take --on",
            "it is about this machine",
            "leave out --on" if name == "all" else f"ssh {find_host(name, os.environ).target}",
            exit_code=2,
        )
    if names != [name] or name == "all":
        return _side_by_side(names, words, args, console)
    connection = Connection(find_host(name, os.environ), os.environ)
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not connection.is_open():
        connection.open(terminal=terminal)
    call = _prepared(connection, words, args, console)
    if args.verb == "open":
        return _open(connection, call, args)
    follows = args.verb == "logs" and args.follow
    output, waited = Lines(sys.stdout.buffer), 0
    while True:
        try:
            if waited and not connection.is_open():
                connection.open(terminal=False)
            written = BytesIO()  # the path there; empty if the verb had nothing to write
            plain = written if call.writes else sys.stdout.buffer
            exit_code, noise = _once(connection, call, args, terminal, output if follows else plain)
            if written.getvalue() and not exit_code:
                name = os.fsdecode(written.getvalue()).rstrip("\n").rpartition("/")[2]
                _fetch(connection, call, args.verb, name, console)
            if exit_code != 255:
                output.end()
                return exit_code
            lost = RunnerError(
                f"the connection to {name} was lost",
                noise or "ssh ended with exit code 255",
                f"check what was done (runner --on {name} status), then run the same command again",
                exit_code=255,
            )
        except _NotInstalled as error:
            if not terminal or not error.solved(connection, console):
                raise
            continue
        except RunnerError as error:
            if not waited:
                raise
            lost = error
        if not follows or waited > _PATIENCE_SECONDS:
            raise lost
        console.say(f"{lost.what}; reconnecting")
        time.sleep(_PAUSE_SECONDS)
        waited += _PAUSE_SECONDS
        output.begin_again()


class _Call(NamedTuple):
    words: str
    """quoted for sh"""
    values: Mapping[str, str]
    """for verb.sh"""
    writes: str = ""
    """the file that the verb writes there, or its folder, and that belongs here"""


def _prepared(
    connection: Connection, words: Sequence[str], args: argparse.Namespace, console: Console
) -> _Call:
    """Send the files that the verb reads, and return its call."""
    words, replaced, writes = _local_options(words, args)
    project = find_project()
    main = code.top_of(project)
    if args.verb in code.VERBS:
        main, named = _files(args, project)
        if main is not None or named:
            parcel = code.pack(main, named, connection.host.site, os.environ)
            code.send(connection, parcel, os.environ, console)
            replaced |= parcel.words
    elif main is None:
        main = project.start
    inside = main is not None and project.start.is_relative_to(main)
    place = (
        {"top": str(main), "here": str(project.start)} if inside else {"top": "/none", "here": ""}
    )
    return _Call(
        code.quoted(words, replaced), {**place, "writes": replaced.get(writes, "")}, writes
    )


def _local_options(
    words: Sequence[str], args: argparse.Namespace
) -> tuple[Sequence[str], dict[str, str], str]:
    """(the words for HOST, new paths in them, the file to bring back). Raises RunnerError for options that change the
    project."""
    changing = [
        name
        for name in ("fix", "into", "output", "job")
        if args.verb == "env" and getattr(args, name, None)
    ]
    if changing:
        what, fix = (
            f"--on cannot be used with env {args.action} --{changing[0]}",
            f"leave out --on, or leave out --{changing[0]} and use what the command prints",
        )
        raise RunnerError(
            what, "it changes files of the project, which is on this machine", fix, exit_code=2
        )
    words = [
        word for word in words if (args.verb, word) != ("open", "--browser")
    ]  # the browser of this machine
    option = {"account": "png", "plot": "png", "report": "output"}.get(args.verb, "")
    writes: str = "" if option and args.json else getattr(args, option, None) or ""
    if args.verb == "report" and not (writes or args.md or args.json):
        writes = f"{Path.cwd()}/"
        words = [*words, "-o", writes]
    # in a folder, HOST chooses the name: it knows which run `last` is
    if args.verb == "report" and writes and (writes.endswith("/") or Path(writes).is_dir()):
        there = f".{secrets.token_hex(8)}/"
    else:
        there = f".{secrets.token_hex(8)}{Path(writes).suffix}"
    return words, {writes: there} if writes else {}, writes


def _fetch(connection: Connection, call: _Call, verb: str, name: str, console: Console) -> None:
    """Bring the file that the verb has written to this machine, and print its path.

    `name`: that of the file there, which it keeps if the user has named a folder.
    """
    from runner.commands.report import write_page  # slow, and few verbs need it

    target, there = Path(call.writes).absolute(), call.values["writes"]
    if there.endswith("/"):
        target, there = target / name, there + name
    write = write_page if verb == "report" else files.write
    write(target, b64decode(connection.ask("fetch.sh", name=there)))
    console.answer(str(target))


def _files(args: argparse.Namespace, project: Project) -> tuple[Path | None, dict[str, Path]]:
    """(the project or folder to send, the words of the command line that name files, with the files)."""
    named, main = code.named_files(args, project), code.top_of(project)
    if args.verb != "launch":
        return main, named
    from runner.commands.launch import launch_request
    from runner.runs.git import work_tree
    from runner.runs.job import value
    from runner.runs.launch import find_program

    with suppress(RunnerError):  # HOST may know the job
        job, program = find_program(launch_request(args), project)
        if program.outside:
            named.setdefault(str(program.outside), program.outside)
        main = program.main
        if "batch" in job:
            folder = Path(value(job, "batch")).absolute().parent
            main = project.root or work_tree(folder) or folder
            main = None if is_shared_place(main) else main
    return main, named


def _once(
    connection: Connection,
    call: _Call,
    args: argparse.Namespace,
    terminal: bool,
    output: IO[bytes] | Lines,
) -> tuple[int, str]:
    """(exit code of the verb, what ssh printed if the verb did not start)."""
    name, mark = connection.host.name, f"runner-{secrets.token_hex(8)}"
    argv = connection.verb(call.words, mark, terminal=terminal, **call.values)
    outputs = (output, sys.stderr.buffer)
    child = process.Marked(
        argv, mark.encode(), outputs, terminal=terminal, reads=args.verb == "shell"
    )
    exit_code = child.wait(
        lambda pid: process.run(connection.argv(f"kill -INT {pid}"), check=False, own_session=True)
    )
    state = child.head.rpartition(" ")[0]
    if state in ("", "ready"):
        return exit_code, child.noise
    what, why = (
        f"{name} has {state}, this machine has runner {__version__}",
        "both must be the same",
    )
    if state == "missing":
        what, why = (
            f"runner is not installed on {name}",
            "it is neither on PATH there nor in ~/.local/bin, or it does not start",
        )
    raise _NotInstalled(what, why, f"runner connect {name} --install")


class _NotInstalled(RunnerError):
    def solved(self, connection: Connection, console: Console) -> bool:
        """Ask the user, and install runner on HOST."""
        console.say(
            f"{self.what}. Install runner {__version__} there, in {connection.host.folder}? [y/N]"
        )
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False
        from runner.remote.install import install

        install(connection, console)
        return True


class Lines:
    """The output of a verb that is started again after a lost connection: what was printed before is left out.

    Only the number of equal lines counts, because the lines of several ranks may come in another order.
    """

    def __init__(self, output: IO[bytes]) -> None:
        self._output, self._rest = output, b""
        self._printed: Counter[bytes] = Counter()
        self._repeated: Counter[bytes] = Counter()

    def begin_again(self) -> None:
        """The output comes from its beginning."""
        self._repeated, self._rest = self._printed.copy(), b""

    def write(self, data: bytes) -> None:
        # the states of a progress bar end in \r
        *lines, self._rest = re.split(rb"(?<=[\r\n])", self._rest + data)
        for line in lines:
            if self._repeated[line] > 0:
                self._repeated[line] -= 1
                continue
            self._printed[line] += 1
            self.print(line)

    def print(self, line: bytes) -> None:
        self._output.write(line)

    def end(self) -> None:
        """The output is complete: print its last line, which may have no line end."""
        if self._rest:
            self._output.write(self._rest)
            self._rest = b""
            self.flush()

    def flush(self) -> None:
        self._output.flush()


def _open(connection: Connection, call: _Call, args: argparse.Namespace) -> int:
    """`runner open` on the host: the page has a port of this machine too."""
    page = Page(connection, args.browser, sys.stdout.buffer)
    try:
        return _once(connection, call, args, False, page)[0]
    finally:
        page.close()


class Page(Lines):
    """The URL that `runner open` prints on the host, with the port of this machine that leads there."""

    def __init__(self, connection: Connection, browser: bool, output: IO[bytes]) -> None:
        super().__init__(output)
        self._connection, self._browser, self._forward = connection, browser, ""
        self._file = Path(files.write_new("runner-page-", ".html", ""))

    def print(self, line: bytes) -> None:
        if url := re.match(rb"(http://127\.0\.0\.1:)(\d+)(/.*)", line):
            self._forward = self._connection.forward(int(url[2]))
            line = url[1] + self._forward.split(":")[1].encode() + url[3] + b"\n"
        super().print(line)
        if url and self._browser:
            from runner.commands.open import open_browser  # slow

            open_browser(line.decode().rstrip(), self._file)

    def close(self) -> None:
        folders.discard(self._file)
        if self._forward:
            self._connection.cancel(self._forward)


def _side_by_side(
    names: Sequence[str], words: Sequence[str], args: argparse.Namespace, console: Console
) -> int:
    """The same command on several hosts, or on all that have a file; a host that does not answer is named."""
    from concurrent.futures import ThreadPoolExecutor

    from runner.commands.launch import FORECAST, forecast_cells

    asks = args.verb == "launch" and args.ask
    if "all" in names and not (known := host_names(os.environ)):
        why, fix = (
            "there is no file ~/.config/runner/hosts/NAME.toml",
            f"runner {args.verb} --on HOST",
        )
        raise RunnerError("no hosts are known", why, fix, exit_code=2)
    if args.verb != "status" and not asks:
        why = "only `runner status` and `runner launch --dry-run --ask` accept several"
        raise RunnerError(
            f"`runner {args.verb}` can ask only one host at a time",
            why,
            f"name one: runner {args.verb} --on HOST",
            exit_code=2,
        )
    names = list(dict.fromkeys(known if "all" in names else names))
    words = ("--json", *words) if asks and not args.json else words

    def ask(name: str) -> process.Completed:
        argv = (sys.executable, "-P", "-m", "runner", "--on", name, *words)
        try:
            return process.run(argv, check=False, timeout_seconds=_PATIENCE_SECONDS)
        except RunnerError as error:  # the other hosts have answered
            return process.Completed(argv, 1, "", f"no answer: {error.why}")

    with ThreadPoolExecutor() as pool:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    found = (
        {name: json.loads(done.stdout or "null") for name, done in answers.items()}
        if asks or args.json
        else {}
    )
    if args.json:
        console.answer_json(found, schema=None)  # what each host answers has its own number
    elif asks:
        rows = [
            (name, (row or {}).get("site", "-"), *forecast_cells(row))
            for name, row in found.items()
        ]
        console.table(("HOST", "SITE", *FORECAST), rows, wrap=True)
    for name, done in answers.items():
        if not args.json and not asks:
            nothing = "  no answer" if done.exit_code else "  no runs"
            console.answer(f"{name}:\n{done.stdout.rstrip() or nothing}")
        if done.exit_code and not (asks and done.stdout):
            console.warn(
                f"{name}: {' '.join(done.stderr.split()) or f'exit code {done.exit_code}'}"
            )
    codes = [done.exit_code for done in answers.values()]
    return min(codes) if asks else max(codes)  # a job can be launched where one host accepts it
