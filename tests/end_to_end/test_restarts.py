"""A launch that may cost much is asked about; one that is a chain goes on from link to link, and is seen as one run."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, write
from tests.waiting import until

LONG = """\
command = ["sh", "-c", "[ -d $RUNNER_RUN/attempts/2 ] || exit 75"]
environment = "plain"
[resources]
time = "10:00:00"
gpus_per_node = 4
nodes = 2
"""


@pytest.fixture
def bare(cluster: Runner) -> Runner:
    """The cluster without containers, on a site that asks above 50 GPU hours."""
    home = Path(cluster.environ["HOME"])
    write(home, {".config/runner/sites/dear.toml": 'base = "generic-slurm"\n[values]\nengine = "host"\n'
                                                   "confirm_gpu_hours = 50\n"})  # fmt: skip
    write(cluster.project, {"jobs/long.toml": LONG})
    return Runner(cluster.project, cluster.environ, "dear")


def test_a_chain_of_jobs_is_one_run(bare: Runner) -> None:
    """Asked about, submitted, continued by its second link; the third has nothing to do and is cancelled."""
    refused = bare("launch", "long", "--chain", "3", code=1)
    assert "this launch may take 240 GPU hours" in refused.stderr
    assert not bare.made()
    launched = bare("launch", "long", "--chain", "3", "--yes", "--no-preflight")
    assert "at most 80.0 GPU hours per attempt, 240.0 with all restarts" in launched.stderr
    assert "estimated start: 20" in launched.stderr
    run = launched.stdout.strip()
    folder = bare.runs / run
    assert "\nchain = 3\n" in (folder / "lock.toml").read_text()
    until(lambda: (folder / "attempts/2/exit_code").exists(), "the second link", 60)
    status = bare.wait(run, lambda found: found["state"] == "COMPLETED")
    assert status["causes"] == ["time_limit", "done"]
    assert len(status["job_ids"]) == 3 and status["job_id"] == status["job_ids"][1]
    assert status["gpu_hours"] is not None
    assert "GPU HOURS" in bare("status", run).stdout
    again = bare("rerun", run).stdout.strip()
    until(lambda: (bare.runs / again / "attempts/2/exit_code").exists(), "the second link of the rerun", 60)
    assert len(bare.wait(again, lambda found: found["state"] == "COMPLETED")["job_ids"]) == 3
