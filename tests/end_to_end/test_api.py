"""runner.api does what the verbs do, on a real Slurm: the same results, nothing printed, errors in three parts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, write

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.S)[0]
TRAIN = """\
import json, os, sys, time

steps = int(sys.argv[sys.argv.index("--steps") + 1])
with open(os.environ["RUNNER_RUN"] + "/metrics.jsonl", "a") as file:
    for step in range(1, steps + 1):
        entry = {"step": step, "total_steps": steps, "loss": 10 / step, "time": time.time(), "attempt": 1}
        print(json.dumps(entry), file=file)
if "--fail" in sys.argv:
    raise ModuleNotFoundError("No module named 'flash_attn'")
print("trained")
"""


def python(runner: Runner, code: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python code in the project, where runner finds the cluster of the test."""
    argv, environ = (sys.executable, "-c", code), {**runner.environ, "RUNNER_SITE": runner.site}
    done = subprocess.run(argv, env=environ, cwd=runner.project, capture_output=True, text=True, timeout=240)
    assert done.returncode == exit_code, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def training(cluster: Runner) -> Runner:
    write(cluster.project, {"jobs/train.py": TRAIN, "jobs/train.toml": 'script = "jobs/train.py"\nlauncher = "none"\n'})
    return cluster


def test_the_example_of_the_page_runs(training: Runner) -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 10
    example = EXAMPLE.replace('env="cpu",', 'env="plain", engine="host",')
    done = python(training, example)
    assert done.stdout == "train-0001: COMPLETED, exit code 0\nloss 0.33 after step 30\n"
    assert done.stderr == ""
    done = python(training, example.replace("30]", '30, "--fail"]'))
    first, second = done.stdout.splitlines()
    assert first == "train-0002: FAILED, exit code 1"
    assert re.match(r"module-missing: .*flash_attn", second), done.stdout


def test_each_function_returns_what_its_verb_prints(training: Runner) -> None:
    """The records of the results are the JSON of the verbs."""
    folder, _ = training.finished("--env", "plain", "--engine", "host", "--script", "train", "--", "--steps", "3")
    code = """
import json
from runner import api
from runner.runs.history import Filters

found = {
    "status": [each.record() for each in api.status("last")],
    "history": [each.record() for each in api.history(Filters(job="train*"))],
    "account": [each.record() for each in api.account("last")],
    "why": api.why("last").record(),
    "plot": [list(point) for point in api.metrics("last")[0].points],
    "logs": api.logs("last"),
    "tail": api.logs("last", last=1),
}
print(json.dumps(found, default=str))
"""
    found = json.loads(python(training, code).stdout)
    for verb in ("status", "history", "why"):
        words = (verb,) if verb == "history" else (verb, "last")
        printed = json.loads(training(*words, "--json").stdout)
        for each in printed if isinstance(printed, list) else [printed]:
            assert each.pop("schema") == 1
        assert found[verb] == printed, verb
    assert found["account"] == json.loads(training("account", "--json").stdout)["runs"]
    assert found["plot"] == json.loads(training("plot", "--json").stdout)[0]["points"] == [[1, 10], [2, 5], [3, 10 / 3]]
    assert found["logs"] == training("logs", "last").stdout and found["tail"] in found["logs"]
    assert str(folder) == found["status"][0]["folder"]


def test_differences_environments_and_reports(training: Runner) -> None:
    for steps in ("3", "4"):
        training.finished("--env", "plain", "--engine", "host", "--script", "train", "--", "--steps", steps)
    write(training.project, {"edf/bad.toml": 'image = "/nowhere/x.sqsh"\nunknown = 1\n'})
    code = """
import json
from runner import api
from runner.environments.lint.finding import as_data

found = {
    "diff": [vars(each) for each in api.diff("train-0001", "train-0002").differences],
    "now": [vars(each) for each in api.diff("train-0001").differences],
    "check": [as_data(each) for each in api.env_check("bad", engine="pyxis")],
    "html": str(api.report("train-0001", "train-0002", output="../both.html")),
    "md": str(api.report(output="../last.md")),
}
print(json.dumps(found, default=str))
"""
    found = json.loads(python(training, code).stdout)
    assert (
        found["diff"]
        == json.loads(training("diff", "train-0001", "train-0002", "--json", code=1).stdout)["differences"]
    )
    assert [each["name"] for each in found["diff"]] == ["arguments"], found["diff"]
    assert found["now"] == json.loads(training("diff", "train-0001", "--json", code=None).stdout)["differences"]
    shown = training("env", "check", "--engine", "pyxis", "bad", "--json", code=1).stdout
    assert found["check"] == json.loads(shown)["findings"] and found["check"]
    assert found["html"] == str(training.project / "../both.html") and "train-0002" in Path(found["html"]).read_text()
    assert "train-0002" in Path(found["md"]).read_text() and found["md"].endswith("/last.md")


