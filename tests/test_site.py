"""A site is data: every shipped value names its source and the day on which it was read there; the user's file wins."""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.detection import cluster_name, find_site
from runner.environments.edf import parse_mount
from runner.errors import RunnerError
from runner.expansion import names
from runner.project import Project
from runner.site import VALUES, Site
from runner.site_files import SHIPPED, load_site, signs, site_names

SITES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
KINDS = {
    "scheduler": {"slurm", "local"},
    "gpu_request": {"gpus-per-node", "gres", "none"},
    "restart_by": {"requeue", "submit", "chain"},
}


@pytest.fixture
def environ(tmp_path):
    """The variables of a user without any site files."""
    return {"HOME": str(tmp_path), "USER": "me", "SCRATCH": "/scratch/me"}


def own_site(environ, name: str, text: str) -> Path:
    path = Path(environ["HOME"]) / ".config/runner/sites" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sourced(values: dict[str, object]) -> Iterator[tuple[str, object]]:
    """(key, entry) of each value, and of each item of a table whose items have sources of their own."""
    for key, entry in values.items():
        if isinstance(entry, dict) and "value" not in entry:
            yield from ((f"{key}.{name}", item) for name, item in entry.items())
        else:
            yield key, entry


@pytest.mark.parametrize("name", SITES)
def test_every_shipped_value_names_a_source_with_title_and_date(name):
    data = tomllib.loads((SHIPPED / f"{name}.toml").read_text())
    sources = data.get("sources", {})
    used = set()
    for key, entry in sourced(data["values"]):
        assert isinstance(entry, dict) and set(entry) == {"value", "source"}, f"{name}: {key} needs value and source"
        source = sources[entry["source"]]
        used.add(entry["source"])
        assert source["title"] and re.fullmatch(r"20\d\d-\d\d-\d\d", source["date"]), f"{name}: {entry['source']}"
        assert source["title"].startswith("a choice of runner's own") or source["url"].startswith("https://")
    assert used == set(sources), f"{name}: a source nobody uses"


@pytest.mark.parametrize("name", SITES)
def test_every_shipped_site_loads_with_the_origin_of_each_value(name, environ):
    site = load_site(name, environ)
    assert site.name == name and site.summary
    for key in VALUES:
        default = {field.name: field for field in Site.__dataclass_fields__.values()}[key]
        if getattr(site, key) not in (None, (), {}) and getattr(site, key) != default.default:
            assert key in site.origins, f"{name}: {key} has no origin"
        value = getattr(site, key)
        items = value if isinstance(value, dict) else range(len(value)) if isinstance(value, tuple) else ()
        for item in items:
            assert site.origins[f"{key}.{item}"].date, f"{name}: {key}.{item} has no origin"
    for key, words in KINDS.items():
        assert getattr(site, key) in words
    assert set(names(site.image_folder)) <= {"SCRATCH", "HOME", "USER", "XDG_DATA_HOME"}


