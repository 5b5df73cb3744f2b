"""The batch script is plain, short, the same for the same job, and knows nothing of the run that it will be."""

import marshal
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest

from runner.environments.engines import attach
from runner.environments.environment import Attachment, Environment, load_environment
from runner.errors import RunnerError
from runner.project import find_project
from runner.runs import payload
from runner.runs.image import LaunchImage, run_environment
from runner.runs.job import LAUNCHERS, Job, Resources, Restart
from runner.runs.resolve import resolve
from runner.runs.schedulers import flags
from runner.site_files import load_site
from tests.runs.scripts import BARE, LOCAL, SLURM, command_job, given, script, write_run

# site, engine, environment: those that the golden files show
PLACES = {
    "local": ("local", "host", "bare"),
    "local-sandbox": ("local", "sandbox", "cpu"),
    "generic-slurm-sandbox": ("generic-slurm", "sandbox", "cpu"),
    "alps-clariden": ("alps-clariden", "ce", "ngc-ds-alps"),
    "generic-pyxis": ("generic-pyxis", "pyxis", "ngc-ds"),
    "aws-parallelcluster": ("aws-parallelcluster", "pyxis", "ngc-ds-efa"),
    "gcp-a3-high": ("gcp-a3-high", "pyxis", "ngc-ds"),
    "gcp-a3-mega": ("gcp-a3-mega", "pyxis", "ngc-ds"),
    "twcc": ("twcc", "host", "bare"),
}
# each place once, and each launcher once: what a launcher does differs from place to place only by the step's words
SHOWN = [
    *((place, "torchrun") for place in PLACES),
    *(("generic-pyxis", launcher) for launcher in LAUNCHERS if launcher != "torchrun"),
]
ENVIRON = {"HOME": "/home/me", "SCRATCH": "/scratch/me", "RUNNER_IMAGES": "/images"}


def rendered(place: str, launcher: str, **settings: object) -> str:
    """The script of a typical job, with everything that a job can have."""
    site_name, engine, name = PLACES[place]
    site = load_site(site_name, ENVIRON)
    local = site.scheduler == "local"
    environment = BARE
    if name != "bare":
        environment = load_environment(name, find_project(Path(__file__).parents[2]), ENVIRON)
        image = f"/images/{name}-0123456789ab.sqsh"
        environment = run_environment(environment, LaunchImage(image))
    layer = given(
        script=None if launcher == "none" else "jobs/sft.py",
        command=("python", "-c", "print('it''s 1')") if launcher == "none" else (),
        arguments=("--model", "tiny", "--note", 'it\'s "$HOME"'),
        launcher=launcher,
        nodes=1 if local else 2,
        tasks_per_node=2,
        gpus_per_node=0 if local else None,
        cpus_per_task=1 if local else None,
        time_minutes="00:30:00",
        account="a-g1",
        env={"HF_HUB_OFFLINE": "1", "NOTE": "two\nlines"},
        sbatch=() if local else ("--constraint=gpu&nvme",),
        srun=() if local else ("--network=disable_rdzv_get",),
        **settings,
    )
    job = resolve((layer,), environment, site)
    if launcher == "torchrun":
        job = replace(job, restart=Restart(time_limit=20, node_failure=3), preflight=not local,
                      setup="pip list\necho 'set up'\n", task_prolog="ulimit -c 0",
                      mail_user="me@example.org", mail_events=("END", "FAIL"))  # fmt: skip
    return script(job, attach(environment, site, engine, ENVIRON), site)


@pytest.mark.parametrize(("place", "launcher"), SHOWN)
def test_golden(place: str, launcher: str, golden: Callable[[str, str], None]) -> None:
    """What each site and launcher gets, to be read whole."""
    golden(f"scripts/{place}-{launcher}.sbatch", rendered(place, launcher))


def test_golden_with_spare_nodes(golden: Callable[[str, str], None]) -> None:
    """The job asks for more nodes than the step, and each attempt chooses its nodes."""
    spares = rendered("generic-pyxis", "torchrun", spare_nodes=1, min_nodes=1, restart=("node_failure=3",))
    golden("scripts/generic-pyxis-spares.sbatch", spares)


def test_the_compiled_template_is_kept_as_byte_code_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python keeps that of modules; what is damaged or of another template does not count."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = rendered("local", "srun")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert rendered("local", "srun") == text
    (kept,) = tmp_path.rglob("*.pyc")
    whole = kept.read_bytes()
    for damaged in (b"", b"?", whole[:-1000], marshal.dumps(("other", None)), marshal.dumps(1)):
        kept.write_bytes(damaged)
        assert rendered("local", "srun") == text
        assert kept.read_bytes() == whole
    with monkeypatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", None)
        assert rendered("local", "srun") == text
    monkeypatch.setattr(sys, "pycache_prefix", "/dev/null")
    assert rendered("local", "srun") == text


