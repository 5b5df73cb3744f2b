"""The comparison of public batch scripts: what it reads, what it ignores, and that its list and the page agree."""

import csv
import re
from collections import Counter
from pathlib import Path

from bench.adopt import LIST
from bench.scripts import corpus, recorded, shape, submitted

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


def test_the_lab_has_what_the_lines_name():
    found = shape.Shape()
    found.read(
        "#!/bin/bash\n#SBATCH -p gpu,long --gres=gpu:a100:4,nvme:1 -C 'a&b|c*2'\n#SBATCH --gpus-per-node h100:8\n"
        "#SBATCH -w n[08-10,12],login\n#SBATCH -L scratch@db:2 # a comment\n#SBATCH hetjob\n#SBATCH -p cpu\n"
    )
    assert found.partitions == {"gpu", "long", "cpu"}
    assert found.gres == {"gpu:a100", "nvme", "gpu:h100"}
    assert found.features == {"a", "b", "c"}
    assert found.nodes == {"n08", "n09", "n10", "n12", "login"}
    assert found.licenses == {"scratch"}


def test_fields_leave_out_what_each_submission_has_of_its_own():
    shown = "JobId=12 JobName=a b\n   Priority=9 Command=/x y z=1\n   StdOut=/o/12_4.out\n\n"
    shown += "JobId=13 JobName=c\n   StdOut=13"
    assert submitted.fields(shown, "12") == {
        "JobName": "a b",
        "Command": "/x y z=1",
        "StdOut": "/o/JOB_4.out",
        "1:JobName": "c",
        "1:StdOut": "JOB",
    }


def test_what_varies_between_two_plain_runs_is_not_a_difference():
    first, second = {"a": "port 4711 x", "b": "1"}, {"a": "port 4712 x", "b": "1"}
    assert recorded.differences(first, second, {"a": "port 4713 x", "b": "1"}) == {}
    assert recorded.differences(first, second, {"a": "port 4713 y", "b": "1"}) == {"a": ["port 4711 x", "port 4713 y"]}
    assert recorded.differences(first, second, {"a": "port 4713 x", "b": "2"}) == {"b": ["1", "2"]}
    assert recorded.differences(first, second, {"a": "port 4713 x"}) == {"b": ["1", "(none)"]}


def test_the_page_has_the_counts_of_the_list():
    scripts = corpus.read_list()
    assert len({script.sha256 for script in scripts}) == len(scripts)
    accepted = [script for script in scripts if script.test_only == "accepted"]
    submitted_as = Counter(script.submitted.split(":")[0] for script in accepted)
    calls = Counter(script.calls.split(":")[0] for script in accepted)
    assert set(submitted_as) <= {"same", "wrapper"}
    assert set(calls) <= {"same", "varies", "not run"}
    section = PAGE.read_text().partition("## Public batch scripts")[2].partition("\n## ")[0]
    figures = [
        len(scripts),
        len({script.repository for script in scripts}),
        len(accepted),
        *submitted_as.values(),
        *calls.values(),
    ]
    assert [figure for figure in figures if not re.search(rf"(?<!\d){figure}(?!\d)", section)] == []


def test_the_page_has_the_counts_of_adopted_scripts():
    with LIST.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    counts = Counter(row["verdict"].split(":")[0] for row in rows)
    assert set(counts) == {"right", "#SBATCH", "none", "refused"}
    section = PAGE.read_text().partition("## runner env adopt")[2].partition("\n## ")[0]
    figures = [len(rows), len({row["repository"] for row in rows}), *counts.values()]
    assert [figure for figure in figures if not re.search(rf"(?<!\d){figure}(?!\d)", section)] == []
