"""What a compute node takes from a foreign program's log when a decision needs it, and what counts as its silence."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.project import Project
from runner.runs import payload, trainer
from runner.runs.job import Restart
from tests.runs.scripts import command_job, run_locally, write_run

HERE = Path(__file__).parent
NO_PROJECT = Project(None, Path("/none"), Path("/none"))
QUICK = {"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "1", "RUNNER_START_SECONDS": "0"}
FUNCTIONS = """RUNNER_RUN=$PWD RUNNER_ATTEMPT=$PWD/attempts/1
. payload/pause.sh; . payload/restart.sh; . payload/trainer.sh; . payload/watch.sh
log_bytes=${LOG_BYTES:-0}
write_line() { printf '%s\\n' "$2" >"$1"; }
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the payload, the patterns of all trainers, and an attempt."""
    for name, text in {**payload.files(), trainer.FILE: trainer.render(None, NO_PROJECT)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "attempts/1").mkdir(parents=True)
    return tmp_path


def on_node(run: Path, text: str, **environ: str) -> str:
    """What the batch script's functions print."""
    done = subprocess.run(
        ("bash", "-uc", FUNCTIONS + text), cwd=run, capture_output=True, text=True, env={**os.environ, **environ}
    )
    assert done.stderr == ""
    return done.stdout


def write_log(run: Path, log: str, name: str = "job.log") -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes((HERE / f"logs/{log}.log").read_bytes())


# --- which trainer it is: those with a save signal

RECOGNIZED = {
    "automodel": "automodel", "axolotl": "axolotl", "axolotl-0.19": "axolotl", "lightning": "lightning",
    "llama-factory": "llama-factory", "llama-factory-board": "llama-factory", "megatron-bridge": "megatron-bridge",
    "megatron-lm": "megatron-lm", "ms-swift": "ms-swift", "nemo-2": "megatron-bridge",
    "trl": "huggingface", "trl-torchrun": "huggingface",
}  # fmt: skip


def recognized(run: Path) -> str:
    path = run / "attempts/1/trainer"
    path.unlink(missing_ok=True)
    on_node(run, "recognize_trainer")
    return path.read_text().strip() if path.exists() else ""


def test_the_log_shows_a_trainer_with_a_save_signal(run: Path) -> None:
    logs = sorted(path.stem for path in (HERE / "logs").glob("*.log"))
    found = {}
    for log in logs:
        write_log(run, log)
        found[log] = recognized(run)
    assert {log: name for log, name in found.items() if name} == RECOGNIZED


def test_other_programs_are_no_trainers(run: Path) -> None:
    for path in (HERE / "others").glob("*.log"):
        (run / "job.log").write_bytes(path.read_bytes())
        assert recognized(run) == "", path


@pytest.mark.parametrize(
    "prefix",
    [
        "0: ",
        "[default0]:",
        "\x1b[36m(Worker pid=7)\x1b[0m ",
        "(train, pid=7) ",
        "(head, rank=0, pid=7) ",
        "50%|###   | 1/2 [00:01<00:01]\r",
    ],
)
def test_what_launchers_and_bars_put_before_a_line_does_not_hide_it(run: Path, prefix: str) -> None:
    (run / "job.log").write_text(f"{prefix}{{'loss': 2.5, 'grad_norm': 1.0}}\n")
    assert recognized(run) == "huggingface"


def test_the_last_rank_may_be_the_one_that_prints(run: Path) -> None:
    for rank in (2, 10):
        (run / f"attempts/1/rank-{rank}.log").write_text("")
    assert recognized(run) == ""
    write_log(run, "megatron-lm", "attempts/1/rank-10.log")
    assert recognized(run) == "megatron-lm"


def test_one_process_of_torchrun_prints_to_the_main_log(run: Path) -> None:
    """Its own file has the same text, and does not count twice."""
    own = run / "attempts/1/node-0/x/attempt_0/0/stdout.log"
    own.parent.mkdir(parents=True)
    own.touch()
    assert on_node(run, "program_logs attempts/1", LOG_BYTES="7") == "7 job.log\n"
    (own.parents[1] / "1").mkdir()
    (own.parents[1] / "1/stdout.log").touch()
    assert on_node(run, "program_logs attempts/1") == "0 job.log\n0 attempts/1/node-0/x/attempt_0/1/stdout.log\n"