@pytest.mark.parametrize(
    "way", ["a file of another user", "writable for the group", "writable for all", "a named pipe"]
)
def test_a_compiled_template_that_others_can_write_is_neither_executed_nor_replaced(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared installation whose folders the members of a group may write."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = rendered("local", "srun")
    (kept,) = tmp_path.rglob("*.pyc")
    made_of, _ = marshal.loads(kept.read_bytes())
    hostile = compile("raise SystemExit('executed')", "template", "exec")
    kept.write_bytes(marshal.dumps((made_of, hostile)))
    with pytest.raises(SystemExit):  # the file of the user who runs it is trusted
        rendered("local", "srun")
    if way == "a named pipe":
        kept.unlink()
        os.mkfifo(kept)
    elif way == "a file of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(kept, 12345, 12345)
    else:
        kept.chmod(0o664 if way.endswith("group") else 0o646)
    before = kept.lstat()
    assert rendered("local", "srun") == text
    assert kept.lstat().st_ino == before.st_ino


@pytest.mark.uses("shellcheck")
@pytest.mark.parametrize("place", PLACES)
def test_clean_for_bash_and_shellcheck(place: str, tmp_path: Path) -> None:
    """bash reads it, shellcheck has nothing to say, and it stays below 150 lines."""
    for launcher in LAUNCHERS:
        text = rendered(place, launcher)
        assert len(text.splitlines()) < 150
        path = tmp_path / f"{launcher}.sbatch"
        path.write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    for path in paths:
        subprocess.run(("bash", "-n", path), check=True)
    # SC2016: a user's `$` in single quotes is meant as text. SC1091: the payload is checked by itself.
    done = subprocess.run(("shellcheck", "--exclude=SC2016,SC1091", *paths), capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.uses("shellcheck")
def test_payload_is_clean(tmp_path: Path) -> None:
    """The payload too: task.sh and signals.sh as plain POSIX sh, the rest as bash."""
    for name, text in payload.files().items():
        path = tmp_path / Path(name).name
        path.write_text(text)
        if path.suffix != ".sh":
            continue
        done = subprocess.run(("shellcheck", str(path)), capture_output=True, text=True)
        assert done.stdout == "", name
    for name in ("task.sh", "signals.sh"):
        for shell in (("dash", "-n"), ("bash", "--posix", "-n"), ("busybox", "sh", "-n")):
            subprocess.run((*shell, str(tmp_path / name)), check=True)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_one_run(place: str) -> None:
    """No time, no random number, no path of this machine: the same job gives the same bytes."""
    text = rendered(place, "torchrun")
    assert text == rendered(place, "torchrun")
    assert str(Path.cwd()) not in text
    assert not re.search(r"sft-\d|20\d\d-\d\d|\d\d:\d\d:\d\d", text.replace("--time=00:30:00", ""))


def test_the_cache_of_the_hub_is_where_the_node_has_the_shared_cache() -> None:
    """Not where the launch has it: RUNNER_RUN has no symlinks, and a container sees RUNNER_CACHE at its own path."""
    site = load_site("local", ENVIRON)
    job = resolve((given(command=("true",)),), BARE, site)
    line = '        inside HF_HOME "$RUNNER_CACHE/huggingface"'
    for in_cache in (False, True):
        text = script(replace(job, hub_in_cache=in_cache), attach(BARE, site, "host", ENVIRON), site)
        assert (line in text) == in_cache


def test_cpus_are_said_to_srun_again() -> None:
    """Between Slurm 22.05 and 23.11 srun did not take --cpus-per-task from sbatch."""
    text = script(command_job("true", nodes=2), site=SLURM)
    assert "#SBATCH --cpus-per-task=1" in text
    assert '"--cpus-per-task=${SLURM_CPUS_PER_TASK}"' in text
    assert "--kill-on-bad-exit=1" in text
    assert "--export=ALL" in text


def test_a_launchers_task_has_the_cpus_of_its_processes() -> None:
    """Four processes of 72 CPUs are one task of 288 under torchrun, four tasks of 72 under srun."""
    resources = Resources(gpus_per_node=4, tasks_per_node=4, cpus_per_task=72)
    job = Job("x", BARE, script="x.py", launcher="torchrun", resources=resources)
    assert "#SBATCH --cpus-per-task=288\n" in script(job, site=SLURM)
    assert "#SBATCH --cpus-per-task=72\n" in script(replace(job, launcher="srun"), site=SLURM)


@pytest.mark.parametrize(
    ("request_by", "expected"),
    [("gpus-per-node", "#SBATCH --gpus-per-node=4\n"), ("gres", "#SBATCH --gres=gpu:4\n"), ("none", "")],
)
def test_gpus_are_asked_for_in_the_sites_words(request_by: str, expected: str) -> None:
    """Never --gpus-per-task, which hides the peers from NCCL."""
    job = Job("x", BARE, command=("true",), resources=Resources(gpus_per_node=4))
    text = script(job, site=replace(SLURM, gpu_request=request_by))
    assert expected in text
    assert "gpus-per-task" not in text
    assert ("gpu" in text.split("set -u")[0]) == bool(expected)


def test_engine_words_stand_where_the_attachment_puts_them() -> None:
    """Flags on srun, the prefix before the task, exports before both; only `${NAME}` is live in them."""
    attachment = Attachment(
        flags=("--environment=${RUNNER_RUN}/environment.toml", "--x=$(id)"),
        prefix=("env", "A=$${HOME}"),
        exports={"B": "${SCRATCH}/`id`"},
    )
    text = script(command_job("true"), attachment, SLURM)
    assert '"--environment=${RUNNER_RUN}/environment.toml"' in text
    assert "'--x=$(id)'" in text
    assert "env 'A=${HOME}'" in text
    assert 'export B="${SCRATCH}/\\`id\\`"\n' in text
    assert text.index("export B=") < text.index("srun --nodes") < text.index("--environment") < text.index("A=${HOME}")


def test_the_users_flag_wins_over_the_sites_and_ours() -> None:
    """One word of each option stands in the script."""
    job = replace(command_job("true"), sbatch=("--time=5", "-pdebug", "--gres=gpu:h100:4", "--mem-per-cpu=2G"),
                  srun=("--kill-on-bad-exit=0",))  # fmt: skip
    job = replace(job, resources=replace(job.resources, time_minutes=30, gpus_per_node=4, memory="450G"))
    text = script(job, site=replace(SLURM, sbatch=("--partition=normal", "--exclusive")))
    head = text.split("set -u")[0]
    assert [line for line in head.splitlines() if "time" in line] == ["#SBATCH --time=5"]
    assert "normal" not in head
    assert "#SBATCH -pdebug" in head
    assert "#SBATCH --exclusive" in head
    assert "gpus-per-node" not in head
    assert "--mem=" not in head
    assert "--kill-on-bad-exit=0" in text
    assert "--kill-on-bad-exit=1" not in text


@pytest.mark.parametrize(("program", "name"), [(p, n) for p, names in flags.REFUSED.items() for n in names])
def test_flags_that_would_break_the_run_are_refused(program: str, name: str) -> None:
    """With the reason, and what to do instead; in the long and in the short form."""
    words = [f"--{name}=1"]
    words += [f"-{short}1" for short, long in flags.SHORT[program].items() if long == name]
    for word in words:
        job = replace(command_job("true"), **{program: (word,)})
        with pytest.raises(RunnerError) as caught:
            script(job, site=SLURM)
        assert word in caught.value.what
        assert caught.value.why
        assert caught.value.fix


@pytest.mark.parametrize(
    "word",
    ["constraint=gpu", "--time 5", "-p debug", "", "--", "-", "x", "--time=5\n#SBATCH --nodes=9", "--comment=$A"],
)
def test_what_is_no_flag_is_refused(word: str) -> None:
    """One word, one flag; never a second line of directives, never a variable that nobody expands."""
    with pytest.raises(RunnerError):
        script(replace(command_job("true"), sbatch=(word,)), site=SLURM)


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_ranks_are_counted_node_by_node(program: str) -> None:
    """Another order of tasks over nodes is refused, one within a node is not; PATH is never dropped."""
    for word in ("--distribution=cyclic", "-mplane=2", "--export=A,B", "--export=NONE"):
        with pytest.raises(RunnerError):
            script(replace(command_job("true"), **{program: (word,)}), site=SLURM)
    for word in ("--distribution=block:cyclic", "--export=ALL,A=b"):
        assert word in script(replace(command_job("true"), **{program: (word,)}), site=SLURM)


def test_container_flags_belong_to_the_environment() -> None:
    """What the engine has set cannot be given a second time; what it has not set can."""
    attachment = Attachment(flags=("--container-image=/x.sqsh",))
    with pytest.raises(RunnerError, match="container-image"):
        script(replace(command_job("true"), srun=("--container-image=/y.sqsh",)), attachment, SLURM)
    assert "--container-name=x" in script(replace(command_job("true"), srun=("--container-name=x",)), attachment, SLURM)


@pytest.mark.parametrize("name", ["entrypoint", "mount-home", "remap-root", "readonly", "writable"])
@pytest.mark.parametrize("no", ["no-", ""])
def test_the_contrary_of_what_the_environment_gives_pyxis_is_refused(name: str, no: str) -> None:
    """srun would take the job from the queue and end: "both --container-remap-root and --no-container-remap-root"."""
    flags = ("--container-image=/x.sqsh", "--container-readonly", "--no-container-entrypoint",
             "--no-container-mount-home", "--no-container-remap-root")  # fmt: skip
    with pytest.raises(RunnerError, match=f"{no}container-{name}"):
        script(replace(command_job("true"), srun=(f"--{no}container-{name}",)), Attachment(flags=flags), SLURM)
    if name != "readonly":
        assert f"--container-{name}" in script(replace(command_job("true"), srun=(f"--container-{name}",)), site=SLURM)


@pytest.mark.parametrize(
    "word", ["--container-remap", "--no-container-re=x", "--container-mount-h", "--container-mounts=/a:/a"]
)
def test_the_beginning_of_an_option_of_pyxis_is_that_option(word: str) -> None:
    """srun accepts it, and would end with 255 when the job has waited in the queue."""
    flags = ("--container-mounts=/x:/x", "--no-container-mount-home", "--no-container-remap-root")
    job = replace(command_job("true"), srun=(word,))
    if "re=x" in word:  # readonly or remap-root: srun refuses it too
        assert word in script(job, Attachment(flags=flags), SLURM)
        return
    with pytest.raises(RunnerError, match="cannot pass"):
        script(job, Attachment(flags=flags), SLURM)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("--container-image=/x.sqsh", "set it in the EDF"),
        ("--container-name=x", "use --srun=--container-name=x"),
        ("--no-container-mount-home", 'set mounts = ["${HOME}:${HOME}"] in the EDF'),
        ("--container-remap-root", "leave out the flag: processes run with your user ID"),
        ("--environment=x", "use --env NAME, or --env FILE for an EDF elsewhere"),
    ],
)
def test_the_batch_script_stays_outside_of_containers(word: str, advice: str) -> None:
    """The advice is one that works."""
    with pytest.raises(RunnerError) as caught:
        script(replace(command_job("true"), sbatch=(word,)), site=SLURM)
    assert caught.value.fix == advice


