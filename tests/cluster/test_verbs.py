"""create, list, status, ssh and destroy, against programs that record their calls and answer as documented."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cloud
from tests.schemas import check

AWS = """\
provider = "aws"
region = "us-east-2"
key = "my-key"
network.head_subnet = "subnet-1"
head = { machine_type = "m5.xlarge", price_per_hour = 0.2 }
[queues.gpu]
machine_type = "p5.48xlarge"
count = 2
price_per_hour = 50
"""
GOOGLE = """\
provider = "google"
zone = "us-central1-a"
head.machine_type = "n2-standard-4"
[queues.g2]
machine_type = "g2-standard-4"
count = 8
"""
LUSTRE = '[storage.fsx]\nkind = "fsx-lustre"\nmount = "/fsx"\nsize_gb = 1200\n'
HOME = '[storage.homefs]\nkind = "filestore"\nmount = "/home"\nsize_gb = 2560\n'
VERSION = [[0, '{\n  "version": "3.16.1"\n}']]
ABSENT = [
    1,
    '{\n  "message": "Cluster \'c\' does not exist or belongs to an incompatible ParallelCluster major version."\n}',
]


def aws(status: str, address: str | None = "1.2.3.4", reason: list[str] | None = None) -> list[object]:
    return [0, json.dumps({"status": status, "name": address, "reason": reason})]


def google(status: str = "RUNNING") -> list[object]:
    return [0, json.dumps([{"status": status, "name": "c-slurm-login-001", "zone": "us-central1-a"}])]


@pytest.fixture
def pcluster(cloud: Cloud) -> Cloud:
    cloud.programs("pcluster")
    cloud.file("c", AWS)
    return cloud


@pytest.fixture
def toolkit(cloud: Cloud) -> Cloud:
    cloud.programs("gcluster", "gcloud")
    cloud.environ["PROJECT_ID"] = "my-project"
    cloud.file("c", GOOGLE)
    return cloud


def test_create_waits_until_parallelcluster_is_ready(pcluster: Cloud) -> None:
    states = [ABSENT, aws("CREATE_IN_PROGRESS", None), aws("CREATE_IN_PROGRESS"), aws("CREATE_COMPLETE")]
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=states)
    done = pcluster("cluster", "create", "c")
    assert "price: at most 100.20 per hour" in done.stderr
    assert done.stderr.index("c: CREATE_IN_PROGRESS; do not ssh") < done.stderr.index("c: CREATE_COMPLETE")
    config = str(pcluster.project / "clusters/c/config.yaml")
    create = [
        "pcluster",
        "create-cluster",
        "--cluster-name",
        "c",
        "--cluster-configuration",
        config,
        "--region",
        "us-east-2",
    ]
    assert create in pcluster.calls() and Path(config).is_file()
    host = (pcluster.home / ".config/runner/hosts/c.toml").read_text()
    assert 'host = "ubuntu@1.2.3.4"\nsite = "c"\n[login]\nkey = "~/.ssh/my-key.pem"\n' in host
    shown = pcluster("--on", "c", "site", "list", code=1).stderr  # no such machine, but the host file is read
    assert "ubuntu@1.2.3.4" in shown


def test_an_edited_host_file_is_kept_and_the_new_address_is_shown(pcluster: Cloud) -> None:
    """As after a cluster was destroyed and created again."""
    host = pcluster.home / ".config/runner/hosts/c.toml"
    host.parent.mkdir(parents=True)
    host.write_text('host = "ubuntu@9.9.9.9"\nfolder = "/fsx/me"\n')
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=[ABSENT, aws("CREATE_COMPLETE")])
    said = pcluster("cluster", "create", "c").stderr
    assert f"cannot replace {host}" in said and 'it must contain: host = "ubuntu@1.2.3.4"' in said
    assert "Slurm is ready" in said and "9.9.9.9" in host.read_text()


def test_create_goes_on_waiting_if_the_tool_fails_for_a_moment(pcluster: Cloud) -> None:
    failed = [1, "Could not connect to the endpoint URL"]
    states = [ABSENT, aws("CREATE_IN_PROGRESS"), *[failed] * 5, aws("CREATE_IN_PROGRESS"), aws("CREATE_COMPLETE")]
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=states)
    assert "cannot get the state of c; asking again" in pcluster("cluster", "create", "c").stderr
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=[ABSENT, failed])
    assert "Could not connect" in pcluster("cluster", "create", "c", code=1).stderr


def test_create_deploys_a_blueprint_and_waits_for_slurm(toolkit: Cloud) -> None:
    """The toolkit is ready when sinfo answers on the login node, not when the node runs."""
    toolkit.answers(
        **{"gcluster --version": [[0, "gcluster version v1.95.0"]], "gcluster create": [[0, "ok"]]},
        **{"gcluster deploy": [[0, "Apply complete!"]], "instances list": [[0, "[]"], google()]},
        **{"sinfo": [[255, ""], [0, "g2 up"]]},
    )
    toolkit("cluster", "create", "c")
    calls = [" ".join(call) for call in toolkit.calls()]
    folder = toolkit.project / "clusters/c"
    assert (
        f"gcluster create {folder}/blueprint.yaml --out {folder} --overwrite-deployment "
        "--vars project_id=my-project --vars deployment_name=c"
    ) in calls
    assert f"gcluster deploy {folder}/c --auto-approve" in calls
    ssh = "gcloud compute ssh c-slurm-login-001 --zone us-central1-a --project my-project --command=sinfo"
    assert calls.count(ssh) == 2
    host = (toolkit.home / ".config/runner/hosts/c.toml").read_text()
    assert 'host = "c-slurm-login-001.us-central1-a.my-project"' in host


def test_dry_run_shows_what_the_tool_will_do(pcluster: Cloud) -> None:
    shown = pcluster("cluster", "create", "c", "--dry-run")
    assert shown.stdout.startswith("pcluster create-cluster --cluster-name c ") and "queue gpu: up to 2" in shown.stderr
    assert pcluster.calls() == [] and not (pcluster.project / "clusters/c").exists()


def test_above_the_budget_create_needs_a_confirmation(pcluster: Cloud) -> None:
    pcluster.file("c", "budget_per_hour = 60\n" + AWS)
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=[ABSENT])
    refused = pcluster("cluster", "create", "c", code=1).stderr
    assert "c may cost 100.20 per hour, above the budget of 60.00" in refused and "--yes" in refused
    assert not any("create-cluster" in call for call in pcluster.calls())
    pcluster.answers(version=VERSION, create_cluster=[[0, "{}"]], describe_cluster=[ABSENT, aws("CREATE_COMPLETE")])
    pcluster("cluster", "create", "c", "--yes")


FAILURES = {
    '{"message": "Unable to locate credentials"}': "there are no valid credentials",
    '{"message": "Bad Request: Cluster c already exists."}': "something with that name exists already",
    '{"message": "You have requested more vCPU capacity than your current limit"}': "a limit of the account is reached",
    '{"message": "An error occurred (UnauthorizedOperation)"}': "these credentials may not do that",
    '{"message": "Invalid cluster configuration.", "configurationValidationErrors": []}': "refuses the configuration",
    '{"message": "something new"}': "something new",
}


@pytest.mark.parametrize(("message", "meaning"), FAILURES.items(), ids=list(FAILURES.values()))
def test_a_refused_creation_is_explained(message: str, meaning: str, pcluster: Cloud) -> None:
    pcluster.answers(version=VERSION, create_cluster=[[1, message]], describe_cluster=[ABSENT])
    error = pcluster("cluster", "create", "c", code=1).stderr
    assert "cannot create c" in error and meaning in error and "runner cluster destroy c" in error


def test_a_rollback_is_explained_with_the_events_of_the_stack(pcluster: Cloud) -> None:
    events = '[["HeadNode", "We currently do not have sufficient p5.48xlarge capacity (InsufficientInstanceCapacity)"]]'
    pcluster.answers(
        version=VERSION,
        create_cluster=[[0, "{}"]],
        describe_cluster=[ABSENT, aws("CREATE_IN_PROGRESS"), aws("ROLLBACK_IN_PROGRESS", None, ["Failed to create."])],
        get_cluster_stack_events=[[0, events]],
    )
    error = pcluster("cluster", "create", "c", code=1).stderr
    assert "c: ROLLBACK_IN_PROGRESS" in error and "no free machines of this type" in error
    assert "InsufficientInstanceCapacity" in error and "another zone" in error and "runner cluster destroy c" in error


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            "Error: Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region us-central1.",
            "a limit of the account is reached",
        ),
        ("Error: ZONE_RESOURCE_POOL_EXHAUSTED", "no free machines of this type"),
        ("ghpc_version has changed from A to B", "another version of the toolkit"),
        ("google: could not find default credentials", "there are no valid credentials"),
    ],
)
def test_a_failed_deployment_is_explained(text: str, meaning: str, toolkit: Cloud) -> None:
    toolkit.answers(
        **{"gcluster --version": [[0, "version v1.95.0"]], "gcluster create": [[0, "ok"]]},
        **{"gcluster deploy": [[1, text]], "instances list": [[0, "[]"]]},
    )
    error = toolkit("cluster", "create", "c", code=1).stderr
    assert "cannot create c" in error and meaning in error and text in error


def test_an_existing_cluster_is_not_created_again(pcluster: Cloud) -> None:
    pcluster.answers(version=VERSION, describe_cluster=[aws("CREATE_COMPLETE")])
    assert "the name c is taken: CREATE_COMPLETE" in pcluster("cluster", "create", "c", code=1).stderr


def test_a_creation_that_was_stopped_goes_on(pcluster: Cloud) -> None:
    """`create` of ParallelCluster is asked once; the host file is written at the end."""
    failed = [1, "Could not connect to the endpoint URL"]
    begun = {"version": VERSION, "create_cluster": [[0, "{}"]]}
    pcluster.answers(**begun, describe_cluster=[ABSENT, failed])
    assert "to continue: runner cluster create c" in pcluster("cluster", "create", "c", code=1).stderr
    pcluster.answers(version=VERSION, describe_cluster=[aws("CREATE_IN_PROGRESS"), aws("CREATE_COMPLETE")])
    pcluster("cluster", "create", "c")
    assert 'host = "ubuntu@1.2.3.4"' in (pcluster.home / ".config/runner/hosts/c.toml").read_text()
    pcluster.answers(version=VERSION, describe_cluster=[aws("CREATE_COMPLETE")])
    assert "the name c is taken" in pcluster("cluster", "create", "c", code=1).stderr


def test_another_version_of_the_tool_is_refused(pcluster: Cloud, cloud: Cloud) -> None:
    pcluster.answers(version=[[0, '{"version": "3.9.1"}']])
    error = pcluster("cluster", "create", "c", code=1).stderr
    assert "unsuitable version" in error and "3.11 or newer" in error


def test_a_missing_tool_or_place_is_named(cloud: Cloud) -> None:
    cloud.file("c", AWS)
    cloud.file("g", GOOGLE)
    missing = cloud("cluster", "create", "c", code=1).stderr
    assert "pcluster is not installed" in missing and "&& export PATH=$PATH:~/pcluster/bin " in missing
    cloud.programs("pcluster", "ghpc")
    cloud.file("c", AWS.replace('region = "us-east-2"\n', ""))
    assert "export AWS_REGION=…" in cloud("cluster", "status", "c", code=1).stderr
    assert "export PROJECT_ID=…" in cloud("cluster", "create", "g", code=1).stderr


def test_ctrl_c_says_what_stays_and_how_to_remove_it(toolkit: Cloud) -> None:
    toolkit.answers(
        **{"gcluster --version": [[0, "version v1.95.0"]], "gcluster create": [[0, "ok"]]},
        **{"gcluster deploy": [[0, "SLEEP"]], "instances list": [[0, "[]"]]},
    )
    started = toolkit.start("cluster", "create", "c", "-v", start_new_session=True)
    deadline = time.monotonic() + 60
    while not any("deploy" in call for call in toolkit.calls()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(started.pid, signal.SIGINT)
    _, stderr = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "what was created so far may still exist and cost money; to continue: runner cluster create c; " in stderr
    assert "runner cluster destroy c" in stderr


def test_status_and_list_as_json(pcluster: Cloud) -> None:
    pcluster.answers(describe_cluster=[aws("CREATE_COMPLETE")])
    found = check("cluster status", pcluster("cluster", "status", "c", "--json").stdout)
    assert (found["state"], found["ready"], found["address"]) == ("CREATE_COMPLETE", True, "1.2.3.4")
    pcluster("cluster", "render", "c")
    pcluster.file("wrong", AWS)
    found = check("cluster list", pcluster("cluster", "list", "--json").stdout)
    states = {each["name"]: each["state"] for each in found}
    assert states == {
        "aws-pyxis": "NOT_CREATED",
        "c": "CREATE_COMPLETE",
        "gcp-gpt2": "NOT_CREATED",
        "wrong": "NOT_CREATED",
    }
    pcluster.answers(describe_cluster=[[1, '{"message": "ExpiredToken"}']])
    table = pcluster("cluster", "list").stdout
    assert "UNKNOWN" in table and "the credentials have expired" in table
    assert "ExpiredToken" in pcluster("cluster", "status", "c", code=1).stderr


def test_list_shows_the_other_clusters_if_a_file_has_a_mistake(pcluster: Cloud) -> None:
    pcluster.answers(describe_cluster=[aws("CREATE_COMPLETE")])
    pcluster("cluster", "render", "c")
    pcluster.file("bad", AWS.replace("count = 2", "count = 0"))
    found = check("cluster list", pcluster("cluster", "list", "--json").stdout)
    records = {each["name"]: each for each in found}
    assert records["c"]["ready"] and records["bad"]["state"] == "UNKNOWN"
    assert "bad.toml:8" in records["bad"]["reason"]
    assert "count and min_count disagree" in pcluster("cluster", "status", "bad", code=1).stderr


def test_ssh_uses_the_key_or_the_users_own_configuration(pcluster: Cloud) -> None:
    pcluster.answers(
        **{"describe-cluster": [aws("CREATE_COMPLETE")], "ssh -G": [[0, "hostname c"]], "ssh": [[0, "hello"]]}
    )
    pcluster.programs("ssh")
    assert pcluster("cluster", "ssh", "c", "--", "echo", "a b").stdout == "hello\n"
    last = pcluster.calls()[-1]
    assert last[-2:] == ["ubuntu@1.2.3.4", "echo 'a b'"] and "IdentityFile=%d/.ssh/my-key.pem" in last
    pcluster.answers(
        **{"describe-cluster": [aws("CREATE_COMPLETE")], "ssh -G": [[0, "hostname bastion"]], "ssh": [[3, ""]]}
    )
    pcluster("cluster", "ssh", "c", code=3)
    assert pcluster.calls()[-1] == ["ssh", "c"]


def test_without_a_key_ssh_tries_the_users_own_keys(pcluster: Cloud) -> None:
    pcluster.file("c", AWS.replace('key = "my-key"\n', ""))
    pcluster.answers(**{"describe-cluster": [aws("CREATE_COMPLETE")], "ssh -G": [[0, "hostname c"]], "ssh": [[0, ""]]})
    pcluster.programs("ssh")
    pcluster("cluster", "ssh", "c")
    assert pcluster.calls()[-1] == ["ssh", "-o", "ServerAliveInterval=30", "ubuntu@1.2.3.4"]


def test_destroy_refuses_while_jobs_run(pcluster: Cloud) -> None:
    pcluster.programs("ssh")
    common = {"ssh -G": [[0, "hostname c"]], "delete-cluster": [[0, "{}"]]}
    jobs = "17 gpu train me R 1:00 2 gpu-dy-1"
    pcluster.answers(**{"describe-cluster": [aws("CREATE_COMPLETE")], **common, "squeue": [[0, jobs]]})
    error = pcluster("cluster", "destroy", "c", code=1).stderr
    assert f"job {jobs}" in error and "--force" in error
    pcluster.answers(**{"describe-cluster": [aws("CREATE_COMPLETE")], **common, "squeue": [[255, ""]]})
    assert "cannot see whether jobs run" in pcluster("cluster", "destroy", "c", code=1).stderr
    assert not any("delete-cluster" in call for call in pcluster.calls())
    states = [aws("CREATE_COMPLETE"), aws("DELETE_IN_PROGRESS"), ABSENT]
    pcluster.answers(**{"describe-cluster": states, **common, "squeue": [[0, ""]]})
    pcluster("cluster", "destroy", "c")
    assert ["pcluster", "delete-cluster", "--cluster-name", "c", "--region", "us-east-2"] in pcluster.calls()


@pytest.mark.parametrize("state", ["UPDATE_IN_PROGRESS", "UPDATE_FAILED"])
def test_destroy_refuses_while_jobs_run_in_a_cluster_that_is_updated(state: str, pcluster: Cloud) -> None:
    pcluster.programs("ssh")
    common = {"ssh -G": [[0, "hostname c"]], "delete-cluster": [[0, "{}"]]}
    pcluster.answers(**{"describe-cluster": [aws(state)], **common, "squeue": [[0, "17 gpu train me R 1:00"]]})
    assert "job 17 gpu" in pcluster("cluster", "destroy", "c", code=1).stderr
    assert not any("delete-cluster" in call for call in pcluster.calls())
    states = [aws(state), aws("DELETE_IN_PROGRESS"), ABSENT]
    pcluster.answers(**{"describe-cluster": states, **common, "squeue": [[255, "no Slurm yet"]]})
    pcluster("cluster", "destroy", "c")


def test_destroy_refuses_to_lose_storage(toolkit: Cloud) -> None:
    toolkit.file("c", GOOGLE + HOME)
    folder = toolkit.project / "clusters/c/c"
    folder.mkdir(parents=True)
    lists = {"instances list": [google(), google(), [0, "[]"]], "gcluster destroy": [[0, "Destroy complete!"]]}
    toolkit.answers(**lists, squeue=[[0, ""]])
    error = toolkit("cluster", "destroy", "c", code=1).stderr
    assert "file system homefs (/home, 2560 GB) with all its data" in error and folder.is_dir()
    toolkit("cluster", "destroy", "c", "--force")
    assert ["gcluster", "destroy", str(folder), "--auto-approve"] in toolkit.calls() and not folder.exists()


def test_kept_and_existing_storage_is_not_lost(pcluster: Cloud) -> None:
    existing = '[storage.old]\nkind = "efs"\nmount = "/old"\nid = "fs-0123456789abcdef0"\n'
    pcluster.file("c", AWS + LUSTRE + "keep = true\n" + existing)
    pcluster.answers(describe_cluster=[aws("CREATE_FAILED", None), ABSENT], delete_cluster=[[0, "{}"]])
    assert "file system" not in pcluster("cluster", "destroy", "c").stderr
    assert "there is no c to destroy" in pcluster("cluster", "destroy", "c", code=1).stderr


def test_a_deployment_that_has_failed_can_be_tried_again_and_destroyed(toolkit: Cloud) -> None:
    folder = toolkit.project / "clusters/c/c"
    folder.mkdir(parents=True)
    toolkit.answers(**{"instances list": [[0, "[]"]], "gcluster destroy": [[0, ""]]})
    assert "INCOMPLETE" in toolkit("cluster", "status", "c").stdout
    toolkit("cluster", "destroy", "c")
    assert not folder.exists()
