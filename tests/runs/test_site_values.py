"""What a site says reaches the job: its own lines run before the step and in each task, its limits are kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from runner.environments.engines import attach
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.runs.job import Job, Resources
from runner.runs.resolve import resolve
from runner.site import Site
from runner.site_files import load_site
from tests.runs.scripts import (
    BARE,
    LOCAL,
    SLURM,
    command_job,
    given,
    overrides,
    run_locally,
    script,
    shell_job,
    write_run,
)

SHOW = 'echo "$NCCL_BUFFSIZE $NCCL_NET $NCCL_PROTO $LATER"'


def test_variables_of_the_sites_own_script_reach_the_tasks_and_the_environments_win(tmp_path: Path) -> None:
    """host_setup runs in bash on the host; `inside` takes what it has set over an image's; [env] and the job win."""
    plugin = tmp_path / "it's a profile.sh"
    plugin.write_text("export NCCL_BUFFSIZE=4 NCCL_NET=theirs NCCL_PROTO=theirs; unset NOT_SET_BEFORE; : $UNKNOWN\n")
    site = replace(
        LOCAL,
        host_setup=(f'. "{plugin}"',),
        inside=("NCCL",),
        task_setup=('export LATER="$NCCL_BUFFSIZE-later"',),
    )
    environment = Environment("bare", None, "", env={"NCCL_NET": "mine"})
    job = replace(shell_job(SHOW, env={"NCCL_PROTO": "the job's"}), environment=environment)
    attachment = replace(attach(BARE, LOCAL, "host"), prefix=("env", "NCCL_NET=mine"))
    done = run_locally(write_run(tmp_path / "run", job, attachment, site), extra_environ={"NCCL_NET": "the user's"})
    assert "4 mine the job's 4-later" in (tmp_path / "run/job.log").read_text() if done.stdout == "" else done.stdout
    assert done.returncode == 0, done.stderr


def test_a_line_of_the_site_that_fails_ends_the_job_before_its_step(tmp_path: Path) -> None:
    """A fabric that is not set up must not run over TCP for hours."""
    site = replace(LOCAL, host_setup=(". /nowhere/set_nccl_env.sh",))
    done = run_locally(write_run(tmp_path, shell_job("echo started"), site=site))
    assert done.returncode == 1 and "started" not in done.stdout
    assert "this line of the site's setup failed: . /nowhere/set_nccl_env.sh" in done.stderr


def test_a_site_without_own_lines_leaves_no_trace() -> None:
    assert "the site" not in script(command_job("true"), site=SLURM)


@pytest.mark.parametrize(
    "job",
    [
        replace(command_job("true"), resources=Resources(memory="0")),
        command_job("true", sbatch=("--mem=0",)),
        command_job("true", srun=("--mem=0",)),
    ],
)
def test_a_flag_that_the_sites_slurm_refuses_is_refused_before(job: Job) -> None:
    with pytest.raises(RunnerError, match="the site 'alps-clariden' refuses --mem=0") as caught:
        script(job, site=load_site("alps-clariden", {"HOME": "/h"}))
    assert "--mem=450G" in caught.value.why


def test_cpus_and_memory_follow_the_gpus_where_the_site_ties_them() -> None:
    """TWCC: 1 GPU : 4 CPUs : 90 GB, and never more."""
    twcc = load_site("twcc", {"HOME": "/h"})

    def resources(**asked: object) -> Resources:
        return resolve((overrides(launcher="srun", **asked),), BARE, twcc).resources

    whole, part = resources(), resources(gpus_per_node=2)
    assert (whole.gpus_per_node, whole.tasks_per_node, whole.cpus_per_task, whole.memory) == (8, 8, 4, "720G")
    assert (part.tasks_per_node, part.cpus_per_task, part.memory) == (2, 4, "180G")
    assert resources(gpus_per_node=2, memory="10G").memory == "10G"
    job = resolve((overrides(gpus_per_node=2),), BARE, twcc)
    assert "#SBATCH --gres=gpu:2\n" in script(job, site=twcc)
    assert "1 GPU" not in str(job.origins["memory"]) and "man-vip" in str(job.origins["memory"])
    with pytest.raises(RunnerError, match="requests 10 CPUs per node, but its GPUs allow only 8") as caught:
        resources(gpus_per_node=2, cpus_per_task=5)
    assert caught.value.fix.startswith("--cpus-per-task 4,")


def test_memory_is_written_as_for_sbatch() -> None:
    """Slurm also reads 64GB and 64g; a site's limit per GPU that it would not read is refused, not left out."""
    twcc = replace(load_site("twcc", {"HOME": "/h"}), memory_per_gpu="90GB")

    def memory(site: Site, **asked: object) -> str | None:
        return resolve((overrides(gpus_per_node=2, **asked),), BARE, site).resources.memory

    assert [memory(twcc, memory=text) for text in ("64GB", "64g", "500mb", "7")] == ["64GB", "64g", "500mb", "7"]
    assert memory(twcc) == "180GB"
    with pytest.raises(RunnerError, match="cannot read the memory '90 GB'"):
        memory(replace(twcc, memory_per_gpu="90 GB"))


def test_an_unknown_number_of_cpus_is_said() -> None:
    """One CPU per process starves eight GPUs; where nobody knows the node, the user is told."""
    known = load_site("gcp-a3-mega", {"HOME": "/h"})  # by its machine type
    assert not resolve((overrides(),), BARE, known).notes
    mega = replace(known, cpus_per_node=None)
    assert [note for note in resolve((overrides(),), BARE, mega).notes if "--cpus-per-task N" in note]
    assert not resolve((given(command=("true",), cpus_per_task=8),), BARE, mega).notes
    clariden = replace(load_site("alps-clariden", {"HOME": "/h"}), account="g1")
    assert not resolve((overrides(),), BARE, clariden).notes


def test_annotations_of_a_site_lie_under_the_environments_own() -> None:
    """With Alps Extended Images the hook cxi is off for every environment, unless one says otherwise."""
    site = load_site("alps-extended-images", {"HOME": "/h"})
    environment = Environment("x", None, "/i.sqsh", entrypoint=True)
    text = attach(environment, site, environ={}).files["environment.toml"]
    assert 'cxi.enabled = "false"' in text and 'PMIX_MCA_psec = "native"' in text
    own = replace(environment, annotations={"com.hooks.cxi.enabled": "true"})
    assert '"false"' not in attach(own, site, environ={}).files["environment.toml"]
    step = script(command_job("true"), attach(environment, site, environ={}), site).partition("    srun ")[2]
    assert "--mpi=pmix" in step and "--network=disable_rdzv_get" in step


def test_the_fabric_of_gcp_is_handed_to_pyxis_by_name() -> None:
    """The image's variables beat the host's: each of the site's stands in --container-env, or is set inside."""
    site = load_site("gcp-a3-high", {"HOME": "/h"})
    text = script(command_job("true"), attach(Environment("x", None, "/i.sqsh"), site, environ={}), site)
    named = text.split("--container-env=")[1].split()[0].strip("'\"").split(",")
    prefix = text.partition("'export ")[2].partition('"$@"')[0]
    assert {*named, *(name for name in site.env if name in prefix)} == set(site.env)
    assert "/run/tcpx-${SLURM_JOB_ID?" in prefix  # the value is known in the job only
    assert "/run/tcpx-${SLURM_JOB_ID}:/run/tcpx-${SLURM_JOB_ID}" in text
