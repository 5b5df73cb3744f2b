"""adopt: an existing file of the tool becomes a cluster, the tool reads it unchanged, and the site file fits it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from runner.cluster.documents import render
from runner.site_files import load_site
from tests.cluster.conftest import Cloud

# in the form of the toolkit's examples/ml-slurm.yaml and pfs-managed-lustre-slurm.yaml (cluster-toolkit@1047080)
BLUEPRINT = """\
blueprint_name: hpc-slurm
vars:
  project_id:  ## Set GCP Project ID Here ##
  deployment_name: hpc-slurm-gpt2demo-gpu-g2-deepspeed
  region: us-central1
  zone: us-central1-a
  gpu_type: g2-standard-4
  nodes: 8
deployment_groups:
- group: primary
  modules:
  - id: network
    source: modules/network/vpc
  - id: homefs
    source: modules/file-system/filestore
    use: [network]
    settings: {local_mount: /home}
- group: cluster
  modules:
  - id: debug_nodeset
    source: community/modules/compute/schedmd-slurm-gcp-v6-nodeset
    use: [network]
    settings: {node_count_dynamic_max: 4, machine_type: n2-standard-2}
  - id: debug_partition
    source: community/modules/compute/schedmd-slurm-gcp-v6-partition
    use: [debug_nodeset]
    settings: {partition_name: debug, is_default: true}
  - id: g2_gpu_nodeset
    source: community/modules/compute/schedmd-slurm-gcp-v6-nodeset
    use: [network]
    settings: {node_count_dynamic_max: $(vars.nodes), machine_type: $(vars.gpu_type), enable_spot_vm: true}
  - id: g2_partition
    source: community/modules/compute/schedmd-slurm-gcp-v6-partition
    use: [g2_gpu_nodeset]
    settings: {partition_name: g2gpu, exclusive: false}
  - id: slurm_login
    source: community/modules/scheduler/schedmd-slurm-gcp-v6-login
    use: [network]
    settings: {machine_type: n2-standard-4}
  - id: slurm_controller
    source: community/modules/scheduler/schedmd-slurm-gcp-v6-controller
    use: [network, debug_partition, g2_partition, homefs, slurm_login]
"""
# in the form of awsome-distributed-ai@95b939c, cluster-vanilla.yaml
CONFIG = """\
Region: us-west-2
Image: {Os: ubuntu2204}
HeadNode:
  InstanceType: m5.8xlarge
  Networking: {SubnetId: subnet-0aaaaaaaaaaaaaaaa}
  Ssh: {KeyName: lab}
  CustomActions:
    OnNodeConfigured: {Script: 'https://example.org/pyxis/postinstall.sh'}
Scheduling:
  Scheduler: slurm
  SlurmQueues:
    - Name: compute-gpu
      CapacityType: ONDEMAND
      Networking: {SubnetIds: [subnet-0bbbbbbbbbbbbbbbb]}
      ComputeResources:
        - Name: distributed-ml
          Instances: [{InstanceType: p4d.24xlarge}]
          MinCount: 2
          MaxCount: 4
          Efa: {Enabled: true}
          CapacityReservationTarget: {CapacityReservationId: cr-1}
SharedStorage:
  - Name: home
    MountDir: /home
    StorageType: Ebs
  - Name: fsx
    MountDir: /fsx
    StorageType: FsxLustre
    FsxLustreSettings: {FileSystemId: fs-0123456789abcdef0}
