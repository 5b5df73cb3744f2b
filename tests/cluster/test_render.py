"""A rendered document and its site file say the same, and wrong cluster files are refused with their line."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.cluster.cluster import facts, find_cluster
from runner.errors import RunnerError
from runner.project import find_project
from runner.site_files import SHIPPED, load_site, machine_types
from tests.cluster.conftest import ROOT, Cloud

AWS = 'provider = "aws"\nregion = "us-east-2"\nnetwork.head_subnet = "subnet-1"\nhead.machine_type = "m5.xlarge"\n'
GOOGLE = 'provider = "google"\nzone = "us-central1-a"\nhead.machine_type = "n2-standard-4"\n'
GPU = '[queues.gpu]\nmachine_type = "p5.48xlarge"\ncount = 2\n'
L4 = '[queues.l4]\nmachine_type = "g2-standard-4"\ncount = 8\n'
MODULES = tomllib.loads((Path(__file__).parent / "modules.toml").read_text())


def rendered(text: str, folder: Path, template: str, **environ: str) -> Any:
    path = folder / "test.toml"
    path.write_text(text)
    made = find_cluster(str(path), find_project(folder), environ).text(template)
    return yaml.safe_load(made) if template.endswith(".yaml.j2") else tomllib.loads(made)


def test_site_and_document_agree_and_launch_uses_them(cloud: Cloud) -> None:
    """GPUs, CPUs, memory, partition, fabric and storage: in the script of a launch as in ParallelCluster's file."""
    cloud("cluster", "render", "aws-pyxis")
    document = yaml.safe_load((cloud.project / "clusters/aws-pyxis/config.yaml").read_text())
    (queue,) = document["Scheduling"]["SlurmQueues"]
    values = machine_types()["aws"]["types"][queue["ComputeResources"][0]["InstanceType"]]["site"]
    (cloud.project / "x.sh").write_text("true\n")
    (cloud.project / "edf").mkdir()
    (cloud.project / "edf/e.toml").write_text('image = "/fsx/e.sqsh"\n')
    words = ("--site", "aws-pyxis", "--env", "e", "--script", "./x.sh", "--dry-run")
    script = cloud("launch", *words, USER="me").stdout
    for flag in (
        f"--partition={queue['Name']}",
        f"--gpus-per-node={values['gpus_per_node']}",
        f"--mem={values['memory']}",
    ):
        assert f"#SBATCH {flag}\n" in script, flag
    assert "#SBATCH --exclusive\n" in script
    assert f"/{document['SharedStorage'][0]['MountDir'].strip('/')}:/fsx" in script
    site = load_site("aws-pyxis", {"HOME": str(cloud.home)})
    assert site.nccl_network == "Libfabric" and queue["ComputeResources"][0]["Efa"] == {"Enabled": True}
    assert (site.cpus_per_node, site.gpus_per_node, site.engine) == (192, 8, "pyxis")
    assert all(origin.date or origin.source == "your site file" for origin in site.origins.values())


def test_one_line_changes_the_machines_of_the_example_and_of_its_site(cloud: Cloud) -> None:
    shipped = (ROOT / "clusters/gcp-gpt2.toml").read_text()
    cloud.file("four", shipped.replace('"g2-standard-4"', '"a2-highgpu-4g"'))
    for name in ("gcp-gpt2", "four"):
        cloud("cluster", "render", name)
    l4, a100 = (load_site(name, {"HOME": str(cloud.home)}) for name in ("gcp-gpt2", "four"))
    assert (l4.gpus_per_node, l4.cpus_per_node, l4.memory, l4.gpu) == (1, 2, "15504M", "NVIDIA L4")
    assert (a100.gpus_per_node, a100.cpus_per_node, a100.memory, a100.gpu) == (4, 24, "337560M", "NVIDIA A100")
    assert l4.partition == a100.partition == "g2gpu" and set(l4.partitions) == {"g2gpu"}
    assert l4.image_folder.startswith("${SCRATCH:-${HOME}}")  # /home is on Filestore


BLUEPRINTS = {
    "shipped": (ROOT / "clusters/gcp-gpt2.toml").read_text(),
    "full": GOOGLE
    + 'project = "p"\npyxis = true\nimage = "f"\nimage_project = "p"\nnetwork.name = "n"\nnetwork.head_subnet = "s"\n'
    '[queues.a]\nmachine_type = "a2-highgpu-1g"\ncount = 4\nmin_count = 1\ncapacity = "spot"\ndisk_gb = 100\n'
    '[queues.b]\nmachine_type = "n2-standard-8"\ncount = 3\n'
    '[queues.c]\nmachine_type = "g2-standard-48"\ncount = 2\ncapacity = "reservation"\nreservation = "r"\n'
    '[storage.homefs]\nkind = "filestore"\nmount = "/home"\nsize_gb = 2560\n'
    '[storage.fast]\nkind = "managed-lustre"\nmount = "/lustre"\nsize_gb = 18000\n'
    '[storage.old]\nkind = "filestore"\nmount = "/old"\nid = "10.0.0.2:/share"\n',
}


