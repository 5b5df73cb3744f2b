"""On a real Slurm: what several ranks print, in the order of time, from attempt to attempt."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

TURNS = """\
i=0
while [ $i -lt 2 ]; do
    sleep $((RANK == 0 ? 1 : 3)).2  # rank 1 speaks two seconds after rank 0, each time
    echo "turn $i of rank $RANK"
    [ "$RANK" = 1 ] || sleep 2
    i=$((i + 1))
done
[ "$RANK" = 1 ] && [ ! -e "$RUNNER_RUN/again" ] && touch "$RUNNER_RUN/again" && sleep 60
exit 0
"""


@pytest.fixture
def boxed(project: Path, busybox_sqsh: Path) -> None:
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/turns.sh": TURNS})


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_ranks_are_merged_by_time_and_a_requeue_is_followed(cluster: Runner, boxed: None, slurm: SlurmLab) -> None:
    """Rank 0 writes to job.log, rank 1 to a file of its own; they speak in turn, in both attempts."""
    words = ("--env", "box", "--launcher", "srun", "--tasks-per-node", "2", "--script", "turns")
    folder = cluster.launch(*words)
    following = cluster.start("logs", "-f", folder.name)
    until((folder / "again").exists, "the first attempt's end")
    slurm.run(("scontrol", "requeue", cluster.status("last")["job_id"]))
    live, _ = following.communicate(timeout=600)
    after = cluster("logs", folder.name).stdout
    turns = [f"{'1| ' * rank}turn {turn} of rank {rank}" for turn in (0, 1) for rank in (0, 1)]
    for text in (live, after):
        assert re.findall(r"^(?:1\| )?turn .*", text, re.MULTILINE) == turns * 2
        assert text.index("attempt 1 on") < text.index("turn") < text.index("attempt 2 on") < text.rindex("turn")
    alone = cluster("logs", folder.name, "--rank", "1").stdout
    assert alone.splitlines()[:3] == ["--- attempt 1 ---", "turn 0 of rank 1", "turn 1 of rank 1"]
    assert "--- attempt 2 ---\nturn 0 of rank 1" in alone
