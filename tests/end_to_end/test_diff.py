"""`runner diff` on real runs, and on what the same launch would give here now."""

import json

from tests.end_to_end.conftest import Runner, environment, write

HOST = ("--engine", "host", "--env", "plain", "--script", "where")


def test_a_run_differs_from_a_launch_here_by_what_was_changed_since(local: Runner) -> None:
    """Nothing at first (exit code 0); then the script, a variable and an argument, each in its own line."""
    local.finished(*HOST, "--", "a b")
    local("diff", "last", code=0)
    local.finished(*HOST, "--", "c")
    found = json.loads(local("diff", "where-0001", "where-0002", "--json", code=1).stdout)
    assert [(each["kind"], each["left"], each["right"]) for each in found["differences"]] == [
        ("arguments", ["a b"], ["c"])
    ]
    write(local.project, {"jobs/where.sh": "echo other\n", "edf/plain.toml": environment(None, env={"FROM_EDF": "2"})})
    shown = local("diff", "where-0001", ".", code=1).stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["WHAT", "NAME"],
        ["code", "edf/plain.toml"],
        ["code", "jobs/where.sh"],
        ["variables", "FROM_EDF"],
    ]
    assert shown[-1].split()[2:] == ["edf", "2"]
