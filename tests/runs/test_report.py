"""The report of runs: one page that loads nothing, says what is missing, and lets no text of a run become code."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runner.runs.report.report import MOST_BYTES, USE, thinned
from runner.runs.run import Run, save
from tests.conftest import need
from tests.lab.browser import Browser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & {{ 7*7 }} \u202e ]]> <!--"
T = 1_700_000_000
LOCK = """\
[image]
digest = "sha256:abcd"
[code]
commit = "0123456789"
[job]
script = "jobs/sft.py"
arguments = [{arguments}]
[job.resources]
nodes = 2
"""


def make_run(runs: Path, name: str, *lines: object, code: int = 0, argument: str = "--seed=1", **values: object) -> Run:
    """A run whose only attempt has ended."""
    folder = runs / name
    (folder / "attempts" / "1").mkdir(parents=True)
    known: dict[str, object] = {"command_line": ("launch", "--env", "cpu"), "environment": "cpu", "host": "here"}
    run = Run(name, folder, "sft", "local", "local", "2026-11-01T10:00:00+00:00", "submitted", ("local-7",))
    run = replace(run, **{**known, **values})  # type: ignore[arg-type]
    save(run)
    (folder / "lock.toml").write_text(LOCK.format(arguments=json.dumps(argument)))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    started = "started x\njob local-7\nnodes nid[001-002]\ncpus 16\ngpus 8\ncheckpoint 0\n"
    cause = "done" if code == 0 else "script_failure"
    for file, text in (("started", started), ("exit_code", f"{code}\n"), ("cause", cause), ("ended", "")):
        (folder / "attempts" / "1" / file).write_text(text)
    return run


def entry(step: int, loss: float = 2.0, **others: object) -> dict[str, object]:
    return {"step": step, "loss": loss, "attempt": 1, "time": T + step, **others}


def report(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "runner", "report", *words)
    environment = {**os.environ, "RUNNER_SITE": "local", "RUNNER_RUNS": str(runs)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=runs)


def page(runs: Path, *words: str) -> str:
    done = report(runs, *words)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).read_text()


class Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def test_the_page_says_what_ran(tmp_path: Path) -> None:
    make_run(tmp_path, "sft-0001", entry(1, 3.0), entry(2, 2.5, learning_rate=1e-4))
    text = Page(page(tmp_path)).text
    for word in ("sft-0001", "jobs/sft.py", "--seed=1", "sha256:abcd", "0123456789", "nodes 2", "COMPLETED",
                 "Learning rate", "Attempts", "runner rerun sft-0001", "runner launch --env cpu"):  # fmt: skip
        assert word in text, word
    assert (tmp_path / "sft-0001.html").exists()


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, "sft-0001", entry(1))
    found = Page(page(tmp_path))
    for tag, attributes in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert not attributes.keys() & {"src", "srcset", "action", "data"}, (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(each["content"] for _, each in found.elements if each.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")
    code = found.scripts[-1]
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon", code)
    assert "MIT License" in code and "uPlot 1.6.32" in code


def test_no_text_of_a_run_becomes_code(tmp_path: Path) -> None:
    """Arguments, tags, log lines, text samples, causes and the names of runs are shown as they are."""
    make_run(tmp_path, "sft-0001", entry(1), entry(2, attempt=2), argument=HOSTILE, tags=(HOSTILE,), image=HOSTILE,
             environment=HOSTILE, sweep=HOSTILE, parameters={HOSTILE: HOSTILE}, code=1)  # fmt: skip
    make_run(tmp_path, "a<b>'&\"-0002", entry(1, lr=HOSTILE))
    folder = tmp_path / "sft-0001"
    (folder / "attempts/1/cause").write_text(HOSTILE)
    (folder / "attempts/2").mkdir()
    (folder / "attempts/2/started").write_text(f"job local-9\nnodes {HOSTILE}\n")
    (folder / "job.log").write_text(f"RuntimeError: CUDA out of memory {HOSTILE}\n")
    (folder / "samples.jsonl").write_text(json.dumps({"step": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    (folder / "checkpoints" / f"{HOSTILE.replace('/', '-')}-5").mkdir(parents=True)
    whole = page(tmp_path, "--since", "2026-10-01", "-o", "out.html")
    found = Page(whole)
    assert [tag for tag, _ in found.elements].count("script") == 2 and "img" not in [tag for tag, _ in found.elements]
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert found.text.count("alert(1)") > 8 and "49" not in re.findall(r"& (\S+)", found.text)
    assert "\u202e" not in whole and "\\u202e" in whole
    data = json.loads(found.scripts[0])
    assert {run["name"] for run in data["runs"]} == {"sft-0001", "a<b>'&\"-0002"}
    assert [mark["cause"] for run in data["runs"] for mark in run["marks"]] == [HOSTILE]
    markdown = report(tmp_path, "--since", "2026-10-01", "--md").stdout
    assert "<script" not in markdown and "<img" not in markdown and "![" not in markdown


def test_buckets_keep_the_extremes() -> None:
    generator = random.Random(7)
    points = [(float(step), generator.gauss(0, 1)) for step in range(100_000)]
    points[33_333], points[77_777] = (33_333.0, 99.0), (77_777.0, -99.0)
    kept = thinned(points, 2000)
    assert len(kept) <= 4002 and set(kept) <= set(points) and kept == sorted(kept)
    assert {points[0], points[-1], (33_333.0, 99.0), (77_777.0, -99.0)} <= set(kept)
    for begin in range(0, 100_000, 50):  # each bucket of 50 steps
        some = points[begin : begin + 50]
        inside = {value for step, value in kept if begin - 1 <= step <= begin + 51}
        assert max(value for _, value in some[1:-1]) <= max(inside)
    assert thinned(points[:4000], 2000) == points[:4000]


def test_a_hundred_thousand_steps_fit_and_the_page_says_how(tmp_path: Path) -> None:
    generator = random.Random(1)
    names = ("learning_rate", "tokens_per_second", "mfu", "grad_norm")
    lines = [entry(step, generator.gauss(2, 1), **{name: generator.random() for name in names})
             for step in range(1, 100_001)]  # fmt: skip
    lines[50_000]["loss"] = 1e6
    make_run(tmp_path, "sft-0001", *lines)
    text = page(tmp_path)
    assert len(text.encode()) <= MOST_BYTES
    found = Page(text)
    data = json.loads(found.scripts[0])
    series = data["charts"][0]["series"][0]
    assert "at most 2,000 buckets" in found.text
    assert 2000 < len(series["y"].split()) == len(series["x"].split()) <= 4002
    steps = [0]
    for distance in series["x"].split():
        steps.append(steps[-1] + int(distance))
    assert dict(zip(steps[1:], series["y"].split(), strict=True))[50_001] == "1e+06"
    assert (steps[1], steps[-1]) == (1, 100_000)


def test_many_runs_fit(tmp_path: Path) -> None:
    """With many runs, there are fewer buckets and details, and the page says so."""
    for number in range(30):
        lines = [entry(step, math.sin(step), grad_norm=math.cos(step), mfu=1 / step) for step in range(1, 2000)]
        make_run(tmp_path, f"sft-{number:04}", *lines, argument="x" * 3000)
    text = page(tmp_path, "--since", "2026-10-01")
    assert len(text.encode()) <= MOST_BYTES and (tmp_path / "report.html").exists()
    found = Page(text)
    assert "the last 20 of 30 runs" in found.text and "sft-0000" in found.text
    assert len(json.loads(found.scripts[0])["runs"]) == 20


@pytest.mark.parametrize("damage", ["missing", "garbage", "binary", "header only", "no numbers", "nested", "huge"])
def test_damaged_metrics_give_a_report_that_says_so(damage: str, tmp_path: Path) -> None:
    make_run(tmp_path, "sft-0001")
    metrics = tmp_path / "sft-0001" / "metrics.jsonl"
    line = json.dumps(entry(1)) + "\n"
    texts = {"garbage": f'{line}{{"step": 2, "lo', "binary": line.encode() + bytes(range(256)) * 40,
             "header only": '{"header": {}}\n', "no numbers": line + json.dumps(entry(2, math.nan)) + "\n",
             "nested": line + "[" * 100_000, "huge": line + '{"step": 2, "loss": ' + "9" * 4000 + "}\n"}  # fmt: skip
    if damage == "missing":
        metrics.unlink()
    else:
        text = texts[damage]
        metrics.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = Page(page(tmp_path)).text
    assert "Missing or damaged" in found and "metrics.jsonl" in found and "jobs/sft.py" in found


def test_other_damaged_files_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sft-0001", entry(1))
    (run.folder / "lock.toml").write_bytes(b"\xff[job")
    (run.folder / "attempts/1/started").unlink()
    found = Page(page(tmp_path)).text
    assert "lock.toml" in found and "attempts/1/started is missing" in found


def test_checkpoints_and_samples_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sft-0001", entry(1))
    for step, name in ((10, "complete.json"), (20, "weights.tmp")):
        (run.folder / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        (run.folder / f"checkpoints/checkpoint-{step}" / name).write_text("{}")
    sample = {"step": 10, "prompt": "What is it?", "answer": "A test."}
    (run.folder / "samples.jsonl").write_text(json.dumps(sample) + "\nnot json\n")
    found = " ".join(Page(page(tmp_path)).text.split())
    assert "10completecheckpoints/checkpoint-10" in found and "20incompletecheckpoints/checkpoint-20" in found
    assert "What is it?" in found and "A test." in found


def test_a_failed_run_is_explained(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sft-0001", entry(1), code=1)
    (run.folder / "job.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n")
    assert "gpu-out-of-memory" in Page(page(tmp_path)).text
    assert "gpu-out-of-memory" in report(tmp_path, "--md").stdout


def test_runs_are_compared_and_a_sweep_is_a_table(tmp_path: Path) -> None:
    for number, seed in enumerate((1, 2, 3)):
        make_run(tmp_path, f"sft-000{number}", entry(1), argument=f"--seed={min(seed, 2)}", sweep="sft-sweep-0001",
                 parameters={"seed": str(seed)})  # fmt: skip
    found = Page(page(tmp_path, "sft-0000", "sft-0001", "sft-0002", "-o", "out.html")).text
    words = found[found.index("Differences\n") :]
    assert "--seed=1" in words and "--seed=2" in words and re.search(r"GPU hours", found)
    assert [tag for tag, each in Page((tmp_path / "out.html").read_text()).elements if each.get("scope") == "col"]
    markdown = report(tmp_path, "--md", "sft-0000", "sft-0001", "sft-0002").stdout
    assert "| run | state | attempts | seed | step |" in markdown
    assert "| arguments | arguments | --seed=1 | --seed=2 | --seed=2 |" in markdown


def test_a_cell_names_the_run_that_it_equals(tmp_path: Path) -> None:
    """That is the first run whose lock file can be read. The first run here has none."""
    for number, seed in enumerate((0, 1, 2, 1)):
        make_run(tmp_path, f"sft-000{number}", entry(1), argument=f"--seed={seed}")
    (tmp_path / "sft-0000/lock.toml").write_bytes(b"\xff")
    found = Page(page(tmp_path, "--since", "2026-10-01")).text
    assert "arguments--seed=1--seed=2as sft-0001" in found
    markdown = report(tmp_path, "--md", "--since", "2026-10-01").stdout
    assert "| arguments | arguments |  | --seed=1 | --seed=2 | as sft-0001 |" in markdown


def test_a_reduced_report_compares_the_runs_that_it_shows_and_a_large_one_is_said_to_be_large(tmp_path: Path) -> None:
    """Only the last 4 of 5 runs have details: the first of these has another seed than those after it."""
    for number in range(5):
        run = make_run(tmp_path, f"sft-000{number}", entry(1), argument=f"--seed={min(number, 2)}")
        sample = json.dumps({"answer": "&" * 2000})
        (run.folder / "samples.jsonl").write_text(f"{sample}\n" * 20)
    done = report(tmp_path, "--since", "2026-10-01")
    assert "kB, more than the usual 700 kB" in done.stderr
    found = Page((tmp_path / "report.html").read_text()).text
    words = " ".join(found[found.index("Differences\n") :].split())
    assert re.search(
        "sft-0001 ?sft-0002 ?sft-0003 ?sft-0004 ?argumentsarguments--seed=1--seed=2--seed=2--seed=2", words
    )
    assert "The sections below show the last 4 of 5 runs" in found


def use_nodes(run: Run, nodes: int, *, minutes: int = 30) -> None:
    """A line of payload/usage.sh each minute; the first is before the first step."""
    (run.folder / "attempts/1/usage-log").mkdir()
    for node in range(nodes):
        lines = [f"{T - 30 + 60 * minute} nid{node:03} {node} {100 + minute} 900 node {minute} 5 9 {minute + 10} 7 9"
                 f" W {300 + node} 100\n" for minute in range(minutes)]  # fmt: skip
        (run.folder / f"attempts/1/usage-log/{node}").write_text("".join(lines))


def series(text: str) -> dict[str, dict[str, Any]]:
    """metric and node -> what the page's script draws."""
    charts = json.loads(Page(text).scripts[0])["charts"]
    return {f"{chart['metric']} {each['node']}".strip(): each for chart in charts for each in chart["series"]}


