"""ParallelCluster's own schema and validators accept what runner renders, and its program accepts runner's commands."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from runner.cluster.cluster import facts, find_cluster
from runner.project import find_project
from tests.cluster import parallelcluster

pytestmark = pytest.mark.network  # pip fetches aws-parallelcluster, once

# what moto does not know, or does not simulate: these messages are not about the configuration
FALSE_ERRORS = {
    "KeyPairValidator": "'KeyType'",
    "HeadNodeLaunchTemplateValidator": "The request must contain the parameter ebs",
    "ComputeResourceLaunchTemplateValidator": "The request must contain the parameter ebs",
}
NETWORK = """\
[network]
head_subnet = "subnet-0123456789abcdef0"
compute_subnet = "subnet-0fedcba9876543210"
"""
TEXTS = {
    "plain": 'provider = "aws"\nregion = "us-east-2"\nos = "alinux2023"\n'
    f'[head]\nmachine_type = "m5.xlarge"\n{NETWORK}[queues.a]\nmachine_type = "g5.xlarge"\ncount = 1\n',
    "spot": 'provider = "aws"\nregion = "us-east-2"\nkey = "my-key"\npyxis = true\n'
    f'[head]\nmachine_type = "m5.xlarge"\n{NETWORK}'
    '[queues.big]\nmachine_type = "p4d.24xlarge"\ncount = 4\nmin_count = 1\ncapacity = "spot"\ndisk_gb = 300\n'
    '[queues.cpu]\nmachine_type = "c5.4xlarge"\ncount = 10\n'
    '[storage.shared]\nkind = "efs"\nmount = "/shared"\n'
    '[storage.fsx]\nkind = "fsx-lustre"\nmount = "/fsx"\nsize_gb = 1200\n',
    "raw": 'provider = "aws"\nregion = "us-east-2"\n'
    f'[head]\nmachine_type = "m5.xlarge"\n{NETWORK}[queues.a]\nmachine_type = "g6.48xlarge"\ncount = 1\n'
    "[raw.Scheduling.SlurmSettings]\nScaledownIdletime = 60\n"
    '[[raw.Scheduling.SlurmQueues]]\nName = "a"\nComputeSettings.LocalStorage.EphemeralVolume.MountDir = "/local"\n',
}


def document(text: str, folder: Path, name: str = "test") -> str:
    """What runner renders from the text of a cluster file."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return find_cluster(str(path), find_project(folder), {}).text("config.yaml.j2")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("clusters")
    shipped = (find_project().shipped / "clusters" / "aws-pyxis.toml").read_text()
    good = {name: document(text, folder) for name, text in {"shipped": shipped, **TEXTS}.items()}
    plain = good["plain"]
    return {
        **good,
        "a misspelt key": plain.replace("MaxCount", "MaxCout"),
        "a number as text": plain.replace("MaxCount: 1", "MaxCount: many"),
        "no queue": plain.replace("SlurmQueues", "Queues"),
        "an unknown os": plain.replace("alinux2023", "alinux1999"),
        "no such machine": plain.replace("g5.xlarge", "g5.xlrge"),
        "efa without efa": good["shipped"].replace("p5.48xlarge", "g5.xlarge"),
        "an odd size": good["shipped"].replace("4800", "4801"),
    }


@pytest.fixture(scope="module")
def verdicts(documents: dict[str, str]) -> dict[str, list[tuple[str, str, str]]]:
    """name -> errors of the schema and of the validators, those that moto causes left out."""
    script = Path(__file__).with_name("validate.py")
    done = subprocess.run(
        (parallelcluster.python(), script), input=json.dumps(documents), capture_output=True, text=True, check=True
    )
    return {
        name: [each for each in found if each[0] == "ERROR" and FALSE_ERRORS.get(each[1], "\0") not in each[2]]
        for name, found in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("name", ["shipped", *TEXTS])
def test_parallelcluster_accepts_what_is_rendered(name: str, verdicts: dict[str, list[tuple[str, str, str]]]) -> None:
    assert verdicts[name] == []


@pytest.mark.parametrize(
    ("name", "validator"),
    [
        ("a misspelt key", "schema"),
        ("a number as text", "schema"),
        ("no queue", "schema"),
        ("an unknown os", "schema"),
        ("no such machine", "EC2"),
        ("efa without efa", "EfaValidator"),
        ("an odd size", "FsxStorageCapacityValidator"),
    ],
)
def test_parallelcluster_rejects_a_wrong_document(
    name: str, validator: str, verdicts: dict[str, list[tuple[str, str, str]]]
) -> None:
    """The verdicts above can fail: the same way of asking finds these mistakes."""
    assert validator in {each[1] for each in verdicts[name]}


COMMANDS = {action: lines for action, lines in facts("providers")["aws"]["commands"].items() if action != "ssh"}


@pytest.mark.parametrize("action", COMMANDS)
def test_pcluster_knows_the_commands_and_their_options(action: str, tmp_path: Path) -> None:
    """Without credentials, the real program parses the command, and stops when it needs AWS."""
    config = tmp_path / "config.yaml"
    config.write_text("Region: us-east-2\n")
    (line,) = COMMANDS[action]
    program = parallelcluster.python().with_name("pcluster")
    names = {"program": str(program), "deployment": "test", "region": "us-east-2", "document": str(config)}
    argv = [word.format(**names) for word in shlex.split(line)]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    if action == "version":
        assert json.loads(done.stdout) == {"version": parallelcluster.VERSION}
    else:
        assert json.loads(done.stdout) == {"message": "Unable to locate credentials"}, done.stderr


def test_the_query_of_status_takes_what_describe_cluster_answers() -> None:
    """The answer of `describe-cluster`, by the model of its API, and jmespath as pcluster uses it."""
    answer = {
        "clusterName": "dlhpc",
        "cloudFormationStackStatus": "ROLLBACK_IN_PROGRESS",
        "clusterStatus": "CREATE_FAILED",
        "headNode": {"privateIpAddress": "10.0.0.1", "state": "running"},
        "failures": [{"failureCode": "FsxMountFailure", "failureReason": "Failed to mount FSX."}],
    }
    (line,) = facts("providers")["aws"]["commands"]["status"]
    query = shlex.split(line)[-1].format()
    script = "import jmespath, json, sys; print(json.dumps(jmespath.search(sys.argv[1], json.loads(sys.argv[2]))))"
    found = []
    for each in (answer, {"cloudFormationStackStatus": "CREATE_IN_PROGRESS"}):
        argv = (parallelcluster.python(), "-c", script, query, json.dumps(each))
        found.append(json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout))
    assert found == [
        {"status": "ROLLBACK_IN_PROGRESS", "name": "10.0.0.1", "reason": ["Failed to mount FSX."]},
        {"status": "CREATE_IN_PROGRESS", "name": None, "reason": None},
    ]