def test_an_image_of_ones_own_is_accepted_by_the_toolkit(tmp_path: Path) -> None:
    """The modules refuse an image that SchedMD has not published, unless instance_image_custom is set.

    Source: cluster-toolkit, examples/ml-slurm.yaml and source_image_logic.tf of each module.
    """
    given = rendered(BLUEPRINTS["full"], tmp_path, "blueprint.yaml.j2")["vars"]
    assert (given["instance_image"], given["instance_image_custom"]) == ({"family": "f", "project": "p"}, True)
    text = BLUEPRINTS["full"].replace('image_project = "p"\n', "")
    own = rendered(text, tmp_path, "blueprint.yaml.j2")["vars"]["instance_image"]
    assert own == {"family": "f", "project": "$(vars.project_id)"}
    assert "instance_image_custom" not in rendered(BLUEPRINTS["shipped"], tmp_path, "blueprint.yaml.j2")["vars"]


TYPES = {"string": str, "number": int, "bool": bool}


@pytest.mark.parametrize("name", BLUEPRINTS)
def test_a_blueprint_fits_the_modules_of_the_toolkit(name: str, tmp_path: Path) -> None:
    """Each setting is an input of its module, with its type; what a module needs, a module that it uses gives."""
    blueprint = rendered(BLUEPRINTS[name], tmp_path, "blueprint.yaml.j2")
    (group,) = blueprint["deployment_groups"]
    seen: dict[str, Any] = {}
    for module in group["modules"]:
        known = MODULES[module["source"]]
        for key, value in module.get("settings", {}).items():
            assert isinstance(value, TYPES[known[key]]), f"{module['id']}: {key} = {value!r}"
        assert set(known.get("required", ())) <= module.get("settings", {}).keys(), module["id"]
        given = {output for used in module.get("use", ()) for output in seen[used]}
        assert set(known.get("needs", ())) <= given, module["id"]
        seen[module["id"]] = known["outputs"]
    controller = group["modules"][-1]
    assert controller["source"].endswith("-controller")
    stores = [each["id"] for each in group["modules"] if "file-system" in each["source"]]
    assert set(stores) <= set(controller["use"])


@pytest.mark.skipif(not shutil.which("gcluster"), reason="gcluster is neither on PyPI nor in Debian")
@pytest.mark.slow
def test_gcluster_expands_the_blueprint(cloud: Cloud) -> None:
    cloud("cluster", "render", "gcp-gpt2", PROJECT_ID="my-project")
    argv = ("gcluster", "expand", cloud.project / "clusters/gcp-gpt2/blueprint.yaml", "-l", "IGNORE", "-o", "out.yaml")
    subprocess.run(argv, cwd=cloud.project, check=True)