def test_the_use_of_the_nodes_is_drawn(tmp_path: Path) -> None:
    for nodes in (2, 9):
        use_nodes(make_run(tmp_path, f"sft-000{nodes}", *(entry(step) for step in range(1, 2000))), nodes)
    use_nodes(make_run(tmp_path, "sft-0000"), 1)
    found = series(page(tmp_path, "sft-0002"))
    assert [name for name in found if name != "loss"] == [
        f"{metric} nid00{node}" for metric in USE for node in (0, 1)
    ]  # fmt: skip
    gpu, watts = found["gpu_percent nid001"], found["gpu_watts nid001"]
    assert (gpu["count"], gpu["first"], gpu["last"]) == (29, [39, 6.0], [1719, 34.0])
    assert watts["last"][1] == 401 and found["node_memory_mib nid000"]["first"][1] == 101
    assert found["gpu_memory_mib nid000"]["first"][1] == 7 and found["cpu_percent nid001"]["first"][1] == 1
    many = series(page(tmp_path, "sft-0009"))
    assert {name: many[f"cpu_percent {name}"]["last"][1] for name in ("lowest", "mean", "highest")} == {
        "lowest": 0, "mean": 4, "highest": 8,
    }  # fmt: skip
    both = series(page(tmp_path, "sft-0002", "sft-0009", "-o", "both.html"))
    assert [name for name in both if name.startswith("cpu")] == ["cpu_percent mean"]
    assert "| gpu_percent nid001 | 6 | 34 | 6 | 34 |" in report(tmp_path, "--md", "sft-0002").stdout
    assert not series(page(tmp_path, "sft-0000")), "without a step, there is no place for a sample"


