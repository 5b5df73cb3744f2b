"""The account of a run on a real Slurm: a plain loop that restarts in its allocation, against Slurm's own times."""

import json
import re
from datetime import datetime

from tests.end_to_end.conftest import Runner, write
from tests.lab.slurm import SlurmLab

LOOP = """\
note() { echo "$EPOCHREALTIME $1" >> "$RUNNER_ATTEMPT/times-rank-0"; }
attempt=${RUNNER_ATTEMPT##*/}
if [ "$RANK" = 1 ]; then # in attempt 1, it fails after the last step of rank 0
    [ "$attempt" = 1 ] || exit 0
    until grep -s -q '"step": 10,' "$RUNNER_RUN/metrics.jsonl"; do sleep 0.1; done
    exit 9
fi
sleep 0.3; note imported; sleep 0.3; note train
for step in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.2
    [ "$step" != 1 ] || note first_step
    printf '{"step": %s, "loss": 1, "attempt": %s, "time": %s}\\n' "$step" "$attempt" "$EPOCHREALTIME" \\
        >> "$RUNNER_RUN/metrics.jsonl"
done
[ "$attempt" != 1 ] || sleep 600
note trained; note final
"""
JOB = """\
script = "jobs/loop.sh"
environment = "plain"
launcher = "srun"
[resources]
nodes = 2
tasks_per_node = 1
time = "5"
[restart]
script_failure = 1
in_place = true
"""


def test_the_account_has_every_second_that_slurm_counts(cluster: Runner, slurm: SlurmLab) -> None:
    """Rank 1 fails in the first attempt. All is known: the losses of the fault, the repeated steps, and both nodes."""
    write(cluster.project, {"jobs/loop.sh": LOOP, "jobs/loop.toml": JOB})
    folder, _ = cluster.finished("loop", "--engine", "host")
    done = cluster("account", folder.name, "--json")
    found = json.loads(done.stdout)["runs"][0]
    (job,) = json.loads((folder / "run.json").read_text())["job_ids"]
    shown = slurm.run(("scontrol", "show", "job", job)).stdout
    times = dict(re.findall(r"(StartTime|EndTime)=(\S+)", shown))
    held = (datetime.fromisoformat(times["EndTime"]) - datetime.fromisoformat(times["StartTime"])).total_seconds()
    assert len(found["nodes"]) == 2 and len(found["attempts"]) == 2, found
    for classes in found["nodes"].values():
        seconds = sum(value for name, value in classes.items() if name != "queue")
        assert abs(seconds - held) <= 1 + 0.01 * held  # Slurm's times are whole seconds
    assert [each["rung"] for each in found["attempts"]] == ["in_place", ""]
    classes = found["classes"]
    assert classes.get("unknown", 0.0) <= 0.03 * found["held_seconds"], classes
    assert {"imports", "loading", "useful", "repeated", "restart_gap"} <= classes.keys()
    assert not done.stderr.count("warning")
