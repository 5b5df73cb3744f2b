"""A program that only prints: its steps are in status, plot and why, as if it wrote them itself."""

import subprocess
from pathlib import Path

from tests.end_to_end.conftest import Runner, write

QUICK = {"RUNNER_WATCH_SECONDS": "1"}
HOST = ("--engine", "host", "--env", "plain")
# nanoGPT's lines; the last steps take three times as long
LOOP = """
for n in $(seq 0 79); do
    ms=100; [ "$n" -lt 60 ] || ms=300
    echo "iter $n: loss 2.$((99 - n)), time $ms.00ms, mfu 10.00%"
done
"""


def test_status_plot_and_why_show_what_the_program_prints(local: Runner) -> None:
    local.finished(*HOST, "--", "sh", "-c", LOOP)
    status = local.status("last")
    assert (status["state"], status["step"], status["loss"]) == ("COMPLETED", 79, 2.2)
    assert "79 " in local("status", "last").stdout
    curve = local("plot", "last", "--metric", "step_seconds").stdout
    assert "step_seconds" in curve and "0.3" in curve
    assert "33% of the best speed (0.1 s)" in local("why", "last", code=None).stdout


def test_the_job_file_and_the_command_line_name_the_trainer(local: Runner) -> None:
    """The user's own one lies in jobs/trainers/; the command line wins."""
    write(local.project, {
        "jobs/round.toml": 'command = ["sh", "-c", "echo round 3: cost 2.5"]\ntrainer = "rounds"\n',
        "jobs/trainers/rounds.toml": "[[lines]]\nmatch = 'round [0-9]+: cost'\nstep = 'round '\nloss = 'cost '\n",
    })  # fmt: skip
    folder, _ = local.finished("round", *HOST)
    status = local.status(folder.name)
    assert (status["step"], status["loss"]) == (3, 2.5)
    folder, _ = local.finished("round", *HOST, "--trainer", "none")
    assert local.status(folder.name)["step"] is None
    again = local.finished("round", *HOST, "--trainer", "generic")[0]
    assert local.status(again.name)["step"] is None  # the generic one does not know rounds
    finds_nothing = "runner has found no step of the trainer generic in the log"
    assert finds_nothing in local("status", again.name).stderr
    assert finds_nothing in local("why", again.name, code=None).stdout
    assert finds_nothing not in local("status", folder.name).stderr


def test_a_wrong_trainer_is_refused_before_anything_is_written(local: Runner, tmp_path: Path) -> None:
    done = local("launch", *HOST, "--trainer", "nanogtp", "--", "true", code=1)
    assert "there is no trainer 'nanogtp'" in done.stderr and "did you mean 'nanogpt'?" in done.stderr
    write(local.project, {"jobs/trainers/mine.toml": "[[lines]]\nmatch = 'a'\nstep = '('\n"})
    done = local("launch", *HOST, "--", "true", code=1)
    assert "jobs/trainers/mine.toml:3: step is not a pattern: '('" in done.stderr
    assert local.made() == []


# Bars go to stderr and losses to stdout, as with Hugging Face's Trainer; the checkpoints are beside the script
SBATCH = r"""#!/bin/bash
#SBATCH --job-name=bars --time=5
#SBATCH --output=%x-%j.out --error=%x-%j.err
bar() { printf '\r %s%%|###   | %s/4 [00:01<00:02,  1.10it/s]' $((25 * $1)) "$1" >&2; }
for n in 1 2 3 4; do
    bar $n
    echo "{'loss': 2.$n, 'grad_norm': 1.1, 'learning_rate': 1e-05, 'epoch': 0.$n}"
    bar $n
    sleep 1.5
done
mkdir -p out/checkpoint-4
echo '{"global_step": 4}' >out/checkpoint-4/trainer_state.json
echo "iter 5: loss 2.0, saving checkpoint to nowhere" # not this trainer's line
exit 3  # --output_dir "out"
"""


def test_a_batch_script_with_two_output_files(cluster: Runner) -> None:
    """stderr has the steps, stdout the losses."""
    write(cluster.project, {"train.sbatch": SBATCH})
    words = ("--trainer", "huggingface", "--wait", "train.sbatch")
    folder = cluster.runs / cluster("launch", *words, code=3, extra_environ=QUICK).stdout.strip()
    status = cluster.status(folder.name)
    assert (status["step"], status["total_steps"], status["loss"]) == (4, 4, 2.4)
    functions = f'. "$0"/payload/checkpoints.sh; cd "$0"; program_folder={cluster.project}; newest_complete known'
    found_step = subprocess.run(("bash", "-uc", functions, folder), capture_output=True, text=True, check=True)
    assert found_step.stdout == "4"


def test_a_batch_script_whose_trainer_finds_nothing(cluster: Runner) -> None:
    """`status` says so. Nothing is added to the script's output."""
    write(
        cluster.project, {"loop.sbatch": "#!/bin/bash\n#SBATCH --output=loop.out\necho 'iter 1: loss 2.5, time 12ms'\n"}
    )
    words = ("--trainer", "nanogpt", "--wait", "loop.sbatch")
    folder = cluster.runs / cluster("launch", *words, extra_environ=QUICK).stdout.strip()
    assert (folder / "job.log").read_text() == "iter 1: loss 2.5, time 12ms\n"
    text = "runner has found no step of the trainer nanogpt in the log"
    assert text in cluster("status", folder.name).stderr
