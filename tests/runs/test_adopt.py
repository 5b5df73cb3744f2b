"""What someone has already becomes an EDF and a job file; what cannot be carried over is noted, nothing is dropped."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.bash import commands
from runner.environments.emit import emitted
from runner.environments.environment import Environment, Mount
from runner.environments.rewriting import rewrite
from runner.errors import RunnerError
from runner.expansion import expand
from runner.runs.adopt.adopted import Adopted
from runner.runs.adopt.job import Draft
from runner.runs.adopt.options import CONTAINER, SBATCH, SRUN
from runner.runs.adopt.script import read_command_line, read_script
from runner.runs.checks import check_variable
from runner.runs.schedulers import flags
from runner.site_files import load_site
from tests.conftest import need


def draft() -> Draft:
    return Draft(lambda word, program: flags.refuse((word,), program), check_variable)


def from_words(*argv, folder=Path("/here")):
    """(EDF, job file, notes) made from a command line."""
    adopted, job = Adopted(), draft()
    program = read_command_line(argv, adopted, job, folder)
    return data(adopted, job, program)


def from_script(text):
    adopted, job = Adopted(), draft()
    program = read_script("#!/bin/bash\n" + text, adopted, job, Path("/here"), "job.sbatch")
    return data(adopted, job, program)


def data(adopted, job, program):
    edf = tomllib.loads(rewrite("", adopted.changes()))
    return edf, tomllib.loads(rewrite("", job.changes(program, "it", "s"))), adopted.notes


DOCKER = ("docker", "run")


@pytest.mark.parametrize(
    ("words", "edf"),
    [
        (("-v", "/a:/b"), {"mounts": ["/a:/b"]}),
        (("-v/a:/b:ro,z",), {"mounts": ["/a:/b:ro"]}),
        (("--volume=./a:/b:rw,rslave",), {"mounts": ["/here/a:/b:rslave"]}),
        (("--mount", "type=bind,src=/a,dst=/b,readonly"), {"mounts": ["/a:/b:ro"]}),
        (("--mount=type=bind,source=/a,target=/b,bind-propagation=private",), {"mounts": ["/a:/b:private"]}),
        (("-w", "/w"), {"workdir": "/w"}),
        (("-e", "A=b c", "--env=B=${HOME}"), {"env": {"A": "b c", "B": "$${HOME}"}}),
        (("--read-only",), {"writable": False}),
        (("--entrypoint", ""), {"entrypoint": False}),
        (("--gpus", "all"), {"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
        (("--device", "nvidia.com/gpu=all"), {"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
        (("--device=/dev/gdrdrv",), {"devices": ["/dev/gdrdrv"]}),
        (("--unsetenv", "A"), {"env": {"A": ""}}),
        (
            ("--annotation", "com.hooks.cxi.enabled=true"),
            {"annotations": {"com": {"hooks": {"cxi": {"enabled": "true"}}}}},
        ),
        (("-itd", "--rm"), {}),
    ],
)
def test_options_of_docker_and_podman(words, edf):
    for engine in ("docker", "podman"):
        found, job, _ = from_words(engine, "run", *words, "a/b:1", "sh", "-c", "echo $A")
        assert found == {"image": "a/b:1", "entrypoint": True, "writable": True} | edf
        assert job["command"] == ["sh", "-c", "echo $A"]


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("nvcr.io/nvidia/pytorch:24.06-py3", "nvcr.io#nvidia/pytorch:24.06-py3"),
        ("localhost:5000/a:1", "localhost:5000#a:1"),
        ("docker.io/library/ubuntu:24.04", "library/ubuntu:24.04"),
        ("docker://ghcr.io/a/b", "ghcr.io#a/b"),
        ("ubuntu", "ubuntu"),
        ("user@reg.example#a/b", "user@reg.example#a/b"),
    ],
)
def test_registries_are_written_as_every_version_of_enroot_reads_them(given, image):
    assert from_words("podman", "run", given)[0]["image"] == image


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("-v", "vol:/a", "i"), "-v vol:/a: not carried over: 'vol' is a volume"),
        (("-v", "/a", "i"), "anonymous volume"),
        (("-v", "/a:/b:O", "i"), "-v /a:/b:O (O): not carried over"),
        (("--mount", "type=tmpfs,dst=/a", "i"), "not tmpfs"),
        (("--tmpfs", "/a", "i"), "cannot mount tmpfs"),
        (("--network=none", "i"), "--network=none: not carried over"),
        (("-v", "/dev/shm:/dev/shm", "i"), "-v /dev/shm:/dev/shm: not needed"),
        (("--network=host", "i"), "--network=host: not needed"),
        (("--privileged", "i"), "--privileged: not carried over"),
        (("--memory", "4g", "i"), "memory in [resources]"),
        (("-e", "A", "i"), "-e A: not needed: the container gets the host's variables"),
        (("-e", "HF_TOKEN=hf_x", "i"), "HF_TOKEN=…: not carried over: it is a secret"),
        (("-e", "A=", "i"), "-e A=: not carried over: in an EDF an empty value unsets"),
        (("--env-file", "nope", "i"), "--env-file nope: not carried over: cannot read the file: No such file"),
        (("--entrypoint", "/e", "i"), "--entrypoint /e: becomes the beginning of the command"),
        (("--rootfs", "/a"), "--rootfs /a: not carried over"),
        (("--some-new-option=1", "i"), "--some-new-option=1: not carried over"),
        (("localhost/x",), "localhost/x: not carried over: the image is only in the engine's storage"),
        ((), "the command line names no image"),
    ],
)
def test_what_is_not_carried_over_is_said(words, note):
    notes = from_words(*DOCKER, *words)[2]
    assert [line for line in notes if note in line], notes
    assert "hf_x" not in "".join(notes)


def test_files_of_variables_are_read(tmp_path):
    (tmp_path / "v.env").write_text("# c\nA=1 2\nB=$C ${D}\nE\n\n")
    edf, _, notes = from_words(*DOCKER, "--env-file", "v.env", "i", folder=tmp_path)
    assert edf["env"] == {"A": "1 2", "B": "$C $${D}"}
    assert (
        "--env-file v.env (E): not needed: the container gets the host's variables, unless the image sets them" in notes
    )


def test_flags_of_pyxis():
    edf, job, notes = from_words(
        *("--container-image=nvcr.io#nvidia/pytorch:24.06-py3", "--container-mounts=/a:/b:ro+private,/c,tmpfs:/t"),
        *("--container-workdir", "/w", "--container-readonly", "--container-entrypoint", "--container-mount-home"),
        *("--container-env=A", "--container-remap-root", "--container-name=x", "--container-entrypoint-log"),
    )
    assert edf == {
        "image": "nvcr.io#nvidia/pytorch:24.06-py3",
        "workdir": "/w",
        "entrypoint": True,
        "writable": False,
        "mounts": ["/a:/b:ro+private", "/c:/c", "${HOME}:${HOME}"],
        "env": {"PYTHONNOUSERSITE": "1"},
        "annotations": {"com": {"pyxis": {"entrypoint_log": "true"}}},
    }
    assert "command" not in job and "script" not in job
    for word in ("(tmpfs:/t)", "--container-env=A (A)", "--container-remap-root", "--container-name=x"):
        assert [note for note in notes if note.startswith(("--container-mounts", word)) and word in note], word


def test_an_environment_that_is_named_becomes_the_base():
    edf, job, _ = from_words("srun", "-N2", "--environment=ngc", "--container-writable", "python", "x.py")
    assert edf == {"base_environment": "ngc", "writable": True}
    assert (job["script"], job["launcher"], job["resources"]) == ("x.py", "none", {"nodes": 2})


def test_other_programs_are_refused_by_name():
    with pytest.raises(RunnerError, match="cannot adopt a command line that starts with 'apptainer'"):
        from_words("apptainer", "exec", "x.sif", "true")


SCRIPT = r"""#SBATCH --job-name=train --nodes=4 --ntasks-per-node=1
#SBATCH --gpus-per-node=4 --cpus-per-task=288 -t 12:00:00
#SBATCH --container-image nvcr.io\#nvidia/pytorch:25.01-py3   # a comment
#SBATCH --signal=B:USR1@300 --constraint=thp_never --array=1-3
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
export NCCL_DEBUG=INFO HF_HOME="$SCRATCH/hf" HF_TOKEN=hf_secret
WHERE=$PWD/images
IMAGE=$WHERE/ngc.sqsh
WHEN=$(date +%s)
FLAGS="--label --kill-on-bad-exit=1"
ARGS=(
  --lr 1e-5   # the rate
  --out "/out dir"
)
ARGS+=(--seed 1)
cat > hosts <<EOF
srun this is no command
EOF
srun hostname
#SBATCH --nodes=9
A=1 srun $FLAGS --container-image=$IMAGE --container-mounts="$SCRATCH:/scratch,/d/$WHEN:/d" \
  --container-env=NCCL_DEBUG torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 \
  --rdzv_endpoint=$MASTER_ADDR:29500 train.py --config x.yaml "${ARGS[@]}" > log.txt 2>&1
