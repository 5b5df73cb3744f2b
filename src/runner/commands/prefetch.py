"""prefetch."""

import argparse
import os

from runner.commands.console import Console
from runner.errors import RunnerError
from runner.machine import process
from runner.project import find_project
from runner.runs import prefetch
from runner.runs.plan import Request


def prefetch_job(args: argparse.Namespace, console: Console) -> int:
    """`runner prefetch`: print the folder of each model and dataset in the cache."""
    if not (args.job or args.script or args.rest):
        raise RunnerError(
            "prefetch: no job is given",
            "prefetch downloads the models and datasets that a job needs",
            "runner prefetch JOB, or runner prefetch --script SCRIPT -- ARGS…",
            exit_code=2,
        )
    project = find_project()
    request = Request(
        job=args.job,
        env=args.env,
        script=args.script,
        words=args.rest,
        site=args.site,
        engine=args.engine,
    )
    plan = prefetch.plan(request, project, os.environ, console)
    if not plan.wanted:
        console.say("nothing to download: the job uses no model or dataset from the hub")
        return 0
    doing = "would download" if args.dry_run else "downloading"
    console.say(f"{doing} to {plan.home}: {', '.join(map(str, plan.wanted))}")
    options = (*(("--dry-run",) if args.dry_run else ()), *(("--json",) if args.json else ()))
    with prefetch.prepared(plan, project, os.environ, console, options) as call:
        return process.attached(call.argv, env=call.env, cwd=call.cwd)