def test_a_shipped_value_without_a_source_would_be_refused(tmp_path, monkeypatch, environ):
    for path in SHIPPED.glob("*.toml"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr("runner.site_files.SHIPPED", tmp_path)
    (tmp_path / "bad.toml").write_text('name = "bad"\nsummary = "x"\n[values]\nengine = "ce"\n')
    with pytest.raises(RunnerError, match=r"bad.toml:4: engine has no source"):
        load_site("bad", environ)
    (tmp_path / "bad.toml").write_text('[sources.x]\ntitle = "x"\n[values]\nengine = { value = "ce", source = "x" }\n')
    with pytest.raises(RunnerError, match=r"bad.toml:4: engine comes from the document 'x', which has no title or"):
        load_site("bad", environ)
    good = '[sources.x]\ntitle = "x"\ndate = "2026-01-01"\n[values.quirks]\na = { value = "a", source = "x" }\n'
    (tmp_path / "bad.toml").write_text(good + 'b = "b"\n')
    with pytest.raises(RunnerError, match=r"bad.toml:6: b has no source"):
        load_site("bad", environ)


def test_the_users_file_lies_over_the_shipped_one_and_says_so(environ):
    path = own_site(environ, "alps-clariden", '[values]\naccount = "g123"\npartition = "debug"\nenv = { A = "1" }\n')
    site = load_site("alps-clariden", environ)
    assert (site.account, site.partition, site.gpus_per_node, site.env) == ("g123", "debug", 4, {"A": "1"})
    assert str(site.origins["account"]) == f"your site file ({path}:2)"
    assert "docs.cscs.ch" in str(site.origins["gpus_per_node"])


def test_a_user_can_describe_a_site_of_their_own(environ):
    own_site(
        environ,
        "mine",
        'name = "mine"\nsummary = "a cluster"\nbase = "aws-parallelcluster"\n'
        '[sources.admin]\ntitle = "the admin"\ndate = "2026-01-01"\n'
        '[values]\ngpus_per_node = { value = 8, source = "admin" }\nenv = { B = "2" }\n',
    )
    site = load_site("mine", environ)
    assert (site.engine, site.gpus_per_node, site.summary) == ("pyxis", 8, "a cluster")
    assert site.env == {"FI_EFA_USE_HUGE_PAGE": "0", "B": "2"}
    assert str(site.origins["gpus_per_node"]).startswith("the admin, 2026-01-01")
    assert "mine" in site_names(environ)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[values]\ngpu_per_node = 4\n", (":2: unknown key 'gpu_per_node'", "did you mean 'gpus_per_node'?")),
        ('[values]\ngpus_per_node = "4"\n', (":2: values.gpus_per_node must be a whole number",)),
        ('[values]\nscheduler = "pbs"\n', (":2: values.scheduler must be 'slurm' or 'local'",)),
        ('[values]\nsbatch = "--x"\n', (":2: values.sbatch must be an array",)),
        ("[value]\n", (":1: unknown key 'value'", "did you mean 'values'?")),
        ('account = "a"\n', (":1: 'account' is outside of [values]", "move the line below [values]: account = …")),
        ('summary = "x"\n', ("does not set: scheduler, engine, image_folder", 'base = "generic-slurm"')),
        ("[values.quirks]\na = 1\n", (":2: values.quirks.a must be text",)),
        ("[values.env]\nA = { value = 1 }\n", (":2: values.env.A.value must be text",)),
        ('[values]\ninside = ["NCCL*"]\n', (":2: inside contains 'NCCL*'", "the beginning of a variable name")),
        ('[values]\ncontainer_storage = "/x/$(id)"\n', ("container_storage cannot contain '$('", "/dev/shm/${USER}")),
        ("[values]\ncontainer_storage = '/x/`id`'\n", ("container_storage cannot contain '`'",)),
        ("[values]\ncontainer_storage = '/x/\"y'\n", ("cannot contain",)),
        ('base = "nope"\n', ("there is no site 'nope'", "the known names are alps, alps-bristen")),
        ('base = "bad"\n', ("is based on itself",)),
        ("[values\n", ("is not valid TOML",)),
    ],
)
def test_a_bad_site_file_is_refused_with_its_line_and_the_way_out(environ, text, words):
    own_site(environ, "bad", text)
    with pytest.raises(RunnerError) as caught:
        load_site("bad", environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_tables_are_merged_by_name_and_each_item_keeps_its_origin(environ):
    """env, quirks and the like of a base, of the shipped file and of the user lie in one table."""
    path = own_site(environ, "gcp-a3-mega", '[values.env]\nNCCL_DEBUG = "INFO"\nNCCL_SOCKET_IFNAME = "eth0"\n')
    site = load_site("gcp-a3-mega", environ)
    assert site.env["NCCL_DEBUG"] == "INFO" and site.env["NCCL_SOCKET_IFNAME"] == "eth0"
    assert site.env["NCCL_FASTRAK_CTRL_DEV"] == "enp0s12"
    assert str(site.origins["env.NCCL_SOCKET_IFNAME"]) == f"your site file ({path}:3)"
    assert "run-nccl-tests.sh>, 2026-06-25" in str(site.origins["env.NCCL_FASTRAK_CTRL_DEV"])
    assert {"sbatch-environment", "netstack"} <= set(load_site("alps-clariden", environ).quirks)


def test_a_replaced_list_leaves_no_origin_of_its_old_items(environ):
    own_site(environ, "gcp-a3-high", 'values.mounts = ["/data:/data"]\n')
    site = load_site("gcp-a3-high", environ)
    assert site.mounts == ("/data:/data",) and "mounts.1" not in site.origins
    assert site.origins["mounts.0"].source == "your site file"


def test_every_key_and_every_site_stands_in_the_documentation():
    text = (SHIPPED.parents[2] / "docs/site.md").read_text()
    assert [word for word in (*VALUES, *SITES) if f"`{word}`" not in text] == []


def test_mounts_of_every_shipped_site_can_be_mounted(environ):
    """What a site mounts is SOURCE:TARGET, and its variables are ones that a job has."""
    for name in SITES:
        for text in load_site(name, environ).mounts:
            mount = parse_mount(text)
            assert mount.text() == text and set(names(text)) <= {"USER", "SCRATCH", "SLURM_JOB_ID"}


def test_an_unknown_site_lists_the_known_ones_and_suggests_the_nearest(environ):
    with pytest.raises(RunnerError) as caught:
        load_site("alps-clariten", environ)
    assert "did you mean 'alps-clariden'?" in caught.value.fix and "generic-slurm" in caught.value.why
    for name, words in (
        ("zzz", ": runner init --site zzz"),
        ("RUNNER", ": env -u RUNNER_SITE runner init --site RUNNER"),
    ):
        with pytest.raises(RunnerError) as caught:
            load_site(name, {**environ, "RUNNER_SITE": "RUNNER"})
        assert caught.value.fix.endswith(words)


def test_folders_come_from_the_environment_then_the_site_then_the_project(environ, tmp_path):
    site, project = load_site("alps-clariden", environ), Project(tmp_path, tmp_path, tmp_path)
    assert site.images(environ) == Path("/scratch/me/runner/images")
    assert site.images({**environ, "RUNNER_IMAGES": "/i"}) == Path("/i")
    assert site.runs(environ, project) == Path("/scratch/me/runner/runs")
    assert load_site("local", environ).runs(environ, project) == tmp_path / "runs"
    assert load_site("local", environ).images(environ) == tmp_path / ".local/share/runner/images"
    with pytest.raises(RunnerError, match="the variable SCRATCH in the image folder of alps-clariden"):
        site.images({"HOME": "/h"})


def test_the_local_site_is_measured_not_written_down(environ):
    site = load_site("local", environ)
    assert site.cpus_per_node == len(os.sched_getaffinity(0))
    assert site.architecture in {"amd64", "arm64"} and site.gpus_per_node is not None
    assert str(site.origins["architecture"]) == "this machine"


def test_the_site_is_chosen_by_flag_then_variable_then_detection(environ):
    asked = {**environ, "RUNNER_SITE": "generic-pyxis"}
    assert find_site("alps-clariden", asked)[1] == "--site"
    site, why = find_site(None, asked)
    assert (site.name, why) == ("generic-pyxis", "RUNNER_SITE")


def test_a_cluster_is_known_by_its_name_and_the_users_own_site_comes_first(environ):
    named = {**environ, "CLUSTER_NAME": "clariden"}
    site, why = find_site(None, named)
    assert (site.name, why) == ("alps-clariden", "detected: the cluster is called clariden")
    own_site(environ, "zzz", 'base = "generic-pyxis"\n[detect]\nclusters = ["clariden"]\n')
    assert find_site(None, named)[0].name == "zzz"


def test_a_cluster_is_known_although_slurm_conf_is_not_utf_8(environ, tmp_path, monkeypatch):
    """A comment in another encoding, such as the name of a town."""
    (tmp_path / "scontrol").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "slurm.conf").write_bytes("# Zürich\nClusterName=daint\n".encode("latin-1"))
    assert cluster_name({**environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}) == "daint"