def test_a_working_directory_of_the_container_that_would_count_for_nothing_is_refused() -> None:
    with pytest.raises(RunnerError, match="container-workdir"):
        script(replace(command_job("true"), srun=("--container-workdir=/",)), site=SLURM)


def test_the_signal_is_left_out_when_nobody_wants_it() -> None:
    """save_seconds = 0."""
    assert "#SBATCH --signal=B:USR2@120\n" in script(command_job("true"), site=SLURM)
    assert "--signal" not in script(command_job("true", save_seconds=0), site=SLURM)


def test_a_users_shell_text_cannot_leave_its_document() -> None:
    """The end mark of a here-document is one that the text does not have."""
    text = script(command_job("true", setup="echo\nEND\nrm -rf x\nEND_\n"))
    assert "<<'END__'\necho\nEND\nrm -rf x\nEND_\nEND__\n" in text
    with pytest.raises(RunnerError, match="carriage return"):
        script(command_job("true", setup="echo\r\n"))


def test_more_words_than_fit_are_refused() -> None:
    """Before sbatch or the kernel would, with a way out. The limit counts bytes, not characters."""
    for text in ("x" * 100_000, "é" * 50_000):
        with pytest.raises(RunnerError, match=r"the command is too long: 11\d{5} bytes"):
            script(command_job("cat", *[text] * 11))


