"""What the verbs print with --json is documented: docs/schemas has a schema for each, which names every field."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.cli import VERBS, make_parser
from runner.images.squashfs_file import Squashfs, as_json, sidecar
from tests.end_to_end.conftest import Runner, write
from tests.schemas import SCHEMAS, check, schema_of


def actions(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """(verb, its options) of all verbs, those with actions such as `env check` included."""
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for each in inner:
        for word, sub in each.choices.items():
            yield from actions(sub, f"{name} {word}".strip())
    if not inner:
        yield name, set(parser._option_string_actions)


def with_json() -> set[str]:
    return {verb for verb, options in actions(make_parser(tuple(VERBS))) if "--json" in options}


def documented() -> list[str]:
    return sorted(json.loads(path.read_text())["title"].split(" ", 1)[1].removesuffix(" --json")
                  for path in SCHEMAS.glob("*.json"))  # fmt: skip


def test_each_verb_with_json_has_a_schema() -> None:
    assert with_json() == {*documented()}


def test_the_page_lists_each_schema() -> None:
    page = (SCHEMAS.parent / "json-output.md").read_text()
    assert sorted(re.findall(r"\]\(schemas/([\w-]+)\.json\)", page)) == [
        verb.replace(" ", "-") for verb in documented()
    ]


def parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key])
    for part in (*schema.get("oneOf", ()), *schema.get("prefixItems", ()), *schema.get("properties", {}).values()):
        yield from parts(part)


@pytest.mark.parametrize("verb", documented())
def test_each_field_is_described_and_no_other_is_allowed(verb: str) -> None:
    schema = schema_of(verb)
    Draft202012Validator.check_schema(schema)
    for part in parts(schema):
        assert part["description"].endswith("."), part
        if "object" in part.get("type", ()):
            assert "additionalProperties" in part, part
            assert part["additionalProperties"] is False or "description" in part["additionalProperties"]


METRICS = """\
import json, os, time

for step in range(1, 4):
    entry = {"step": step, "total_steps": 3, "loss": 1 / step, "time": time.time(), "attempt": 1}
    entry["tokens_per_second"] = 5.0
    with open(os.environ["RUNNER_RUN"] + "/metrics.jsonl", "a") as file:
        print(json.dumps(entry), file=file)
