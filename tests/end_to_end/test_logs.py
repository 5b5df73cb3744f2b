"""On a real Slurm: what several ranks print, in the order of time, from attempt to attempt."""

import itertools
import re
import threading
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

TURNS = """\
for turn in 0 1; do
    until [ -e "$RUNNER_RUN/turn-${RUNNER_ATTEMPT##*/}-$turn-$RANK" ]; do sleep 0.1; done
    echo "turn $turn of rank $RANK"
done
[ "$RANK" = 1 ] && [ ! -e "$RUNNER_RUN/again" ] && touch "$RUNNER_RUN/again" && sleep 1000
exit 0
"""


@pytest.fixture
def boxed(project: Path, busybox_sqsh: Path) -> None:
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/turns.sh": TURNS})


def is_recorded(folder: Path, attempt: int, path: str) -> bool:
    """Whether the size that the file has now is in log-times."""
    times = folder / f"attempts/{attempt}/log-times"
    return times.exists() and f" {(folder / path).stat().st_size} {path}\n" in times.read_text()


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_ranks_are_merged_by_time_and_a_requeue_is_followed(cluster: Runner, boxed: None, slurm: SlurmLab) -> None:
    """Rank 0 writes to job.log, rank 1 to a file of its own; they speak in turn, in both attempts.

    Each speaks once the line before was shown and is in log-times, so the speed of the machine does not matter.
    """
    words = ("--env", "box", "--launcher", "srun", "--tasks-per-node", "2", "--script", "turns")
    folder = cluster.launch(*words)
    following, shown = cluster.start("logs", "-f", folder.name), list[str]()
    reader = threading.Thread(target=lambda: shown.extend(following.stdout or ()))
    reader.start()
    for lines, (attempt, turn, rank) in enumerate(itertools.product((1, 2), (0, 1), (0, 1)), 1):
        (folder / f"turn-{attempt}-{turn}-{rank}").touch()
        until(lambda lines=lines: sum("turn " in line for line in shown) == lines)  # type: ignore[misc]
        path = f"attempts/{attempt}/rank-1.log" if rank else "job.log"
        if lines < 8:  # the run ends after the last line
            until(lambda attempt=attempt, path=path: is_recorded(folder, attempt, path))  # type: ignore[misc]
        if (attempt, turn, rank) == (1, 1, 1):
            until((folder / "again").exists, "the first attempt's end")
            slurm.run(("scontrol", "requeue", cluster.status("last")["job_id"]))
    assert following.wait(timeout=600) == 0
    reader.join()
    live = "".join(shown)
    after = cluster("logs", folder.name).stdout
    turns = [f"{'1| ' * rank}turn {turn} of rank {rank}" for turn in (0, 1) for rank in (0, 1)]
    for text in (live, after):
        assert re.findall(r"^(?:1\| )?turn .*", text, re.MULTILINE) == turns * 2
        assert text.index("attempt 1 on") < text.index("turn") < text.index("attempt 2 on") < text.rindex("turn")
    alone = cluster("logs", folder.name, "--rank", "1").stdout
    assert alone.splitlines()[:3] == ["--- attempt 1 ---", "turn 0 of rank 1", "turn 1 of rank 1"]
    assert "--- attempt 2 ---\nturn 0 of rank 1" in alone
