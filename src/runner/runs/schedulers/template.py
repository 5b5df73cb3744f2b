"""Render the batch script from one template for all schedulers."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runner import quoting
from runner.environments.environment import Attachment
from runner.errors import RunnerError
from runner.machine import files
from runner.runs.job import Job
from runner.runs.schedulers.flags import option
from runner.site import Site

if TYPE_CHECKING:
    from types import CodeType

    import jinja2

COMMAND_BYTES = 1_000_000
"""limit for all words together; Linux allows 2 MiB including variables (a quarter of the stack), sbatch 4 MiB of
script"""


def render(
    job: Job, attachment: Attachment, site: Site, *, directives: Sequence[str], step: Sequence[str]
) -> str:
    """The batch script. `step`: the quoted words that start the tasks, before the engine's prefix.

    Raises RunnerError for a value that a script cannot contain.
    """
    import jinja2  # slow to import

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **_SYNTAX)
    environment.filters.update(
        literal=quoting.literal,
        directive=lambda word: quoting.directive(word, f"the sbatch flag {word[:60]!r}"),
    )
    of_environment = (
        name for name in {**site.env, **job.environment.env} if name.startswith(site.inside)
    )
    template = jinja2.Template.from_code(
        environment, _compiled(environment), environment.make_globals(None)
    )
    return template.render(
        job=job,
        slurm=bool(directives),
        restarts=restart_words(job, site),
        gpus=job.nodes_held * job.resources.gpus_per_node,
        directives=tuple(directives),
        host_setup=(
            *(f"module load {quoting.literal(name)}" for name in site.modules),
            *site.host_setup,
        ),
        # the prefixes of the host variables to pass to each task, the names to skip because the environment sets them
        carried=(site.inside, " ".join(of_environment)),
        exports=[
            (name, quoting.live(value, f"the variable {name}"))
            for name, value in attachment.exports.items()
        ],
        inside=_inside(job, site),
        texts=_texts(job, site),
        command=_lines(step, attachment, job),
    )


_SYNTAX: Mapping[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,  # the output is bash, not HTML; every value is quoted by a filter
    "optimized": False,  # no filter is called when the template is compiled
}


def _compiled(environment: jinja2.Environment) -> CodeType:
    """The template's code. Compiling takes a tenth of a dry run, so the code is kept in __pycache__.

    In a shared installation other users may be able to write there: their file is neither executed nor replaced.
    """
    import marshal
    from importlib.util import cache_from_source

    from jinja2.bccache import bc_magic  # the versions of jinja2's code and of Python

    path = Path(__file__).resolve().with_name("job.sbatch.j2")
    kept = Path(cache_from_source(str(path)))
    made_of = (bc_magic, repr(_SYNTAX), path.read_text(encoding="utf-8"))
    trusted = True
    with suppress(OSError, EOFError, ValueError, TypeError), open(kept, "rb", opener=_open) as file:
        status, owners = os.fstat(file.fileno()), {0, os.geteuid(), path.stat().st_uid}
        trusted = (
            stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & 0o022
        )
        if trusted:
            found, code = marshal.load(file)
            if found == made_of:
                return cast("CodeType", code)
    code = environment.compile(made_of[2], filename=str(path))
    if trusted and not sys.dont_write_bytecode:
        with suppress(RunnerError):  # another user's folder
            files.write(kept, marshal.dumps((made_of, code)), mode=0o644)
    return code


def _open(path: str, flags: int) -> int:
    """Open a file; unlike `open` itself without waiting for the writer of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


RUN = "{run}"
"""the placeholder, in the user's command, for the run folder"""


_NODES = re.compile(r"[A-Za-z0-9_.,\[\]-]+")


def excluded_nodes(flags: Sequence[str]) -> str:
    """The nodes that flags of sbatch exclude; empty if there are none, or if a file lists them."""
    found = ""
    for flag in flags:
        name, value = option(flag, "sbatch")
        if name == "exclude":
            found = value or ""
    return found if _NODES.fullmatch(found) else ""


def restart_words(job: Job, site: Site) -> str:
    """The arguments of `restarts` (payload/restart.sh); empty without [restart]."""
    if job.restart is None:
        return ""
    words = [f"{name}={text}" for name, text in job.restart.words.items()]
    way = site.scheduler if site.is_local else "chain" if job.chain else site.restart_by
    resources = job.resources
    if own := excluded_nodes(job.sbatch):
        words.append(f"exclude={own}")
    if job.keeps_nodes:
        words += [f"nodes={resources.nodes}", f"spare={resources.spare_nodes}"]
        words += [f"min_nodes={resources.min_nodes or resources.nodes}"]
        words += [
            f"tasks_per_node={job.tasks_per_node}",
            f"processes_per_node={resources.tasks_per_node}",
        ]
    return " ".join((f"by={way}", *words))