def test_a_repeated_step_and_a_damaged_log_of_the_nodes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sft-0001", *(entry(step) for step in range(1, 100)),
                   *(entry(step, attempt=2) | {"time": T + 1000 + step} for step in range(50, 100)))  # fmt: skip
    for number, begun in ((1, T + 40), (2, T + 1000)):
        folder = run.folder / f"attempts/{number}/usage-log"
        folder.mkdir(parents=True)
        lines = [f"{begun + at} n0 {number} 1 2 node fails\n" for at in (1, 61)]
        (folder / "0").write_text("".join(lines) + "not a sample\n\0\n17 n")
    found = series(page(tmp_path))
    use = found["cpu_percent n0"]
    assert (use["count"], use["first"], use["last"]) == (2, [59, 2.0], [99, 4 / 3]), (
        "samples of the same step: their mean"
    )
    assert "gpu_percent n0" not in found


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    make_run(tmp_path, "sft-0001", entry(1))
    page(tmp_path)
    page(tmp_path)
    (tmp_path / "sft-0001.html").write_text("<!doctype html>mine")
    refused = report(tmp_path)
    assert refused.returncode == 1 and "the file exists, and runner did not write it" in refused.stderr
    assert (tmp_path / "sft-0001.html").read_text() == "<!doctype html>mine"