def test_sweeps_waits_cancels_and_reruns(training: Runner) -> None:
    code = """
from runner import api
from runner.errors import RunnerError

swept = api.launch(env="plain", engine="host", script="train", args=["--steps", "{n}"], name="s", sweep=["n=2,4"],
                   tag=["a", "b"])
(long,) = api.launch(engine="host", env="plain", args=["sleep", "600"], tag="c")
try:
    api.wait(long, timeout_seconds=0.5)
except RunnerError as error:
    print(error.what, "|", error.why)
print([was for _, was in api.cancel(long)], api.wait(long)[0].state)
again = api.rerun(swept[0], tags=["again"])
print([each.state for each in api.wait(*swept, again)], again.name, again.tags, swept[0].tags, swept[1].parameters)
print(len(api.status()), api.status(swept[0].sweep)[1].run.name)
"""
    done = python(training, code)
    assert done.stdout.splitlines() == [
        "not all runs have ended | waited for 0.5 s",
        "[True] CANCELLED",
        "['COMPLETED', 'COMPLETED', 'COMPLETED'] s-0003 ('again',) ('a', 'b') {'n': '4'}",
        "4 s-0002",
    ]
    assert done.stderr == ""
    line = json.loads((training.runs / "s-0001/run.json").read_text())["command_line"]
    assert line[:2] == ["launch", "--env=plain"] and line[-3:] == ["--", "--steps", "{n}"]


def test_errors_have_three_parts_and_a_question_is_an_error(training: Runner) -> None:
    code = """
from runner import api
from runner.errors import RunnerError

(made,) = api.launch(engine="host", env="plain", args=["true"])
for call in (
    lambda: api.status("none-0001"),
    lambda: api.launch(script="train", env="plain", nodez=2),
    lambda: api.launch(script="train", dry_run=True),
    lambda: api.launch(),
    lambda: api.metrics(made, axis="steps"),
    lambda: api.logs(made, attempt=7),
    lambda: api.env_check("none"),
    lambda: api.diff("none-0001"),
    lambda: api.report(made, output="/proc/none/x.html"),
):
    try:
        call()
    except RunnerError as error:
        assert error.what and error.why and error.fix
        print(error.what)
"""
    done = python(training, code)
    assert done.stdout.splitlines() == [
        "there is no run 'none-0001'",
        "launch: unknown option '--nodez=2'",
        "launch has no option 'dry_run'",
        "nothing to launch",
        "there is no axis 'steps'",
        "true-0001 has no attempt 7",
        "there is no environment 'none'",
        "there is no run 'none-0001'",
        "cannot write /proc/none/x.html",
    ]


def test_messages_go_to_the_logger(training: Runner) -> None:
    code = "import logging; logging.basicConfig(level=logging.INFO); from runner import api; "
    code += "api.cancel(*api.launch(env='plain', engine='host', args=['true']))"
    done = python(training, code)
    assert done.stdout == ""
    assert re.search(r"^INFO:runner:true-0001: job \d+, in /", done.stderr, re.M)


def test_the_import_is_fast_and_leaves_torch_and_slow_packages_alone() -> None:
    """It takes as long as ten starts of Python at most: seconds would say more about the machine."""
    code = "import sys, time; begun = time.process_time(); import runner.api; "
    code += "print((time.process_time() - begun) / begun); "
    code += "assert not {'torch', 'jinja2', 'tomlkit', 'rich', 'docker', 'urllib3'} & {*sys.modules}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    starts = []
    for _ in range(5):
        done = subprocess.run((sys.executable, "-c", code), env=environ, capture_output=True, text=True, check=True)
        starts.append(float(done.stdout))
    assert min(starts) < 10, starts