"""


def test_a_batch_script_becomes_an_edf_and_a_job_file():
    edf, job, notes = from_script(SCRIPT)
    assert edf == {
        "image": "/here/images/ngc.sqsh",
        "mounts": ["${SCRATCH}:/scratch", "/d/${WHEN}:/d"],
        "env": {"HF_HOME": "${SCRATCH}/hf", "NCCL_DEBUG": "INFO"},
    }
    assert job == {
        "summary": "s",
        "script": "train.py",
        "environment": "it",
        "launcher": "torchrun",
        "arguments": ["--config", "x.yaml", "--lr", "1e-5", "--out", "/out dir", "--seed", "1"],
        "save_seconds": 300,
        "resources": {"nodes": 4, "gpus_per_node": 4, "cpus_per_task": 72, "time": "12:00:00", "tasks_per_node": 4},
        "env": {"A": "1"},
        "slurm": {"sbatch": ["--constraint=thp_never"], "srun": ["--label", "--kill-on-bad-exit=1"]},
    }
    text = "\n".join(notes)
    for word in (
        "--job-name=train: a run is named after its job file: rename the file to train.toml",
        "--array=1-3: not carried over: the tasks of an array would share one run folder",
        "line 6: set -euo pipefail: not carried over",
        "line 7: MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1): not needed",
        "HF_TOKEN=…: not carried over: it is a secret",
        "line 11: WHEN=$(date +%s): the EDF needs ${WHEN}",
        "line 18: cat > hosts <<EOF: not carried over",
        "line 21: srun hostname: not carried over: a job runs one program",
        "line 22: #SBATCH --nodes=9: not carried over",
        "> log.txt: not carried over: a run has one log",
        "--nnodes=$SLURM_NNODES: not needed",
    ):
        assert word in text, (word, text)
    assert "hf_secret" not in text


@pytest.mark.parametrize(
    ("step", "job"),
    [
        ("srun -n8 -N2 python -u x.py 1", {"script": "x.py", "arguments": ["1"], "launcher": "srun"}),
        ("srun python -O x.py", {"command": ["python", "-O", "x.py"], "launcher": "none"}),
        ("srun ./x.sh a", {"script": "./x.sh", "arguments": ["a"], "launcher": "none"}),
        ("srun bash -c 'cd /x && y \"$A\"'", {"command": ["bash", "-c", 'cd /x && y "$A"'], "launcher": "none"}),
        ("srun bash -c \"y $A \\$B\"", {"command": ["bash", "-c", 'exec bash -c "y ${A} \\$B"'], "launcher": "none"}),
        ("srun python -m torch.distributed.run --nproc-per-node 2 -m a.b -x", {"command": ["python", "-m", "a.b", "-x"],
         "launcher": "torchrun"}),
        ("srun accelerate launch --num_processes 8 --multi_gpu x.py", {"script": "x.py", "launcher": "accelerate"}),
        ("srun torchrun x.py --id $SLURM_JOB_ID", {"command": ["bash", "-c", 'exec python x.py --id "${SLURM_JOB_ID}"'],
         "launcher": "torchrun"}),
        ("srun x --at $(date +%s)", {"command": ["bash", "-c", "exec x --at $(date +%s)"], "launcher": "none"}),
        ("srun env A=1 -u B nvidia-smi", {"command": ["nvidia-smi"], "launcher": "none"}),
        ("srun docker run -v /a:/b i:1 python x.py", {"script": "x.py", "launcher": "none"}),
        ("CMD='python x.py 1'; srun $CMD", {"script": "x.py", "arguments": ["1"], "launcher": "none"}),
        ("/usr/bin/time srun torchrun x.py", {"script": "x.py", "launcher": "torchrun"}),
        ("torchrun x.py", {"script": "x.py", "launcher": "torchrun"}),
        ("echo 1", {"command": ["bash", "job.sbatch"], "launcher": "none"}),
    ],
)  # fmt: skip
def test_programs_of_steps(step, job):
    made = from_script(step)[1]
    assert {key: made.get(key) for key in ("script", "arguments", "command", "launcher") if key in made} == job


@pytest.mark.parametrize(
    ("words", "resources"),
    [
        (("-N2", "-n8"), {"nodes": 2, "tasks_per_node": 4}),
        (("-N2", "-n7"), {"nodes": 2}),
        (("--gres=gpu:h100:4",), {"gpus_per_node": 4}),
        (("--gpus=8", "--nodes", "2"), {"gpus_per_node": 4, "nodes": 2}),
        (("--gpus-per-task=1", "--ntasks-per-node=4"), {"gpus_per_node": 4, "tasks_per_node": 4}),
        (("--mem=450G", "-t", "30", "-pnormal", "-A", "a1"),
         {"memory": "450G", "time": "30", "partition": "normal", "account": "a1"}),
    ],
)  # fmt: skip
def test_counts_are_those_of_a_job_file(words, resources):
    assert from_words("srun", *words, "--container-image=i", "true")[1]["resources"] == resources


def test_counts_of_zero_are_not_carried_over():
    _, job, notes = from_words("srun", "-N0", "-n4", "--container-image=a/b", "true")
    assert job["resources"] == {"tasks_per_node": 4}
    assert any(note.startswith("-N0") for note in notes)


def test_what_a_condition_sets_stays_unknown_and_is_said():
    edf, _, notes = from_script("if [ -n x ]; then\n  I=/a.sqsh\nfi\nsrun --container-image=$I true\n")
    assert edf["image"] == "${I}"
    assert "line 3: I=/a.sqsh: the EDF needs ${I}: export it where you launch, or write its value" in notes


IDIOMS = r"""
: "${APPS:=/fsx}"
: "${IMAGE:=$APPS/$(pwd)/x.sqsh}"
export SCRIPT=${SCRIPT:=train.py}
AUTO=""
if [ -d /opt/x ]; then
  AUTO="--auto-resume=1"
  declare -a MORE=(--container-writable)