WRONG = {
    "provider = 'azure'": "there is no provider 'azure'",
    AWS + GPU.replace("p5.48xlarge", "p5.48xlrge"): "machine_type cannot be 'p5.48xlrge'",
    AWS + GPU.replace("p5.48", "p5.49"): "runner does not know the GPU machine type 'p5.49xlarge'",
    AWS + GPU + "gpus = 4\n": "a p5.48xlarge has 8 GPUs",
    AWS + GPU + "maxcount = 4\n": "unknown key 'maxcount' in [queues.gpu]",
    AWS + "subnet = 1\n" + GPU: "unknown key 'subnet'",
    AWS + GPU.replace("count = 2", "count = 0"): "count and min_count disagree",
    AWS + GPU.replace("count = 2\n", ""): "queues.gpu.count is missing",
    AWS + GPU + 'capacity = "reservation"\n': "capacity and reservation disagree",
    AWS + GPU + 'capacity = "spott"\n': "capacity cannot be 'spott'",
    AWS + GPU.replace("p5.48xlarge", "g5.xlarge") + "efa = true\n": "a g5.xlarge has no EFA",
    AWS + GPU.replace("gpu]", "GPU]"): "a queue cannot be called 'GPU'",
    AWS + GPU.replace("gpu]", "default]"): "a queue cannot be called 'default'",
    AWS.replace("us-east-2", "us-east"): "region cannot be 'us-east'",
    AWS: "it has no queue",
    AWS
    + GPU
    + '[storage.f]\nkind = "fsx-lustre"\nmount = "/fsx"\nsize_gb = 1300\n': "a fsx-lustre cannot have 1300 GB",
    AWS + GPU + '[storage.f]\nkind = "filestore"\nmount = "/f"\n': "kind cannot be 'filestore'",
    AWS + GPU + '[storage.f]\nkind = "efs"\nmount = "f"\n': "mount cannot be 'f'",
    AWS + 'os = "centos7"\n' + GPU: "os cannot be 'centos7'",
    AWS + 'deployment = "a_b"\n' + GPU: "deployment cannot be 'a_b'",
    GOOGLE + L4.replace("g2-standard-4", "g2-standard-5"): "runner does not know the GPU machine type 'g2-standard-5'",
    GOOGLE
    + L4
    + '[storage.f]\nkind = "filestore"\nmount = "/home"\nsize_gb = 1024\n': "a filestore cannot have 1024 GB",
    GOOGLE
    + L4
    + '[storage.f]\nkind = "filestore"\nmount = "/home"\nsize_gb = 2560\nkeep = true\n': "the toolkit deletes",
    GOOGLE + "pyxis = true\n" + L4: "the toolkit's own image has no pyxis",
    GOOGLE + L4.replace("g2-standard-4", "a3-megagpu-8g"): "runner does not render the networks",
    GOOGLE.replace("us-central1-a", "us-central1") + L4: "zone cannot be 'us-central1'",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=list(WRONG.values()))
def test_a_wrong_cluster_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunnerError) as refused:
        rendered(text, tmp_path, "site.toml.j2")
    assert message in refused.value.what + refused.value.fix and "test.toml" in refused.value.what


def test_the_name_of_a_file_is_checked_as_a_deployment_is(tmp_path: Path) -> None:
    """ParallelCluster refuses my_cluster, Google Cloud My-Cluster."""
    for name, text in (("my_cluster", AWS + GPU), ("My-Cluster", GOOGLE + L4)):
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        with pytest.raises(RunnerError, match=f"deployment cannot be '{name}'"):
            find_cluster(str(path), find_project(tmp_path), {})
        path.write_text('deployment = "mine"\n' + text)
        assert find_cluster(str(path), find_project(tmp_path), {}).values["deployment"] == "mine"


def test_unknown_keys_pass_through_raw(tmp_path: Path) -> None:
    """Tables are merged, lists of tables by their names, other lists are replaced."""
    text = AWS + "[raw.HeadNode.Imds]\nSecured = false\n" + GPU
    text += '[[raw.Scheduling.SlurmQueues]]\nName = "gpu"\nNetworking.SubnetIds = ["x", "y"]\n'
    document = rendered(text, tmp_path, "config.yaml.j2")
    assert document["HeadNode"]["Imds"] == {"Secured": False} and document["HeadNode"]["InstanceType"] == "m5.xlarge"
    (queue,) = document["Scheduling"]["SlurmQueues"]
    assert queue["Networking"] == {"SubnetIds": ["x", "y"], "PlacementGroup": {"Enabled": True}}
    text = (
        GOOGLE
        + L4
        + '[[raw.deployment_groups]]\ngroup = "primary"\n[[raw.deployment_groups.modules]]\nid = "network"\n'
    )
    blueprint = rendered(text + "settings.mtu = 1460\n", tmp_path, "blueprint.yaml.j2")
    modules = {each["id"]: each for each in blueprint["deployment_groups"][0]["modules"]}
    assert modules["network"] == {"id": "network", "source": "modules/network/vpc", "settings": {"mtu": 1460}}
    assert "slurm_controller" in modules


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """A value can neither end its line in YAML and TOML, nor open a key of its own."""
    evil = 'x"\\n  Evil: true # {{ 1 }} \\u2028 ä: [\\t'
    text = AWS + f'key = "{evil}"\nsummary = "{evil}"\n'.replace('x"', "x'") + GPU
    document, site = (rendered(text, tmp_path, name) for name in ("config.yaml.j2", "site.toml.j2"))
    assert document["HeadNode"]["Ssh"]["KeyName"] == site["summary"] == tomllib.loads(text)["key"]
    assert "Evil" not in document and "Evil" not in document["HeadNode"]


def test_a_new_machine_type_is_described_in_the_file(tmp_path: Path) -> None:
    text = AWS + GPU.replace("p5.48xlarge", "p9.48xlarge") + "gpus = 8\ncpus = 200\nmemory_gb = 1900\n"
    values = rendered(text, tmp_path, "site.toml.j2")["values"]
    assert values["gpus_per_node"]["value"] == 8 and values["memory"]["value"] == "1900G"
    assert "machine_type" not in values


