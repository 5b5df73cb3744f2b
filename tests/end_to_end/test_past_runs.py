"""`runner diff` and `runner history` on real runs, and on what the same launch would give here now."""

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


def test_history_tells_what_became_of_each_launch_without_any_scheduler(local: Runner) -> None:
    """The states, filters and JSON of real run folders, with an empty PATH: nobody is asked."""
    alone = {"PATH": "/nonexistent"}
    assert "no runs in" in local("history", extra_environ=alone).stderr
    local.finished(*HOST, "--name", "good", "--", "a b")
    local.finished("--engine", "host", "--env", "plain", "--name", "bad", "--", "sh", "-c", "exit 3", code=3)
    shown = local("history", extra_environ=alone).stdout.splitlines()
    assert [line.split()[:1] + line.split()[3:6] for line in shown[1:]] == [
        ["good-0001", "COMPLETED", "0", "plain"],
        ["bad-0001", "FAILED", "3", "plain"],
    ]
    assert "jobs/where.sh" in shown[1] and "sh -c 'exit 3'" in shown[2]
    cases: dict[tuple[str, ...], list[str]] = {
        ("--script", "where"): ["good-0001"],
        ("--state", "failed"): ["bad-0001"],
        ("b*",): ["bad-0001"],
        ("--since", "1h"): ["good-0001", "bad-0001"],
        ("--since", "2999-01-01"): [],
    }
    for words, expected in cases.items():
        found = json.loads(local("history", "--json", *words, extra_environ=alone).stdout)
        assert [each["run"] for each in found] == expected