def test_json_has_what_the_page_has(tmp_path: Path) -> None:
    make_run(tmp_path, "sft-0001", entry(1))
    (found,) = json.loads(report(tmp_path, "--json").stdout)
    assert found["run"] == "sft-0001" and found["lock"]["image"]["digest"] == "sha256:abcd"
    assert found["account"]["unit"] == "gpu" and found["checkpoints"] == []


CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ratio = (...both) => { const [x, y] = both.map(light).sort((a, b) => b - a); return (x + 0.05) / (y + 0.05); };
  const back = (element) => { for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  } };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const found = ratio(parse(getComputedStyle(element).color), back(element));
    if (found < 4.5) bad.push(`${found.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  const page = back(document.body);
  for (let n = 0; n < 8; n += 1) {  // lines need 3:1
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(--c${n})`;
    const found = ratio(parse(getComputedStyle(probe).color), page);
    if (found < 3) bad.push(`${found.toFixed(2)} line ${n}`);
    probe.remove();
  }
  return bad;
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need("chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 100,000 steps and two attempts, and of a failed one."""
    runs = tmp_path_factory.mktemp("runs")
    generator = random.Random(1)
    names = ("learning_rate", "tokens_per_second", "mfu", "grad_norm")
    lines = [entry(step, 2 + 6 * math.exp(-step / 2e4) + generator.gauss(0, 0.1), attempt=1 + (step > 60_000),
                   **{name: generator.random() for name in names}) for step in range(1, 100_001)]  # fmt: skip
    make_run(runs, "sft-0001", *lines)
    failed = make_run(runs, "sft-0002", *lines[:30_000], argument="--seed=" + "2" * 300, code=1)
    (failed.folder / "job.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n")
    (failed.folder / "samples.jsonl").write_text(json.dumps({"step": 9, "prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    page(runs, "sft-0001", "sft-0002", "-o", "report.html")
    return runs / "report.html"


def test_a_folder_gets_the_usual_name(tmp_path: Path) -> None:
    for name in ("sft-0001", "sft-0002"):
        make_run(tmp_path, name, entry(1))
    for words, name in (
        (("last",), "sft-0002.html"),
        (("--since", "2026-01-01"), "report.html"),
        (("--md",), "sft-0002.md"),
    ):
        for _ in range(2):  # it exists at the second time
            assert report(tmp_path, *words, "-o", "pages/").stdout == f"{tmp_path}/pages/{name}\n"
        assert report(tmp_path, *words, "-o", "pages").stdout == f"{tmp_path}/pages/{name}\n"


@pytest.mark.slow
@pytest.mark.uses("chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_a_sweep_and_the_nodes(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    for number in range(12):
        rate, kind = 10 ** -(5 - number % 4), ("adamw", "lion", "muon")[number % 3]
        lines = [entry(step, 2 + rate * number * 300 + 1 / step) for step in range(1, 2000)]
        run = make_run(tmp_path, f"sft-{number:04}", *lines, sweep="sft-sweep-0001",
                       parameters={"learning_rate": f"{rate:g}", "optimizer": kind})  # fmt: skip
        use_nodes(run, 3)
    pictures = Path(os.environ.get("RUNNER_REPORT_PICTURES", tmp_path))
    for name, words in (("sweep", ["--since", "2026-01-01"]), ("nodes", ["sft-0007"])):
        page(tmp_path, *words, "-o", f"{name}.html")
        browser.open(tmp_path / f"{name}.html", width=width, dark=dark)
        assert browser.errors() == [] and browser.run(CONTRAST) == []
        assert browser.run("document.documentElement.scrollWidth") <= width
        drawn = [browser.run(f"document.querySelectorAll('#sweep {kind}').length") for kind in ("polyline", "line")]
        assert drawn == ([12, 3] if name == "sweep" else [0, 0])
        assert browser.run("document.querySelectorAll('.plot canvas').length") == 6
        browser.picture(pictures / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert "nid002" in browser.run("document.querySelector('#curves').textContent")


@pytest.mark.slow
@pytest.mark.uses("chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(browser: Browser, long_page: Path, width: int, dark: bool) -> None:
    """It opens in less than a second, asks for nothing, fits the screen, and can be read and used with the keyboard."""
    browser.open(long_page, width=width, dark=dark)
    assert float(browser.run("document.documentElement.dataset.drawn")) < 1000
    assert browser.requests() == [long_page.as_uri()] and browser.errors() == []
    assert browser.run("document.querySelectorAll('.plot canvas').length") == 5
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CONTRAST) == []
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    browser.run("document.querySelector('.chart').focus()")
    browser.press("+")
    assert browser.run("[document.getElementById('from').value, document.getElementById('to').value]") == [
        "25000",
        "75001",
    ]
    browser.press("0")
    assert browser.run("document.getElementById('to').value") == "100000"
    unnamed = (
        "[...document.querySelectorAll('input, button')].filter((e) => !(e.labels?.length || e.textContent)).length"
    )
    assert browser.run(unnamed) == 0
    if folder := os.environ.get("RUNNER_REPORT_PICTURES"):
        browser.picture(Path(folder) / f"{width}-{'dark' if dark else 'light'}.png")