def test_no_file_of_somebody_else_is_replaced(cloud: Cloud) -> None:
    cloud.file("c", AWS + GPU)
    config, site = cloud.project / "clusters/c/config.yaml", cloud.home / ".config/runner/sites/c.toml"
    first = cloud("cluster", "render", "c").stdout.splitlines()
    assert str(config) in first and str(site) in first
    before = config.read_bytes()
    cloud.file("c", AWS + GPU.replace("count = 2", "count = 3"))
    cloud("cluster", "render", "c")
    assert config.read_bytes() != before  # ours, unedited: replaced
    edited = config.read_text() + "Tags: []\n"
    config.write_text(edited)
    refused = cloud("cluster", "render", "c", code=1).stderr
    assert "cannot replace" in refused and config.read_text() == edited
    cloud("cluster", "render", "c", "--force")
    assert config.read_text() != edited
    site.write_text('base = "alps"\n')
    cloud("cluster", "render", "c", code=1)
    assert site.read_text() == 'base = "alps"\n'


def test_dry_run_prints_and_writes_nothing(cloud: Cloud) -> None:
    shown = cloud("cluster", "render", "gcp-gpt2", "--dry-run").stdout
    assert 'blueprint_name: "gcp-gpt2"' in shown and 'base = "generic-slurm"' in shown
    assert not (cloud.project / "clusters").exists() and not (cloud.home / ".config").exists()


def test_the_variables_of_the_clouds_count(tmp_path: Path) -> None:
    blueprint = rendered(GOOGLE + L4, tmp_path, "blueprint.yaml.j2", PROJECT_ID="mine")
    assert blueprint["vars"]["project_id"] == "mine" and blueprint["vars"]["region"] == "us-central1"
    without = AWS.replace('region = "us-east-2"\n', "") + GPU
    assert rendered(without, tmp_path, "config.yaml.j2", AWS_DEFAULT_REGION="eu-west-1")["Region"] == "eu-west-1"
    assert rendered(AWS + GPU, tmp_path, "config.yaml.j2", AWS_REGION="eu-west-1")["Region"] == "us-east-2"


def test_every_machine_type_fits_the_patterns_and_what_slurm_offers_follows_from_the_hardware() -> None:
    """AWS: vCPUs and 95 % of the memory. Google Cloud: cores, and the memory less 400 MiB and 30 MiB per GiB."""
    for cloud, least in (("aws", 50), ("google", 20)):
        table, provider = machine_types()[cloud], facts("providers")[cloud]
        assert len(table["types"]) >= least and "https://" in table["title"]
        for name, row in table["types"].items():
            assert re.fullmatch(provider["match"]["machine_type"], name), name
            assert re.match(provider["gpu_machine_type"], name), name
            gib, aws = row["memory_gib"], cloud == "aws"
            threads = aws or re.fullmatch(r"a3-(high|mega|ultra)gpu-8g", name)  # hyper-threading is on
            assert row["site"]["cpus_per_node"] == row["vcpus"] // (1 if threads else 2), name
            memory = gib * 1024 * 95 // 100 if aws else gib * 1024 - 400 - 30 * gib
            assert row["site"]["memory"] == f"{memory}M" and row["site"]["gpus_per_node"] in (1, 2, 4, 8, 16), name


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("gcp-*.toml")), ids=lambda path: path.stem)
def test_the_shipped_sites_of_google_get_their_gaps_from_the_table(path: Path) -> None:
    site = load_site(path.stem, {"HOME": "/nonexistent"})
    assert site.cpus_per_node and site.memory and site.gpus_per_node and site.gpu and site.architecture == "amd64"
    assert "accelerator-optimized" in site.origins["cpus_per_node"].source


def test_a_site_file_of_the_user_takes_a_machine_type(tmp_path: Path) -> None:
    folder = tmp_path / ".config/runner/sites"
    folder.mkdir(parents=True)
    (folder / "aws-parallelcluster.toml").write_text('[values]\nmachine_type = "p4d.24xlarge"\nmemory = "0"\n')
    site = load_site("aws-parallelcluster", {"HOME": str(tmp_path)})
    assert (site.gpus_per_node, site.cpus_per_node, site.memory) == (8, 96, "0")
    (folder / "aws-parallelcluster.toml").write_text('[values]\nmachine_type = "p4d.24xlrge"\n')
    with pytest.raises(RunnerError, match=r"aws-parallelcluster.toml:2: there is no machine type 'p4d.24xlrge'"):
        load_site("aws-parallelcluster", {"HOME": str(tmp_path)})