def test_a_file_over_a_shipped_one_keeps_its_signs_and_a_variant_has_not_those_of_its_base(environ):
    """`runner init --site alps-clariden` must not make Clariden unknown."""
    own_site(environ, "alps-clariden", '[values]\naccount = "g123"\n')
    site, why = find_site(None, {**environ, "CLUSTER_NAME": "clariden"})
    assert (site.name, site.account) == ("alps-clariden", "g123") and why.startswith("detected: the cluster")
    assert not [*signs("alps-extended-images", environ)]
    assert ("clusters", "daint") in signs("alps-daint", environ)


def test_a_folder_can_be_the_sign_of_a_site(environ, tmp_path):
    own_site(environ, "here", f'base = "generic-pyxis"\n[detect]\npaths = ["{tmp_path}"]\n')
    assert find_site(None, environ)[1] == f"detected: {tmp_path} exists on this machine"


def detected_on(slurm, home: Path) -> tuple[str, str]:
    """What a new process that belongs to the lab's cluster detects."""
    script = "import os; from runner.detection import find_site as f; s, why = f(None, os.environ); print(s.name, why)"
    name, _, why = slurm.run((sys.executable, "-c", script), extra_environ={"HOME": str(home)}).stdout.partition(" ")
    return name, why.strip()


def test_a_real_cluster_with_environment_is_generic_slurm(slurm, tmp_path):
    assert detected_on(slurm, tmp_path) == ("generic-slurm", "detected: srun has --environment")


def test_a_real_cluster_without_plugins_is_generic_slurm_too(plain_slurm, tmp_path):
    why = "detected: sbatch is installed, and srun has no container plugin"
    assert detected_on(plain_slurm, tmp_path) == ("generic-slurm", why)


def test_slurm_programs_without_a_cluster_are_no_cluster(environ, tmp_path):
    asked = {**environ, "SLURM_CONF": str(tmp_path / "nowhere.conf")}
    site, why = find_site(None, asked)
    assert site.name == "local" and "sbatch" in why