def test_an_earlier_attempt_does_not_tell(run: Path) -> None:
    write_log(run, "megatron-lm")
    (run / "job.log").open("a").write("{'loss': 2.5}\n")
    size = (run / "job.log").stat().st_size
    on_node(run, "recognize_trainer", LOG_BYTES=str(size - 14))
    assert (run / "attempts/1/trainer").read_text() == "huggingface\n"


def test_a_program_of_runner_gets_no_signal_of_a_trainer(run: Path) -> None:
    """It writes metrics.jsonl, and prints what Hugging Face's Trainer prints."""
    write_log(run, "trl")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert recognized(run) == ""


# --- the checkpoints that it has printed


def saved(run: Path, **environ: str) -> str:
    on_node(run, "note_saved attempts/1", **environ)
    path = run / "attempts/1/saved"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("megatron-lm", "20 /scratch/gpt/checkpoints\n"),
        ("megatron-bridge", "2 /opt/run/checkpoints\n"),
        ("nanochat", "1 /root/.cache/nanochat/base_checkpoints/d20/model_000001.pt\n"),
        ("nanogpt", "250 out-shakespeare-char\n"),
        ("verl", "1 checkpoints/gsm8k/ppo/global_step_2\n"),
        ("trl", ""),
    ],
)
def test_the_printed_checkpoints(run: Path, log: str, expected: str) -> None:
    """With their step, or the last step before."""
    write_log(run, log)
    assert saved(run) == expected
    assert not (run / "attempts/1/.saved.partial").exists()


def test_only_what_this_attempt_has_printed(run: Path) -> None:
    write_log(run, "megatron-lm")
    size = (run / "job.log").stat().st_size
    assert saved(run, LOG_BYTES=str(size)) == ""


def test_the_checkpoints_that_a_killed_attempt_printed_count(tmp_path: Path) -> None:
    """Its batch script was killed before it could write them down: the next attempt does."""
    run = write_run(tmp_path / "run", command_job("true", restart=Restart(node_failure=9)))
    (run / trainer.FILE).write_text(trainer.render(None, NO_PROJECT))
    (run / "attempts/1").mkdir(parents=True)
    (run / "attempts/1/started").write_text("job 7\n")
    (run / "job.log").write_text("  successfully saved checkpoint from iteration      20 to /out\n")
    assert run_locally(run, argv=("again",)).returncode == 0
    assert (run / "attempts/1/saved").read_text() == "20 /out\n"


@pytest.mark.parametrize(
    "end", ["$(x)", "^^", "a$b", "()", "*", "x**", "[[:alpha:]", "[a-", "[z-a]", "\\", "/", '"', "%"]
)
def test_a_pattern_of_the_user_works_on_this_machine_or_is_refused(run: Path, end: str) -> None:
    """Some programs stop at patterns that others accept, and then no checkpoint would be found for any trainer."""
    (run / "jobs/trainers").mkdir(parents=True)
    (run / "jobs/trainers/mine.toml").write_text(
        f"save_signal = 'TERM'\ndetect = '''step 1|{end}'''\n[[lines]]\nmatch = '''step [0-9]+|{end}'''\n"
        "step = 'step '\nsaved = 'saved '\n"
    )
    with suppress(RunnerError):
        (run / trainer.FILE).write_text(trainer.render("mine", Project(run, run, run)))
        (run / "job.log").write_text("step 1 saved /out\n")
        assert (saved(run), recognized(run)) == ("1 /out\n", "mine")


HOSTILE = r"""
save_signal = "TERM"
[[lines]]
match = 'step [0-9]+|`touch pwned`|"; touch pwned; "|[$](touch pwned)|%s|/'
step = 'step '
loss = 'loss '
saved = 'saved '
[checkpoints]
name = '$(touch pwned)`touch pwned`[0-9]*/'
needs = ['$(touch pwned)|`touch pwned`|x', 'a[$(touch pwned)]|x']
tracker = '$(touch pwned)'
arguments = ['--out']
"""
HOSTILE_PROGRAM = r"""
echo "step 1 loss 2"; echo 'step 1 saved $(touch pwned)`touch pwned`7'
checkpoint='../checkpoints/$(touch pwned)`touch pwned`5'; mkdir -p "$checkpoint"; echo >"$checkpoint/x"; exit 3
"""