fi
declare -a ARGS=(
  --container-image $IMAGE   # comment
  --container-mounts ./data:/data,`pwd`:/here2
)
srun $AUTO -l "${ARGS[@]}" "${MORE[@]}" python $SCRIPT "${NOWHERE[@]}"
"""


def test_idioms_of_batch_scripts_in_the_wild():
    edf, job, notes = from_script(IDIOMS)
    assert edf == {
        "image": "/fsx//here/x.sqsh",
        "writable": True,
        "mounts": ["/here/data:/data", "/here:/here2"],
    }
    assert job["command"] == ["bash", "-c", 'exec python train.py "${NOWHERE[@]}"']
    assert job["slurm"] == {"srun": ["--label"]}
    text = "\n".join(notes)
    for word in (
        "$PWD: read as /here, as if you submitted the script from that folder",
        "line 9: MORE=(…): the command is inside a conditional",
        "line 15: $AUTO: not carried over: its value is unknown",
    ):
        assert word in text, (word, text)


def test_variables_that_only_the_script_knows_are_said():
    _, job, notes = from_script('A=$(date)\nB=1\nC=(x)\nsrun --container-image=i run "$A" "$(id) $B ${C[0]}" "$HOME"\n')
    assert job["command"][2] == 'exec run "${A}" "$(id) $B ${C[0]}" "${HOME}"'
    text = "\n".join(notes)
    for word in (
        "line 2: A=$(date): the step uses $A",
        "$B: the step uses this variable",
        "$C: the step uses this variable",
    ):
        assert word in text, (word, text)
    assert "HOME" not in text


def test_a_script_of_another_language_is_refused():
    with pytest.raises(RunnerError, match="it is not a shell script") as caught:
        read_script("#!/usr/bin/env python3\n", Adopted(), draft(), Path("/here"), "x.py")
    assert "-- srun" in caught.value.fix


LINES = r"""
a 'b c' "d e" f\ g "" '' $A ${A} "$A" "${A}x" ~/x $'t\tb'
a --x="$A/y":$A '$A' "\$A" \$A "\\" "a\b" 'it'\''s' a"b"'c'
a x${U:-d e}y "${U:-d}" ${A:-n} "a#b" a#b # comment
a \
  b "c\
d" 'e
f'; a second && a third || a fourth | a fifth & a sixth
a "(x)" [y] {z} = a=b "${ARR[@]}" ${ARR[@]} end
"""


def test_words_are_those_that_bash_reads(tmp_path):
    """Bash itself runs the same lines, with a function that prints its words."""
    head = "ARR=(one 'two 2' \"$A\")\n"
    show = 'a() { printf "%s\\0" "$#" "$@" >> "$OUT"; }\n'
    environ = {"A": "val", "HOME": "/h", "OUT": str(tmp_path / "out"), "PATH": "/usr/bin:/bin"}
    # each command on its own, since a pipe and `||` run some of them never or elsewhere
    ours = [command for command in commands(head + LINES) if command.words[0].raw == "a"]
    for command in ours:
        subprocess.run(("bash", "-c", head + show + command.raw), env=environ, check=True)
    theirs = (tmp_path / "out").read_text().split("\0")
    arrays = {"ARR": ("one", "two 2", "val")}
    read: list[str] = []
    for command in ours:
        words: list[str] = []
        for word in command.words[1:]:
            assert not word.computed, word
            words += arrays[word.array] if word.array else (expand(word.text, environ, "a word"),)
        # an unquoted array with blanks in it splits, as bash does
        bare = [i for i, word in enumerate(command.words[1:]) if word.raw == "${ARR[@]}"]
        if bare:
            words = [*words[:-3], "two", "2", *words[-2:]] if words[-3] == "two 2" else words
        if "x${U:-d e}y" in command.raw:
            words = [piece for word in words for piece in (word.split() if word == "xd ey" else [word])]
        read += [str(len(words)), *words]
    assert read == theirs[:-1]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12), max_size=5))
def test_any_quoted_words_are_read_back(texts):
    import shlex

    [command] = commands("x " + shlex.join(texts))
    assert [expand(word.text, {}, "a word") for word in command.words[1:]] == texts


_words = st.text(st.sampled_from("ab1 $'\"\\#;&*~{}é=-"), min_size=1, max_size=8)
_path = st.text(st.sampled_from("abc-_.é"), min_size=1, max_size=6).map(lambda text: f"/{text}")
_environments = st.builds(
    Environment,
    name=st.just("it"),
    path=st.none(),
    image=_path | st.just("nvcr.io#nvidia/pytorch:24.06-py3"),
    workdir=st.none() | _path,
    entrypoint=st.booleans(),
    writable=st.booleans(),
    mounts=st.lists(
        st.builds(Mount, _path | st.just("${SCRATCH}/x"), _path, st.sampled_from([(), ("ro",)])),
        max_size=3,
        unique=True,
    ).map(tuple),
    env=st.dictionaries(
        st.sampled_from(["A", "B_1", "xy"]), _words.map(lambda text: text.replace("${", "")), max_size=3
    ),
)


@pytest.mark.parametrize("engine", ["pyxis", "podman"])
@settings(max_examples=40)
@given(environment=_environments)
def test_what_emit_writes_for_an_engine_is_adopted_again(engine, environment):
    if engine == "podman" and environment.image.startswith("/"):
        return  # it is entered as a folder: see test_what_is_not_carried_over_is_said
    script, _ = emitted(environment, load_site("generic-slurm"), engine, {"SCRATCH": "/s"})
    adopted = Adopted()
    read_script(script.replace('"$@"', "true"), adopted, draft(), Path("/here"), "x")
    assert adopted.image == environment.image
    assert (adopted.workdir or None) == environment.workdir
    assert (bool(adopted.entrypoint), adopted.writable) == (environment.entrypoint, environment.writable)
    assert tuple(adopted.mounts) == environment.mounts
    assert adopted.env == environment.env


def _help(*argv):
    text = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    assert text
    return text.splitlines()


def test_which_options_of_podman_stand_alone_is_what_podman_says():
    need("podman")
    for line in _help("podman", "run", "--help"):
        words = line.split()
        at = next((index for index, word in enumerate(words[:2]) if word.startswith("--")), None)
        if at is None:
            continue
        # `--volume stringArray   Bind mount …` against `--rm   Remove the container …`
        stands_alone = line.index(words[at]) + len(words[at]) + 1 < len(line) and line.split(words[at], 1)[1][1] == " "
        assert (words[at][2:] in CONTAINER.flags) == stands_alone, line


@pytest.mark.parametrize(("program", "grammar"), [("srun", SRUN), ("sbatch", SBATCH)])
def test_which_options_of_slurm_stand_alone_is_what_slurm_says(program, grammar, slurm):
    lines = slurm.run((program, "--help")).stdout.splitlines()
    # `--label`, `--nodes=N`, `--compress[=library]`
    found = [match for line in lines if (match := re.match(r"\s+(?:-\w, +)?--([\w-]+)(\[?=)?", line))]
    alone = {match[1] for match in found if match[2] != "="}
    # where the help text errs: the manual, and the program, want a value
    alone -= {"container", "export", "mem", "wrap"}
    assert {match[1] for match in found} & (grammar.flags | grammar.optional) == alone
    assert len(found) > 60


def runner(folder, *words):
    argv = (sys.executable, "-m", "runner", "env", "adopt", *words)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_prints_an_edf_and_says_the_rest(tmp_path):
    done = runner(tmp_path, "--", "docker", "run", "--rm", "-v", "/a:/b", "ubuntu:24.04", "true")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        '# Made from a command line by `runner env adopt`.\nimage = "ubuntu:24.04"\nentrypoint = true\n'
        'writable = true\nmounts = ["/a:/b"]\n'
    )
    assert "--rm: not needed" in done.stderr


def test_the_command_says_that_it_adds_writable_to_a_line_of_pyxis(tmp_path):
    """Real pyxis makes the root read-only there; --container-writable and --container-readonly decide it."""
    image = ("--", "srun", "--container-image=ubuntu:24.04")
    for words, added in (
        (image, True),
        ((*image, "--container-writable"), False),
        ((*image, "--container-readonly"), False),
    ):
        done = runner(tmp_path, *words, "true")
        assert ("without --container-writable, pyxis makes it read-only" in done.stderr) == added


def test_the_command_writes_both_files_that_launch_takes(tmp_path):
    (tmp_path / "runner.toml").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n" + SCRIPT)
    done = runner(tmp_path, "job.sbatch", "-o", "edf/t.toml", "--job", "jobs/t.toml")
    assert done.stdout == "edf/t.toml\njobs/t.toml\n", done.stderr
    argv = (sys.executable, "-m", "runner", "launch", "t", "--site", "generic-slurm", "--dry-run")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SCRATCH": "/s", "WHEN": "1", "PWD": "/p"}
    environ |= {"RUNNER_IMAGES": "/i", "PYTHONPATH": ":".join(sys.path)}
    launched = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert launched.returncode == 0, launched.stderr
    assert "#SBATCH --nodes=4" in launched.stdout and "train.py" in launched.stdout
    again = runner(tmp_path, "job.sbatch", "-o", "edf/t.toml")
    assert again.returncode == 1 and "edf/t.toml already exists" in again.stderr


def test_into_an_edf_adds_and_keeps_its_comments(tmp_path):
    edf = tmp_path / "e.toml"
    edf.write_text('# mine\nimage = "old" # why\nmounts = [\n  "/a", # a\n]\n\n# about\n[env]\nA = "1"\n')
    words = ("--", "podman", "run", "-v", "/a:/a", "-v", "/c:/d", "-e", "B=2", "--entrypoint=", "new:1")
    dry = runner(tmp_path, "--into", "e.toml", "--dry-run", *words)
    assert edf.read_text().startswith('# mine\nimage = "old"')
    done = runner(tmp_path, "--into", "e.toml", *words)
    assert done.stdout == "e.toml\n" and "image: 'old' becomes 'new:1'" in done.stderr
    assert edf.read_text() == dry.stdout
    assert dry.stdout.splitlines() == [
        *("# mine", 'image = "new:1" # why', "mounts = [", '  "/a", # a', '  "/c:/d",', "]", "entrypoint = false"),
        *("writable = true", "", "# about", "[env]", 'A = "1"', 'B = "2"'),
    ]


def test_a_command_without_a_container_makes_no_edf(tmp_path):
    done = runner(tmp_path, "--", "srun", "-n1", "true")
    assert done.returncode == 1 and "does not use a container" in done.stderr and done.stdout == ""
    assert runner(tmp_path).returncode == 2
