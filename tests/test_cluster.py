"""A cluster says most of what a site file holds; `runner init --site` asks it, and writes down that it has."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from runner.cluster_facts import Partition, likely, parse_partitions
from runner.commands.init import Seen, base_of, site_file
from runner.site_files import load_site
from tests.lab.slurm import SlurmLab


@pytest.fixture
def environ(tmp_path):
    return {"HOME": str(tmp_path), "USER": "me", "SCRATCH": "/scratch/me"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("normal*|1359|288|460800|gpu:4|12:00:00", ("normal", True, 1359, 288, "460800M", 4, "", "12:00:00")),
        ("a3mega|16|208|1868800|gpu:8|infinite", ("a3mega", False, 16, 208, "1868800M", 8, "", "infinite")),
        ("gpu|2|64+|512000+|gpu:a100:4(S:0-1)|1-00:00:00", ("gpu", False, 2, 64, "512000M", 4, "a100", "1-00:00:00")),
        ("mix|2|64|1|shard:8,gpu:h100:2|1:00", ("mix", False, 2, 64, "1M", 2, "h100", "1:00")),
        ("one|1|4|16000|gpu|1:00", ("one", False, 1, 4, "16000M", 1, "", "1:00")),
        ("debug|4|2|4000|(null)|30:00", ("debug", False, 4, 2, "4000M", 0, "", "30:00")),
    ],
)
def test_a_line_of_sinfo(line, expected):
    assert parse_partitions(line + "\n") == (Partition(*expected),)


def test_a_node_of_a_partition_is_one_of_its_largest_group_and_all_groups_count():
    """sinfo has a line per group; what is no such line is passed over."""
    text = "gpu*|1|64|1|gpu:2|1:00\ngpu*|30|128|2|gpu:4|1:00\nsinfo: warning\n\nlow|x|1|1|(null)|1:00\n"
    (partition,) = parse_partitions(text)
    assert (partition.nodes, partition.gpus_per_node, partition.cpus_per_node) == (31, 4, 128)


def test_the_likely_partition_has_gpus_and_is_the_default_one_among_them():
    lines = "cpu*|100|64|1|(null)|1:00\nbig|20|64|1|gpu:4|1:00\nsmall|2|64|1|gpu:4|1:00\n"
    assert likely(parse_partitions(lines)).name == "big"
    assert likely(parse_partitions(lines.replace("small", "small*"))).name == "small"
    assert likely(parse_partitions("cpu*|100|64|1|(null)|1:00\n")).name == "cpu"
    assert likely(()) is None


def written(name: str, environ: dict[str, str], lines: str, **seen: object) -> tuple[dict, tuple[str, ...], str]:
    text, questions = site_file(name, None, None, environ, Seen("ours", parse_partitions(lines), **seen))
    return tomllib.loads(text), questions, text


def test_what_the_cluster_says_is_written_with_its_source_and_date(environ, tmp_path):
    """A new cluster: numbers, partitions and versions come from it; the user's file says so."""
    data, questions, text = written(
        "ours",
        environ,
        "gpu*|8|64|512000|gpu:a100:4|1-00:00:00\ncpu|9|8|1|(null)|infinite\none|1|8|1|(null)|1:00\n",
        versions={"slurm": "23.11.4"},
    )
    assert data["detect"]["clusters"] == ["ours"] and data["base"] == "generic-slurm" and questions == ()
    assert data["values"]["gpus_per_node"] == {"value": 4, "source": "cluster"}
    assert data["values"]["memory"]["value"] == "512000M" and data["values"]["partition"]["value"] == "gpu"
    path = tmp_path / ".config/runner/sites/ours.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    site = load_site("ours", environ)
    assert (site.cpus_per_node, site.gpu, site.versions) == (64, "a100", {"slurm": "23.11.4"})
    assert site.partitions["cpu"] == "9 nodes; no time limit"
    assert site.partitions["one"] == "1 node; time limit 1:00"
    assert re.search(r"the cluster ours, 20\d\d-\d\d-\d\d \(", str(site.origins["gpus_per_node"]))


def test_a_known_kind_of_cluster_is_recognised_by_its_partitions(environ):
    """On Google Cloud the cluster's name is free, the partition's is the blueprint's."""
    lines = "a3mega*|16|208|1868800|gpu:8|infinite\ndebug|1|2|1|(null)|infinite\n"
    data, _, _ = written("my-cluster", environ, lines)
    assert data["base"] == "gcp-a3-mega"
    assert not {"cpus_per_node", "gpus_per_node", "memory"} & data["values"].keys()  # as the shipped file says
    data, _, _ = written("my-cluster", environ, lines.replace("|208|", "|104|"))  # without hyper-threading
    assert data["values"]["cpus_per_node"]["value"] == 104
    assert base_of("x", Seen("x", parse_partitions("gp4d|1|36|1|gpu:8|96:00:00")), environ).name == "twcc"


def test_a_shipped_value_that_the_cluster_contradicts_is_replaced_and_shown(environ):
    data, questions, text = written("alps-clariden", environ, "normal*|9|144|1|gpu:2|12:00:00\n", accounts=("g1", "g2"))
    assert data["values"]["gpus_per_node"]["value"] == 2 and "# value of the site alps-clariden: 4" in text
    assert questions == (
        "no account is set (your accounts: g1, g2): set `account` in the file;"
        " or delete the file, and give --account NAME",
    )
    data, questions, _ = written("alps-clariden", environ, "", accounts=("g1",))
    assert data["values"]["account"] == "g1" and questions == ()


def test_an_unknown_partition_is_named(environ):
    _, questions = site_file(
        "generic-slurm", None, "gpu", environ, Seen("x", parse_partitions("cpu|1|1|1|(null)|1:00"))
    )
    assert questions == ("this cluster has no partition 'gpu'; its partitions: cpu",)


def test_a_real_cluster_describes_itself(slurm: SlurmLab, tmp_path: Path):
    """The lab's Slurm: the file that is written is loaded again, and used."""
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = slurm.run((sys.executable, "-m", "runner", "init", "--site", "lab"), extra_environ=environ)
    data = tomllib.loads(Path(done.stdout.strip()).read_text())
    assert data["base"] == "generic-slurm" and data["detect"]["clusters"]
    assert data["values"]["cpus_per_node"]["value"] >= 1 and data["values"]["versions"]["slurm"]["value"][0].isdigit()
    shown = slurm.run((sys.executable, "-m", "runner", "site", "show", "--json"), extra_environ=environ)
    site = json.loads(shown.stdout)
    assert site["name"] == "lab" and site["why"].startswith("detected: the cluster is called")
    assert site["values"]["partition"]["from"].startswith("sinfo, scontrol and programs of the cluster")