def _inside(job: Job, site: Site) -> list[tuple[str, str]]:
    """The variables of each task: those that payload/task.sh reads, then the job's own."""
    ours = {
        "RUNNER_NODES": str(job.resources.nodes),
        "RUNNER_TASKS_PER_NODE": str(job.tasks_per_node),
        "RUNNER_PROCESSES": str(job.resources.tasks_per_node),
        "RUNNER_CPUS_PER_PROCESS": str(job.resources.cpus_per_task),
        "RUNNER_WORLD_SIZE": str(job.world_size),
        "RUNNER_HANG_SECONDS": str(job.hang_seconds),
        "RUNNER_WORKDIR": "yes" if job.environment.workdir or job.program_in_image else "",
    }
    if job.save_signal:  # otherwise, payload/save.sh takes those of the trainer that the log shows
        ours["RUNNER_SAVE_SIGNAL"] = " ".join(job.save_signal)
    if job.keeps_nodes:  # place_ranks sets them for each attempt
        ours = {
            name: value
            for name, value in ours.items()
            if name not in ("RUNNER_NODES", "RUNNER_WORLD_SIZE")
        }
    if site.network_gbps:
        ours["RUNNER_NETWORK_GBPS"] = str(site.network_gbps)  # for jobs/network.py
    if job.environment.image:
        ours["PYTHONNOUSERSITE"] = "1"  # otherwise, packages in ~/.local shadow the image's
    if job.preflight:  # values for which the site sets no minimum are only measured
        promised = {
            "RUNNER_EXPECT_NETWORK": site.nccl_network,
            "RUNNER_EXPECT_WITHIN": site.allreduce_within,
            "RUNNER_EXPECT_ACROSS": site.allreduce_across,
        }
        ours |= {
            "RUNNER_PREFLIGHT": "yes",
            "RUNNER_GPUS_PER_NODE": str(job.resources.gpus_per_node),
        }
        ours |= {name: str(value) for name, value in promised.items() if value is not None}
    return [*{**ours, **job.env}.items()]


def _texts(job: Job, site: Site) -> list[tuple[str, str, str]]:
    """(name, text, delimiter) of the site's and the user's shell texts, each for a quoted here-document."""
    found = []
    for name in ("host_setup", "setup", "task_prolog", "task_epilog"):
        text = getattr(job, name).rstrip("\n")
        if name == "task_prolog":
            text = "\n".join((*site.task_setup, text)).rstrip("\n")
        if not text:
            continue
        if "\r" in text:
            raise RunnerError(
                f"{name} contains a carriage return",
                "sh reads a carriage return as part of a word",
                f"remove \\r from {name} in the TOML file",
            )
        end = "END"
        while end in text.split("\n"):
            end += "_"
        found.append((name, text, end))
    return found


def _lines(step: Sequence[str], attachment: Attachment, job: Job) -> list[str]:
    """The lines of the step: srun and its flags, the engine's words, the task, the user's words. All are quoted."""
    prefix = [quoting.live(word, "a word of the container engine") for word in attachment.prefix]
    kind = "command"
    words: tuple[str, ...] = job.command
    if job.script is not None:
        kind = "python" if job.script.endswith(".py") else "shell"
        words = ()
    task = f'/bin/sh "$RUNNER_RUN/payload/task.sh" "$RUNNER_ATTEMPT" {job.launcher} {kind}'
    script = (
        []
        if job.script is None
        else ['"$RUNNER_RUN"/code/' + quoting.literal(job.script, "the script's path")]
    )
    user = [_word(quoting.past_srun(word)) for word in (*words, *job.arguments)]
    size_bytes = len("".join(user).encode("utf-8", "surrogateescape"))
    if size_bytes > COMMAND_BYTES:
        raise RunnerError(
            f"the command is too long: {size_bytes} bytes",
            f"runner allows {COMMAND_BYTES} bytes: Linux usually allows 2 MiB, which the variables share",
            "write the arguments to a file, and pass the file's name",
        )
    return [*step, *joined(prefix), task, *joined([*script, *user])]


def _word(word: str) -> str:
    """A word of the user's, quoted. `{run}` becomes "$RUNNER_RUN", because only the script knows the run folder."""
    if RUN not in word:
        return quoting.literal(word)
    return '"$RUNNER_RUN"'.join(quoting.literal(part) if part else "" for part in word.split(RUN))


def joined(words: Sequence[str]) -> list[str]:
    """The words, joined into lines of about 100 characters, so that a long command stays readable."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < 100:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