def test_workdir_of_the_edf_is_kept() -> None:
    """Tasks go to the code snapshot, unless the EDF says where to be."""
    assert "inside RUNNER_WORKDIR ''\n" in script(command_job("true"))
    job = replace(command_job("true"), environment=Environment("x", None, "", workdir="/workspace"))
    assert "inside RUNNER_WORKDIR yes\n" in script(job)


def test_submission_needs_the_folder_alone(tmp_path: Path) -> None:
    """Started elsewhere the script says what to do, and writes nothing."""
    run = write_run(tmp_path / "run", command_job("true"), site=LOCAL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(("bash", str(run / "job.sbatch")), cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cd RUN && bash job.sbatch" in done.stderr
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_cpus_per_gpu_takes_the_place_of_cpus_per_task(program: str) -> None:
    """sbatch and srun refuse the two together."""
    text = script(replace(command_job("true"), **{program: ("--cpus-per-gpu=4",)}), site=SLURM)
    step = text[text.index("srun --nodes") :]
    assert "--cpus-per-gpu=4" in text and "--cpus-per-task" not in step
    assert ("--cpus-per-task" in text) == (program == "srun")


def test_run_in_a_word_is_the_run_folder() -> None:
    text = script(command_job("python", "--out={run}/my out", "{run}"), site=SLURM)
    assert """--out="$RUNNER_RUN"'/my out' "$RUNNER_RUN\"""" in text