raise ModuleNotFoundError("No module named 'flash_attn'")
"""


@pytest.fixture
def ran(local: Runner, project: Path) -> Runner:
    """A project with a run that failed."""
    write(project, {"train.py": METRICS})
    local("launch", "--wait", "--engine", "host", "--name", "train", "--", "python3", str(project / "train.py"), code=1)
    return local


def test_runs(ran: Runner) -> None:
    """What is printed about a run that failed, a run that ended well, and a sweep."""
    launched = ("launch", "--json", "--engine", "host", "--tag", "a", "--")
    other = check("launch", ran(*launched, "true").stdout)["run"]
    swept = ("launch", "--json", "--engine", "host", "--sweep", "n=1,2", "--", "echo", "{n}")
    sweep = check("launch", ran(*swept).stdout)["sweep"]
    ran("watch", other, sweep)
    asked = check("launch", ran("launch", "--json", "--dry-run", "--ask", "--engine", "host", "--", "true").stdout)
    assert (asked["accepted"], asked["start"], asked["why"]) == (True, "now", None)
    (status, *_) = check("status", ran("status", "--json", "train-0001").stdout)
    assert (status["state"], status["exit_code"], status["step"], status["total_steps"]) == ("FAILED", 1, 3, 3)
    check("status", ran("status", "--json").stdout)
    assert len(check("history", ran("history", "--json").stdout)) == 4
    why = check("why", ran("why", "--json", "train-0001").stdout)
    assert why["cause"]["code"] == "module-missing" and why["frame"]
    check("why", ran("why", "--json", other).stdout)
    check("why", ran("why", "--json", "--list").stdout)
    for words in (("train-0001",), ("train-0001", other, sweep), ("--since", "1d", "--by", "cause")):
        assert check("account", ran("account", "--json", *words).stdout)["total"]["cpu"]["held_seconds"] > 0
    for axis in ("step", "hours"):
        curves = check(
            "plot", ran("plot", "--json", "--metric", "loss,tokens_per_second", "--axis", axis, "train-0001").stdout
        )
        assert len(curves) == 2 and len(curves[0]["points"]) == 3
    assert check("diff", ran("diff", "--json", "train-0001", other, code=1).stdout)["differences"]
    assert check("diff", ran("diff", "--json", other, other).stdout)["equal"]
    failed, good = check("report", ran("report", "--json", "train-0001", other).stdout)
    assert failed["why"]["cause"]["code"] == "module-missing" and good["why"] is None and failed["lock"]["run"]
    check("cancel", ran("cancel", "--json", "train-0001", other).stdout)
    check("gc", ran("gc", "--json", "--dry-run", "--runs", "--older", "1m").stdout)


def test_top_of_a_running_run(local: Runner, project: Path) -> None:
    write(project, {"wait.sh": 'until [ -e "$RUNNER_RUN/go" ]; do sleep 0.1; done\n'})
    run = local.launch("--engine", "host", "--", "bash", str(project / "wait.sh"))
    local.wait(run.name, lambda status: status["state"] == "RUNNING" and any((run / "attempts/1/usage").glob("*")))
    assert len(check("top", local("top", "--json", run.name).stdout)["nodes"]) == 1
    (run / "attempts/1/usage/0").write_text("host 4 50 100 200 job 90 1000 2000 80 1000 2000\n")
    assert check("top", local("top", "--json", run.name).stdout)
    (run / "go").touch()
    local("watch", run.name)


def test_images(local: Runner, project: Path, tmp_path: Path) -> None:
    path = tmp_path / "images/ngc-0123456789ab.sqsh"
    path.parent.mkdir()
    path.write_bytes(b"hsqs")
    path.with_name("ngc.sqsh").symlink_to(path.name)
    made = Squashfs(
        path, path.with_name("ngc.sqsh"), "ab", "", 4, "amd64", "ngc", 1.7e9, "0.1", "zstd", labels={"a": "b"}
    )
    sidecar(path).write_text(as_json(made))
    runner = Runner(project, {**local.environ, "RUNNER_IMAGES": str(path.parent)}, "local")
    (image,) = check("images", runner("images", "--json").stdout)
    assert image["links"] == ["ngc.sqsh"]
    check("gc", runner("gc", "--json", "--dry-run").stdout)


def test_environments_sites_and_the_machine(local: Runner, project: Path) -> None:
    write(project, {"edf/bad.toml": 'image = "/nowhere/x.sqsh"\nmounts = ["/nowhere:/x"]\nunknown = 1\n'})
    assert check("env check", local("env", "check", "--json", "bad", code=None).stdout)["findings"]
    check("env check", local("env", "check", "--json", "plain", code=None).stdout)
    assert check("env show", local("env", "show", "--json", "plain").stdout)["name"] == "plain"
    for name in json.loads(local("site", "list", "--json").stdout):
        check("site show", local("site", "show", "--json", name["name"]).stdout)
    check("site list", local("site", "list", "--json").stdout)
    check("doctor", local("doctor", "--json", code=None).stdout)


def test_a_field_that_no_schema_names_is_found() -> None:
    """The check itself: an output with one more field, and one with one field less, do not match."""
    good = {"schema": 1, "left": "a", "right": "b", "equal": True, "differences": [], "left_out": []}
    validator = Draft202012Validator(schema_of("diff"))
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "more": 1})
    assert not validator.is_valid({name: value for name, value in good.items() if name != "equal"})
    assert not validator.is_valid({**good, "schema": 2})