"""


def test_a_blueprint_keeps_its_deployment_name_and_its_text(cloud: Cloud) -> None:
    path = cloud.project / "hpc-slurm.yaml"
    path.write_text(BLUEPRINT)
    name = "hpc-slurm-gpt2demo-gpu-g2-deepspeed"
    written = cloud("cluster", "adopt", "hpc-slurm.yaml").stdout
    assert f"clusters/{name}.toml" in written and path.read_text() == BLUEPRINT
    site = load_site(name, {"HOME": str(cloud.home)})
    assert (site.partition, site.gpus_per_node, site.gpu, site.cpus_per_node) == ("g2gpu", 1, "NVIDIA L4", 2)
    assert set(site.partitions) == {"debug", "g2gpu"} and "up to 8" in site.partitions["g2gpu"]
    assert "spot" in site.partitions["g2gpu"] and site.engine == "auto"
    cloud.programs("gcluster", "gcloud")
    shown = cloud("cluster", "create", name, "--dry-run", PROJECT_ID="p").stdout
    assert f"gcluster create {path} " in shown and f"deployment_name={name}" in shown
    listed = [0, json.dumps([{"status": "RUNNING", "name": "x-login-001", "zone": "z"}])]
    cloud.answers(**{"instances list": [listed], "squeue": [[0, ""]]})
    lost = cloud("cluster", "destroy", name, code=1, PROJECT_ID="p").stderr
    assert "file system homefs (/home, 2560 GB)" in lost


def test_a_blueprint_with_modules_of_a_fixed_version_has_all_its_queues(cloud: Cloud) -> None:
    """As the toolkit's modules/README.md shows: a module of its repository, with ?ref=."""
    remote = "github.com/GoogleCloudPlatform/cluster-toolkit//community/modules"
    text = BLUEPRINT.replace("v6-partition", "v6-partition?ref=v1.41.0").replace("v6-login", "v6-login?ref=v1.41.0")
    (cloud.project / "pinned.yaml").write_text(text.replace("source: community/modules", f"source: {remote}"))
    cloud("cluster", "adopt", "pinned.yaml", "--name", "pinned")
    site = load_site("pinned", {"HOME": str(cloud.home)})
    assert set(site.partitions) == {"debug", "g2gpu"} and site.gpu == "NVIDIA L4"


@pytest.mark.parametrize("line", ["", "  nodes: # supply the number of nodes\n"], ids=["absent", "empty"])
def test_a_variable_of_a_deployment_file_is_named(line: str, cloud: Cloud) -> None:
    """The toolkit's A3 blueprints take some from the file of `gcluster create -d`."""
    text = BLUEPRINT.replace("  nodes: 8\n", line).replace("dynamic_max: $(vars", "static: $(vars")
    (cloud.project / "a3.yaml").write_text(text)
    error = cloud("cluster", "adopt", "a3.yaml", code=1).stderr
    assert "cannot read $(vars.nodes) of the adopted file" in error and "add it to `vars` of the blueprint" in error


def adopted(text: str) -> Mapping[str, Any]:
    """The queue g2gpu of a blueprint."""
    data = {"data": yaml.safe_load(text)}
    found: Mapping[str, Any] = tomllib.loads(render("read-google.toml.j2", data))["queues"]["g2gpu"]
    return found


def test_a_partition_may_use_other_modules_and_several_nodesets() -> None:
    for used, count in (("network, g2_gpu_nodeset", 8), ("g2_gpu_nodeset, debug_nodeset", 12)):
        queue = adopted(BLUEPRINT.replace("use: [g2_gpu_nodeset]", f"use: [{used}]"))
        assert (queue["machine_type"], queue["count"], queue["capacity"]) == ("g2-standard-4", count, "spot")


def test_the_capacity_is_that_of_the_variables() -> None:
    """The toolkit's A3 blueprints set reservation_name and enable_spot_vm to variables, of which one counts."""
    both = "enable_spot_vm: $(vars.spot), reservation_name: $(vars.reservation)"
    text = BLUEPRINT.replace("enable_spot_vm: true", both)
    values = {
        ('""', "false"): None,
        ("", "false"): None,
        ("mine", "false"): "reservation",
        ('""', "true"): "spot",
    }
    for (reservation, spot), capacity in values.items():
        variables = f"vars:\n  reservation: {reservation}\n  spot: {spot}\n"
        assert adopted(text.replace("vars:\n", variables)).get("capacity") == capacity


def test_a_date_in_a_file_is_no_mistake(cloud: Cloud) -> None:
    (cloud.project / "x.yaml").write_text(BLUEPRINT.replace("vars:\n", "vars:\n  labels: {made: 2026-01-01}\n"))
    cloud("cluster", "adopt", "x.yaml")
    (cloud.project / "y.yaml").write_text(CONFIG + "Tags: [{Key: made, Value: 2026-01-01}]\n")
    cloud("cluster", "adopt", "y.yaml", "--name", "y1")