def test_nothing_of_a_trainer_is_ever_executed(tmp_path: Path) -> None:
    """A pattern, a name and a path are text, whatever characters they have."""
    (tmp_path / "jobs/trainers").mkdir(parents=True)
    (tmp_path / "jobs/trainers/mine.toml").write_text(HOSTILE)
    project = Project(tmp_path, tmp_path, tmp_path)
    job = command_job("sh", "-c", HOSTILE_PROGRAM, restart=Restart(script_failure=1))
    run = write_run(tmp_path / "run", job)
    (run / trainer.FILE).write_text(trainer.render(None, project, ["--out=$(touch pwned)`touch pwned`"]))
    with (run / "job.log").open("ab") as log:
        done = run_locally(run, extra_environ=QUICK, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    assert done.returncode == 3
    assert (run / "attempts/2/saved").read_text() == "1 $(touch\n"
    on_node(run, "recognize_trainer")
    assert (run / "attempts/1/trainer").read_text() == "mine\n"
    assert not list(tmp_path.rglob("pwned*"))


# --- its last step


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("trl", "12 12 10"),
        ("trl-torchrun", "12 12 8"),  # with a bar about the shards of the model at its end
        ("llama-factory", "20 20 19"),
        ("axolotl-0.19", "8 8 6"),
        ("megatron-lm", "30 500000 20"),
        ("megatron-bridge", "2 100 1"),
        ("verl", "2 435 1"),
        ("nanochat", "1 21400 0"),
        ("lightning", ""),  # the bar is that of an epoch, of an unknown number of epochs
        ("nemo-2", ""),
        ("torchtitan-0.3", ""),  # without the last step
        ("nanogpt", ""),
    ],
)
def test_the_end_of_a_log_shows_the_last_step(run: Path, log: str, expected: str) -> None:
    write_log(run, log)
    assert on_node(run, "last_count").strip() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Epoch 2/3\n200/200 [====] - loss: 2\n", "2 3 1"),
        ("Epoch 3/3\n200/200 [====] - loss: 2\n", "200 200 0"),
        ("Epoch [3/3], Step [199/200]\nEpoch [3/3], Step [200/200]\n", "200 200 199"),
        ("Epoch: [2][200/200] Loss 2\n", ""),
        ("40/400 [00:01<00:09]\r 8/8 [00:01<00:00]\n", "40 400 0"),  # an evaluation
        ("40/400 [00:01<00:09]\nWriting model shards: 100%|##| 500/500 [00:01<00:00]\n", "40 400 0"),
        (
            "40/100 [00:01\r50/100 [00:02\r 1/500 [00:01\r 500/500 [00:09\n",
            "50 100 40",
        ),  # the evaluation has more steps
        ("199/200 [00:01\r200/200 [00:02\r 6/8 [00:01\r 7/8 [00:01\n", "200 200 199"),  # parts of a step, from 0
        ("2026/11/27 saved to /out/400/400, 12/s\n", ""),
        ("[11/28 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 24  total_loss: 2.31\n", ""),
        ("no count", ""),
    ],
)
def test_which_count_is_that_of_the_training(run: Path, text: str, expected: str) -> None:
    (run / "job.log").write_text(text)
    assert on_node(run, "last_count").strip() == expected


@pytest.mark.parametrize(
    ("log", "end", "early"),
    [
        ("trl", b" 6/12 [", True),
        ("trl", b"", False),
        ("llama-factory", b" 15/20 [", True),
        ("llama-factory", b"", False),
        ("megatron-lm", b"", True),
        ("lightning", b" 10/10 [", True),  # the end of an epoch
        ("torchtitan-0.3", b"step:  3 ", True),
    ],
)
def test_a_trainer_that_got_its_signal_is_done_only_at_its_last_step(
    run: Path, log: str, end: bytes, early: bool
) -> None:
    """The log ends with this text, as if the trainer had saved and left there."""
    text = (HERE / f"logs/{log}.log").read_bytes()
    assert end in text
    (run / "job.log").write_bytes(text[: text.index(end) + len(end)] if end else text)
    for name in ("save-and-exit", "save-signal-0"):
        (run / "attempts/1" / name).touch()
    assert on_node(run, "stopped_early && echo early || echo finished") == ("early\n" if early else "finished\n")


# --- how the logs grow

TURNS = """
. payload/log_times.sh
first_step() { :; }
turn=0
pause() {
    echo "$1"
    turn=$((turn + 1))
    ((turn < TURNS)) || exit
    for path in $FILES; do echo line >>"$path"; done
}
log_times
"""


def read_times(run: Path) -> list[tuple[int, str]]:
    """(bytes, file) of each line of log-times."""
    lines = (run / "attempts/1/log-times").read_text().splitlines()
    return [(int(size), name) for _, size, name in (line.split(" ", 2) for line in lines)]


def test_the_growth_of_each_log_is_recorded(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also if it is a link to the output of the user's own batch script, and only when it has grown."""
    output = tmp_path_factory.mktemp("out") / "slurm-7.out"
    output.write_text("before\n")
    (run / "job.log").symlink_to(output)
    (run / "job.err").touch()
    assert on_node(run, TURNS, TURNS="4", FILES="job.log").split() == ["1"] * 4
    assert read_times(run) == [(7, "job.log"), (12, "job.log"), (17, "job.log"), (22, "job.log")]
    (run / "attempts/1/log-times").unlink()
    assert on_node(run, TURNS, TURNS="2", FILES="job.err attempts/1/rank-1.log").split() == ["1"] * 2
    assert read_times(run) == [(22, "job.log"), (5, "job.err"), (5, "attempts/1/rank-1.log")]


def test_the_record_of_a_long_run_stays_small(run: Path) -> None:
    """The pause grows by a second with each 1000 lines."""
    files = " ".join(f"attempts/1/rank-{rank}.log" for rank in range(60))
    pauses = on_node(run, TURNS, TURNS="52", FILES=files).split()
    assert pauses == ["1"] * 34 + ["2"] * 16 + ["3"] * 2
    assert len(read_times(run)) == 51 * 60


# --- silence

CLOCK = """
clock=0 RUNNER_WATCH_SECONDS=5 RUNNER_START_SECONDS=$START
moment() { printf '%s' "$clock"; }
pause() {
    clock=$((clock + 5))
    ((clock < 2000)) || exit
    case " $GROWS " in *" $clock "*) echo line >>"$FILE" ;; esac
}
hung() { echo "$clock"; }
lost_signs() { :; }
watch_over $$ 100
"""


def times(*spans: range) -> str:
    return " ".join(str(second) for span in spans for second in span)


@pytest.mark.parametrize(
    ("file", "grows", "found"),
    [
        ("job.log", "", 405),  # nothing is a hang in the first 400 s
        ("job.log", "10", 405),
        ("job.log", times(range(50, 1001, 50)), 1155),  # regular output every 50 s: 150 s, not 100
        ("job.log", times(range(10, 1001, 10)), 1105),
        ("job.log", times(range(250, 1001, 10)), 1740),  # it was once silent for 250 s
        ("job.log", times(range(5, 2000, 5)), None),
        ("job.err", times(range(10, 1001, 10)), 1105),  # of the user's own batch script
        ("attempts/1/log-times", times(range(10, 1001, 10)), 1105),  # any other log has grown
        ("metrics.jsonl", "10 60", 165),  # a program of runner: 100 s, at the start too
        ("metrics.jsonl", "10 100 190", 295),
        ("attempts/1/heartbeat", "", 405),
    ],
)
def test_when_silence_is_a_hang(run: Path, file: str, grows: str, found: int | None) -> None:
    """hang_seconds is 100, and the start takes up to 400 s. The clock is that of the test."""
    (run / "job.log").touch()
    shown = on_node(run, CLOCK, GROWS=grows, FILE=str(run / file), START="400")
    assert shown == (f"{found}\n" if found else "")
    if not grows:
        assert on_node(run, CLOCK, GROWS="", FILE="none", START="9") == "305\n"


def test_a_hang_is_found(tmp_path: Path) -> None:
    """From the log alone."""
    run = write_run(tmp_path, command_job("sh", "-c", "echo step 1 loss 2; exec sleep 600", hang_seconds=2))
    with (run / "job.log").open("ab") as log:
        run_locally(run, extra_environ=QUICK, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    assert (run / "attempts/1/cause").read_text() == "hang\n"
    times = (run / "attempts/1/times").read_text().split()
    assert "stalled" in times and not (run / "metrics.jsonl").exists()