def test_destroy_names_each_file_system_that_the_toolkit_would_delete(cloud: Cloud) -> None:
    more = """\
  - {id: scratch, source: modules/file-system/parallelstore, settings: {size_gb: 12000}}
  - {id: nfs, source: community/modules/file-system/nfs-server, settings: {local_mounts: [/work]}}
  - {id: old, source: modules/file-system/pre-existing-network-storage, settings: {local_mount: /old}}
  - {id: bucket, source: modules/file-system/cloud-storage-bucket}
- group: cluster
"""
    (cloud.project / "x.yaml").write_text(BLUEPRINT.replace("- group: cluster\n", more))
    cloud("cluster", "adopt", "x.yaml", "--name", "x1")
    cloud.programs("gcluster", "gcloud")
    cloud.answers(**{"instances list": [[0, json.dumps([{"status": "RUNNING", "name": "x-login-001", "zone": "z"}])]]})
    error = cloud("cluster", "destroy", "x1", "--dry-run", PROJECT_ID="p").stderr
    assert "file system scratch (/parallelstore, 12000 GB)" in error and "file system nfs (/work)" in error
    assert "file system homefs (/home, 2560 GB)" in error and "old" not in error and "bucket" not in error


def test_a_configuration_of_parallelcluster_needs_the_name_that_was_typed(cloud: Cloud) -> None:
    path = cloud.project / "config.yaml"
    path.write_text(CONFIG)
    assert "--name NAME" in cloud("cluster", "adopt", "config.yaml", code=2).stderr
    cloud("cluster", "adopt", "config.yaml", "--name", "dlhpc")
    site = load_site("dlhpc", {"HOME": str(cloud.home)})
    assert (site.partition, site.gpus_per_node, site.cpus_per_node) == ("compute-gpu", 8, 96)
    assert site.nccl_network == "Libfabric" and site.engine == "pyxis" and site.mounts == ("/fsx:/fsx",)
    assert site.partitions == {"compute-gpu": "up to 4 p4d.24xlarge, 8 GPUs each, reservation"}
    cloud.programs("pcluster")
    shown = cloud("cluster", "create", "dlhpc", "--dry-run")
    assert f"--cluster-name dlhpc --cluster-configuration {path} --region us-west-2" in shown.stdout
    assert "storage home: other at /home, 0 GB, new, deleted with the cluster" in shown.stderr
    assert not (cloud.project / "clusters/dlhpc/config.yaml").exists()


def test_the_file_is_read_again_each_time_and_prices_stand_beside_it(cloud: Cloud) -> None:
    path = cloud.project / "config.yaml"
    path.write_text(CONFIG)
    cloud("cluster", "adopt", "config.yaml", "--name", "dlhpc")
    path.write_text(CONFIG.replace("p4d.24xlarge", "g5.48xlarge").replace("          Efa: {Enabled: true}\n", ""))
    cluster = cloud.project / "clusters/dlhpc.toml"
    cluster.write_text(cluster.read_text() + "[queues.compute-gpu]\nprice_per_hour = 10\n")
    cloud("cluster", "render", "dlhpc")
    assert load_site("dlhpc", {"HOME": str(cloud.home)}).cpus_per_node == 192
    cloud.programs("pcluster")
    assert "at most 40.00 per hour" in cloud("cluster", "create", "dlhpc", "--dry-run").stderr
    again = cloud("cluster", "adopt", "config.yaml", "--name", "dlhpc", code=1).stderr
    assert "cannot replace" in again and "to keep this file: runner cluster render dlhpc" in again


def without(text: str, *keys: str) -> str:
    data: Any = yaml.safe_load(text)
    place = data
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return yaml.safe_dump(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just text",
        "a: [",
        without(CONFIG, "HeadNode"),
        without(CONFIG, "Scheduling"),
        "deployment_groups: []\n",
        CONFIG.replace("Os: ubuntu2204", "Os: "),
        BLUEPRINT.replace("partition_name: debug", "partition_name: g2gpu"),
    ],
)
def test_an_incomplete_file_is_refused_in_three_parts(text: str, cloud: Cloud) -> None:
    (cloud.project / "x.yaml").write_text(text)
    error = cloud("cluster", "adopt", "x.yaml", "--name", "x1", code=1).stderr
    assert error.count("because:") == 1 and "internal error" not in error


def test_a_file_that_is_not_there_or_has_no_name_is_refused(cloud: Cloud) -> None:
    error = cloud("cluster", "adopt", "no.yaml", code=1).stderr
    assert "no.yaml" in error and "not YAML" not in error
    (cloud.project / "x.yaml").write_text(CONFIG + "vars: [1]\n")
    assert "cannot adopt x.yaml" in cloud("cluster", "adopt", "x.yaml", code=2).stderr


def test_a_name_cannot_leave_the_folder(cloud: Cloud) -> None:
    (cloud.project / "x.yaml").write_text(CONFIG)
    cloud("cluster", "adopt", "x.yaml", "--name", "../../x", code=2)
    assert not list(cloud.folder.glob("x*"))
